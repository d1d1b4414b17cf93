"""How long tokens took, counted rather than listed."""

from __future__ import annotations

import math

PER_DECADE = 400
"""Bins, so that a bin is 0.6 % wide."""


class StepTimes:
    """A histogram of the times between tokens, in bins of equal ratio."""

    def __init__(self) -> None:
        self._bins: dict[int, int] = {}
        self.count = 0
        self.seconds = 0.0

    def add(self, seconds: float, tokens: int) -> None:
        """Count `tokens` that each came `seconds` after the one before."""
        index = round(math.log10(seconds) * PER_DECADE)
        self._bins[index] = self._bins.get(index, 0) + tokens
        self.count += tokens
        self.seconds += seconds * tokens

    @property
    def mean(self) -> float:
        """Mean time between tokens; 0 when there were none."""
        return self.seconds / self.count if self.count else 0.0

    def percentile(self, percent: float) -> float:
        """Return the time that `percent` of the tokens did not exceed."""
        wanted = self.count * percent / 100
        seen = 0
        for index in sorted(self._bins):
            seen += self._bins[index]
            if seen >= wanted:
                return float(10 ** (index / PER_DECADE))
        return 0.0
