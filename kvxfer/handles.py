"""Offers and fetches as their owners hold them."""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import os
import time
from collections.abc import Callable, Generator
from types import TracebackType
from typing import TYPE_CHECKING

from kvxfer._streams import stream_handle
from kvxfer.errors import Error, InvalidError, Status, TransferError

if TYPE_CHECKING:
    from kvxfer._core import Fetch as CoreFetch
    from kvxfer._core import Offer as CoreOffer
    from kvxfer.cache import Cache
    from kvxfer.ticket import Ticket

# A wait is made of waits of this length, so that Ctrl-C and other signals get their turn.
_SLICE = 0.2


@dataclasses.dataclass(frozen=True)
class Report:
    """What a fetch did, and by which way."""

    bytes: int
    """Bytes of KV that were verified and written into the blocks."""
    seconds: float
    """From `Agent.fetch` to the end."""
    chunks: int
    path: str
    """``"staged"``: through slots of the arena; ``"direct"``: straight into the blocks."""
    transport: str
    why: str
    """Why this transport and not a better one."""
    wire_order: str
    """Axes on the wire, outermost first: L layer, P plane, T token tile, H kv head, N token."""
    link: str
    peers: tuple[str, ...]
    codec: str = "raw"
    """How the elements were encoded on the wire: of ``auto``, what was chosen."""
    codec_why: str = ""
    """Why that codec, and what was converted."""
    wire_bytes: int = 0
    """Bytes that crossed the link for `bytes`."""
    exceptions: int = 0
    """Rows that travelled as they are although their codec is another: NaN, infinity, 2^100."""
    clamped: int = 0
    """Elements beyond the largest that the cache's type can hold; they became that."""
    retry_after: float = 0.0
    """After BUSY, seconds after which the same may work; 0 where nothing was said."""
    path_why: str = ""
    """Why that path."""

    @property
    def gbps(self) -> float:
        """Gigabytes (1e9) of KV a second."""
        return self.bytes / self.seconds / 1e9 if self.seconds > 0 else 0.0


class _Handle(abc.ABC):
    """What offers and fetches have in common: they end, once."""

    _core: CoreOffer | CoreFetch

    def __init__(self, watch: Callable[[Fetch | Offer], None]) -> None:
        self._watch = watch  # has the agent keep a handle until its callbacks have run
        self._callbacks: list[Callable[[], None]] = []

    @property
    @abc.abstractmethod
    def _ended(self) -> bool:
        """Whether it has ended, in whatever way."""

    def fileno(self) -> int:
        """Return a descriptor that becomes readable at the end, for poll() and event loops.

        It belongs to the handle: don't read or close it.
        """
        return self._core.event_fd()

    def _wait(self, timeout: float | None) -> bool:
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            left = _SLICE if deadline is None else min(_SLICE, deadline - time.monotonic())
            if self._core.wait(max(left, 0.0)):
                return True
            if deadline is not None and time.monotonic() >= deadline:
                return False

    async def _wait_async(self) -> None:
        import asyncio  # only where it is used: it takes its time to load

        loop = asyncio.get_running_loop()
        if self._ended:
            return
        ended = loop.create_future()

        def wake() -> None:
            if not ended.done():
                ended.set_result(None)

        descriptor = os.dup(self.fileno())  # a loop takes one reader for each
        try:
            loop.add_reader(descriptor, wake)
            try:
                await ended
            finally:
                loop.remove_reader(descriptor)
        finally:
            os.close(descriptor)

    def _run_callbacks(self) -> None:
        while self._callbacks:  # when one raises, those behind it stay for the next call
            self._callbacks.pop(0)()


class Fetch(_Handle):
    """One request's KV on its way into local blocks. Ends by its deadline at the latest.

    ``fetch.wait()`` or ``await fetch`` raise `TransferError` unless everything arrived and was
    verified; ``fetch.done`` and ``fetch.status`` never raise. Made by `Agent.fetch`.
    """

    _core: CoreFetch

    def __init__(
        self,
        core: CoreFetch,
        cache: Cache,
        watch: Callable[[Fetch | Offer], None],
        failed: Callable[[str], None] | None = None,
    ) -> None:
        super().__init__(watch)
        self._core = core
        self._cache = cache  # its memory is being written
        self._failed = failed  # is told once, when somebody asks what went wrong

    @property
    def done(self) -> bool:
        """Whether it has ended, in whatever way. Then nothing writes into the blocks any more.

        But for one with which a GPU does not come back when the agent is closed. That ends with
        CLOSED, and its message says so.
        """
        return self._core.done()

    @property
    def _ended(self) -> bool:
        return self.done

    @property
    def status(self) -> Status | None:
        """How it ended; None while it has not."""
        return Status(self._core.status()[0]) if self.done else None

    @property
    def error(self) -> TransferError | None:
        """The exception that `wait` would raise; None while running and after success."""
        if not self.done:
            return None
        name, message = self._core.status()
        if name == "OK":
            return None
        error = TransferError(Status(name), message, self._core.report().retry_after or None)
        failed, self._failed = self._failed, None
        if failed is not None:
            failed(str(error))
        return error

    def wait(self, timeout: float | None = None) -> None:
        """Block until it has ended.

        Parameters
        ----------
        timeout
            Seconds; left out, the fetch's own deadline ends the wait.

        Raises
        ------
        TransferError
            It ended without delivering: the blocks must not be used.
        TimeoutError
            `timeout` passed first. The fetch goes on.
        """
        if not self._wait(timeout):
            raise TimeoutError(f"the fetch has not ended within {timeout} s; it goes on")
        error = self.error
        if error is not None:
            raise error

    def cancel(self, *, done: bool = False) -> None:
        """End it with CANCELLED, unless it has ended.

        On return nothing writes into the blocks any more, now or later; see `done` for what
        happens where the agent is closed while a GPU hangs. A fetch that goes direct
        waits for its producer to say so, up to `heartbeat_timeout`.

        Parameters
        ----------
        done
            False: the offer is kept, so that the fetch can be tried again. True: this consumer is
            done with it for good, as after `Agent.decline`, and its producers need not wait for
            it. Also for a fetch that has failed by itself. They are told in the background, within
            another timeout of the fetch.
        """
        self._core.cancel(done)

    def add_done_callback(self, callback: Callable[[Fetch], None]) -> None:
        """Have `callback` called once by `Agent.poll` after the end, in the polling thread.

        The agent keeps the fetch until then. Added after the end, the next `poll` calls it.
        """
        self._callbacks.append(lambda: callback(self))
        self._watch(self)

    @property
    def report(self) -> Report:
        """Bytes, seconds, path and transport so far."""
        core = self._core.report()
        return Report(
            core.bytes,
            core.seconds,
            core.chunks,
            core.path,
            core.transport,
            core.why,
            core.wire_order,
            core.link,
            tuple(core.peers),
            core.codec,
            core.codec_why,
            core.wire_bytes,
            core.exceptions,
            core.clamped,
            core.retry_after,
            core.path_why,
        )

    def __await__(self) -> Generator[None, None, None]:
        return self._finish().__await__()

    async def _finish(self) -> None:
        import asyncio
        import concurrent.futures

        try:
            await self._wait_async()
        except asyncio.CancelledError:
            # Whoever wanted the blocks has gone: don't write into them any more. On the direct path
            # that may have to wait for the producer, which the loop must not.
            with concurrent.futures.ThreadPoolExecutor(1) as thread:
                ending = asyncio.get_running_loop().run_in_executor(thread, self.cancel)
                while not ending.done():
                    with contextlib.suppress(asyncio.CancelledError):
                        await asyncio.shield(ending)
            raise
        self.wait()

    def __repr__(self) -> str:
        state = self.status.value if self.status else "running"
        return f"<kvxfer.Fetch {state}>"


class Offer(_Handle):
    """The blocks of one request, kept for its consumers until released.

    Don't reuse the blocks before `released` is true. As a context manager it releases at the end of
    the block. Made by `Agent.offer`.
    """

    _core: CoreOffer

    def __init__(
        self,
        core: CoreOffer,
        cache: Cache,
        ticket: Ticket,
        watch: Callable[[Fetch | Offer], None],
    ) -> None:
        super().__init__(watch)
        self._core = core
        self._cache = cache  # its memory is being read
        self._ticket = ticket

    @property
    def id(self) -> str:
        return self._core.id

    @property
    def ticket(self) -> Ticket:
        """What a consumer needs to fetch: a dict that survives JSON. Send it any way you like."""
        return self._ticket

    def mark_ready(self, layer: str | int, *, stream: object = None) -> None:
        """Say that a layer's KV is complete in the blocks: it may be sent from now on.

        Parameters
        ----------
        layer
            Its name, or its index in the cache.
        stream
            Of a cache on a GPU, as in `Agent.offer`: it is sent when the stream has done what it
            was told until now.
        """
        layers = self._cache.layout.layers
        if isinstance(layer, str):
            if layer not in layers:
                raise InvalidError(
                    f"offer {self.id!r}: there is no layer {layer!r}; the cache has "
                    f"{len(layers)}, the first is {layers[0]!r}"
                )
            layer = layers.index(layer)
        elif not 0 <= layer < len(layers):
            raise InvalidError(
                f"offer {self.id!r}: there is no layer {layer}, the cache has {len(layers)}"
            )
        self._core.mark_ready(layer, stream_handle(stream, self._cache))

    def mark_all_ready(self, *, stream: object = None) -> None:
        """Say that all layers are complete."""
        self._core.mark_all_ready(stream_handle(stream, self._cache))

    def release(self) -> None:
        """Withdraw it: running fetches of it end with CANCELLED."""
        self._core.release()

    @property
    def released(self) -> bool:
        """Whether the blocks may be reused: nobody reads them any more, now or later."""
        return self._core.released()

    @property
    def _ended(self) -> bool:
        return self.released

    @property
    def status(self) -> Status | None:
        """How it ended: OK when all expected consumers were served, or declined; else why."""
        return Status(self._core.outcome()[0]) if self._core.wait(0.0) else None

    @property
    def message(self) -> str:
        """Why it ended, in words."""
        return self._core.outcome()[1]

    def wait(self, timeout: float | None = None) -> Status:
        """Block until the blocks may be reused; return how the offer ended.

        Raises
        ------
        TimeoutError
            `timeout` seconds passed first. Left out, the lease ends the wait.
        TransferError
            CLOSED: the agent was closed while a GPU hung, which may read the blocks until the
            process ends. They must not be reused.
        """
        if not self._wait(timeout):
            raise TimeoutError(f"offer {self.id!r} is not released after {timeout} s")
        if not self.released:
            raise TransferError(Status.CLOSED, self.message)
        return Status(self._core.outcome()[0])

    def add_released_callback(self, callback: Callable[[Offer], None]) -> None:
        """Have `callback` called once by `Agent.poll` after the release, in the polling thread.

        The agent keeps the offer until then. Added after the release, the next `poll` calls it.
        """
        self._callbacks.append(lambda: callback(self))
        self._watch(self)

    def __await__(self) -> Generator[None, None, Status]:
        return self._finish().__await__()

    async def _finish(self) -> Status:
        await self._wait_async()
        return self.wait()

    def __enter__(self) -> Offer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()
        if not self._wait(10.0):  # a pack of one chunk is all that can be under way
            raise Error(f"offer {self.id!r}: a pack is still reading its blocks after 10 s")
        if not self.released:
            raise TransferError(Status.CLOSED, self.message)

    def __repr__(self) -> str:
        state = self.status.value if self.status else "open"
        return f"<kvxfer.Offer {self.id!r} {state}>"
