"""What one case gave."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence
from typing import Any

from kvxfer.bench.case import Case


@dataclasses.dataclass
class Rival:
    """Something else that moves as many bytes, timed in turns with ours."""

    name: str
    seconds: list[float] = dataclasses.field(default_factory=list)
    why: str = ""
    """Why there are no figures."""


@dataclasses.dataclass
class Result:
    """Times of one case, in turns with those of what it is compared with."""

    case: Case
    why: str = ""
    """Why there are no figures."""
    seconds: list[float] = dataclasses.field(default_factory=list)
    """Of each transfer, from `fetch()` to the end of the last `wait()`."""
    limit: Rival | None = None
    """What the same link carries without us."""
    rivals: list[Rival] = dataclasses.field(default_factory=list)
    cpu_seconds: tuple[float, float] = (0.0, 0.0)
    """That the serving and the running side used, all timed transfers together."""
    wire_bytes: int = 0
    verified: str = "no"
    """``"no"``, ``"exact"``, or ``"within 0.02"``."""
    report: dict[str, str] = dataclasses.field(default_factory=dict)
    """Transport, path, codec and why, as the fetch reports them."""

    def rate(self, seconds: float) -> float:
        """Return GB/s, 1e9 bytes of KV a second."""
        return self.case.bytes / seconds / 1e9

    @property
    def gbps(self) -> float:
        return self.rate(statistics.median(self.seconds))

    def percentile(self, share: float) -> float:
        """Return microseconds that `share` of the transfers took at most."""
        ordered = sorted(self.seconds)
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))] * 1e6

    def ratio(self, rival: Rival) -> float:
        """Return how many times as fast as the rival ours was: the median of the turns' ratios.

        1 is as fast; a limit's share.
        """
        pairs = zip(rival.seconds, self.seconds, strict=False)
        return statistics.median(theirs / ours for theirs, ours in pairs)

    @property
    def cpu_per_gb(self) -> tuple[float, float]:
        moved = self.case.bytes * len(self.seconds) / 1e9
        return self.cpu_seconds[0] / moved, self.cpu_seconds[1] / moved

    def record(self) -> dict[str, Any]:
        """Return the object that ``--json`` prints."""
        case = self.case
        record: dict[str, Any] = {
            "kind": "result",
            "name": case.name,
            "why": self.why or None,
            "case": case.frame(),
            "bytes": case.bytes,
            "block_bytes": case.block_bytes,
            "blocks": case.runs,
        }
        if self.why:
            return {**record, "gb_per_s": None}
        serving, running = self.cpu_per_gb
        return {
            **record,
            "gb_per_s": {
                "median": self.gbps,
                "min": self.rate(max(self.seconds)),
                "max": self.rate(min(self.seconds)),
            },
            "latency_us": {
                "p50": self.percentile(0.5),
                "p90": self.percentile(0.9),
                "p99": self.percentile(0.99),
            },
            "repeat": len(self.seconds),
            "limit": self._compared(self.limit, "share") if self.limit else None,
            "rivals": [self._compared(rival, "ratio") for rival in self.rivals],
            "cpu_s_per_gb": {"serve": serving, "run": running},
            "wire_bytes": self.wire_bytes,
            "verified": self.verified,
            "report": self.report,
        }

    def _compared(self, rival: Rival, ratio: str) -> dict[str, Any]:
        if not rival.seconds:
            return {"name": rival.name, "gb_per_s": None, ratio: None, "why": rival.why}
        return {
            "name": rival.name,
            "gb_per_s": self.rate(statistics.median(rival.seconds)),
            ratio: self.ratio(rival),
            "why": None,
        }


def failed(results: Sequence[Result]) -> int:
    """Return how many cases have no figures."""
    return sum(bool(result.why) for result in results)
