"""Gates with hysteresis: what keeps decisions from flapping."""

from __future__ import annotations

import math
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Gate:
    """A condition that is switched on at a high mark, off below a low one, and not too often."""

    on: bool = False
    since: float = -math.inf
    """When it was last switched, on the caller's clock."""

    def update(self, level: float, high: float, low: float, dwell: float, now: float) -> Gate:
        """Return the gate as `level` leaves it at `now`.

        Between `low` and `high` it stays as it is, and for `dwell` seconds after a switch it stays
        whatever the level. A clock that was set back ends the dwell: else it could last for ever.
        """
        if 0.0 <= now - self.since < dwell:
            return self
        wanted = level >= (low if self.on else high)
        return self if wanted == self.on else Gate(wanted, now)


@dataclass(frozen=True, slots=True)
class Gates:
    """The gates that one decision looks at.

    `saturated` belongs to the prefill pool and is shared by all decode engines; `pressured` belongs
    to one decode engine. Who calls `decide` keeps them and passes in what the last call returned.
    """

    saturated: Gate = field(default_factory=Gate)
    pressured: Gate = field(default_factory=Gate)
