"""Messages that come twice, in another order, or late: each whole, over one connection."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

Messages = Sequence[bytes]

# How many messages that takes, and what becomes of them.
SHUFFLES: dict[str, tuple[int, Callable[[Messages], Messages]]] = {
    "repeat": (1, lambda messages: [*messages, *messages]),
    "swap": (2, lambda messages: [*reversed(messages)]),
    "late": (4, lambda messages: [*messages[1:], messages[0]]),
}
_PATIENCE = 0.4  # seconds that a message waits for others


class Shuffle:
    """Holds back what passes one way of a connection until the messages are there."""

    def __init__(self, how: str) -> None:
        self.how = how
        self._wanted, self._order = SHUFFLES[how]
        self._held = bytearray()
        self._begin = 0  # of what is held, in all that passed
        self._spans: list[tuple[int, int]] = []
        self._end = time.monotonic() + _PATIENCE
        self.over = self.happened = False

    def feed(self, at: int, piece: bytes, spans: Sequence[tuple[int, int]]) -> bytes:
        """Take a piece from place `at` on, in which these messages begin; return what goes on."""
        if not self._held:
            self._begin = at
        self._held += piece
        self._spans += [span for span in spans if span[0] >= self._begin]
        if not self._spans:
            return self._let_go()
        if len(self._spans) < self._wanted:
            return b""
        taken = [slice(*(place - self._begin for place in span)) for span in self._spans]
        taken = taken[: self._wanted]
        if taken[-1].stop > len(self._held):
            return b""
        before, behind = self._held[: taken[0].start], self._held[taken[-1].stop :]
        changed = self._order([bytes(self._held[span]) for span in taken])
        self.over = self.happened = True
        return bytes(before) + b"".join(changed) + bytes(behind)

    def tick(self) -> bytes:
        """Return what goes on when nothing more comes: all of it, after a while."""
        if time.monotonic() < self._end:
            return b""
        self.over = True
        return self._let_go()

    def _let_go(self) -> bytes:
        held, self._held = bytes(self._held), bytearray()
        return held
