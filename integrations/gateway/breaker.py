"""A circuit breaker: an engine that fails again and again is left alone for a while."""

from __future__ import annotations

MOST_COOLDOWN = 60.0  # seconds


class Breaker:
    """Opens after some failures in a row; then lets one request at a time try again.

    Who asks `ready` and then sends a request calls `begin`, and when it is over `succeeded`,
    `failed`, or `abandoned` where it ended without a word about the engine.
    """

    def __init__(self, failures: int, cooldown: float) -> None:
        self._limit, self._cooldown = failures, cooldown
        self._failures = 0
        self._opened = 0
        self._until = 0.0
        self._trial = False

    def ready(self, now: float) -> bool:
        """Whether a request may be sent."""
        return not self._opened or (now >= self._until and not self._trial)

    @property
    def open(self) -> bool:
        """Whether it has tripped and nothing has succeeded since."""
        return self._opened > 0

    def begin(self) -> None:
        """Note that a request is sent."""
        self._trial = self._opened > 0

    def succeeded(self) -> None:
        """Note that the engine did what it was asked, or refused a client's mistake."""
        self._failures = self._opened = 0
        self._trial = False

    def failed(self, now: float) -> None:
        """Note that the engine did not do what it was asked."""
        self._failures += 1
        if self._opened and not self._trial:
            return  # one that was sent before it tripped
        if self._failures >= self._limit or self._opened:
            self._opened += 1
            self._until = now + min(MOST_COOLDOWN, self._cooldown * 2 ** (self._opened - 1))
        self._trial = False

    def abandoned(self) -> None:
        """Note that nothing was learnt."""
        self._trial = False
