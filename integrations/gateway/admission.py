"""How many requests are let in, and how many may wait."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Callable

LOOK_AGAIN = 0.25
"""Seconds between two looks at the capacity while somebody waits: a breaker that may be tried
again, or an engine that is taken back, wakes nobody."""


class RefusedError(Exception):
    """A request is not let in; come back after some seconds."""

    def __init__(self, status: int, reason: str, message: str, retry_after: int) -> None:
        super().__init__(message)
        self.status, self.reason, self.retry_after = status, reason, retry_after


class Admission:
    """Lets in as many requests at a time as `capacity` says, the others in the order they came."""

    def __init__(self, capacity: Callable[[], int], most_waiting: int, timeout: float) -> None:
        self._capacity, self._most, self._timeout = capacity, most_waiting, timeout
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._timer: asyncio.TimerHandle | None = None
        self.inside = 0

    @property
    def waiting(self) -> int:
        """Requests that wait."""
        return len(self._waiting)

    @contextlib.asynccontextmanager
    async def slot(self) -> AsyncIterator[None]:
        """Hold a place.

        Raises
        ------
        RefusedError
            There are too many already (429), none came free in time, or there are none (503).
        """
        if self._waiting or self.inside >= self._capacity():
            await self._wait()
        else:
            self.inside += 1
        try:
            yield
        finally:
            self.inside -= 1
            self.wake()

    def wake(self) -> None:
        """Let in who waits and fits: a place came free, or there is a new engine."""
        while self._waiting and self.inside < self._capacity():
            place = self._waiting.popleft()
            if not place.done():
                self.inside += 1
                place.set_result(None)

    async def _wait(self) -> None:
        if self._capacity() <= 0:
            raise RefusedError(503, "no_engine", "no decode engine can take a request now", 2)
        if len(self._waiting) >= self._most:
            raise RefusedError(
                429,
                "queue_full",
                f"{self.inside} requests are served and {len(self._waiting)} wait already",
                self._retry_after(),
            )
        place = asyncio.get_running_loop().create_future()
        self._waiting.append(place)
        if self._timer is None:
            self._look_again()
        try:
            await asyncio.wait_for(asyncio.shield(place), self._timeout)
        except BaseException as error:
            if place.done() and not place.cancelled():  # let in while it gave up
                self.inside -= 1
                self.wake()
            else:
                place.cancel()
                with contextlib.suppress(ValueError):
                    self._waiting.remove(place)
            if isinstance(error, asyncio.TimeoutError):
                raise RefusedError(
                    503,
                    "queue_timeout",
                    f"no engine came free within {self._timeout:g} s",
                    self._retry_after(),
                ) from None
            raise

    def _look_again(self) -> None:
        self.wake()
        self._timer = None
        if self._waiting:
            self._timer = asyncio.get_running_loop().call_later(LOOK_AGAIN, self._look_again)

    def _retry_after(self) -> int:
        """Return seconds: the longer the queue, the later."""
        return 1 + min(29, 10 * len(self._waiting) // max(1, self._most))
