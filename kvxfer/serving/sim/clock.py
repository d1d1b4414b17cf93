"""Simulated time."""

from __future__ import annotations

import heapq
from collections.abc import Callable


class Clock:
    """Runs what is to happen in order of time, and of being asked for where times are equal."""

    def __init__(self) -> None:
        self.now = 0.0
        self.events = 0
        self._queue: list[tuple[float, int, Callable[[], None]]] = []

    def at(self, when: float, what: Callable[[], None]) -> None:
        """Call `what` at `when`, which is now or later."""
        self.events += 1
        heapq.heappush(self._queue, (when, self.events, what))

    def run(self) -> None:
        """Run until nothing is left to happen."""
        queue = self._queue
        while queue:
            self.now, _, what = heapq.heappop(queue)
            what()
