"""Since when something waits, and when that gets a line in the log."""

from __future__ import annotations

import time
from dataclasses import dataclass, field


@dataclass
class Wait:
    """One wait; it begins when it is made."""

    began: float = field(default_factory=time.monotonic)
    _told: float = field(default=0.0, init=False)

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.began

    def overdue(self, patience: float) -> bool:
        """Return whether so many seconds have passed since it began, or since this was last so."""
        now = time.monotonic()
        if now - max(self.began, self._told) <= patience:
            return False
        self._told = now
        return True
