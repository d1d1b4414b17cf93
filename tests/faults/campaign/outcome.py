"""What came of a round, or of several."""

from __future__ import annotations

import collections
import dataclasses

FINDINGS = ("wrong", "late", "leak", "error", "unexplained", "died")


@dataclasses.dataclass(frozen=True)
class Finding:
    """Something that must not happen."""

    kind: str  # one of FINDINGS
    why: str


@dataclasses.dataclass
class Outcome:
    """What came of a round, or of several."""

    rounds: int = 0
    rounds_by_kind: collections.Counter[str] = dataclasses.field(
        default_factory=collections.Counter
    )
    operations: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    faults: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    fetches: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    paths: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    offers: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    bytes: int = 0
    detection: dict[str, list[float]] = dataclasses.field(
        default_factory=lambda: {"killed": [], "partitioned": [], "corrupted": []}
    )
    grown: int = 0  # most bytes by which a process had grown between two rests
    checks: int = 0  # rests at which all was counted
    findings: list[Finding] = dataclasses.field(default_factory=list)

    def add(self, other: Outcome) -> None:
        self.rounds += other.rounds
        self.checks += other.checks
        for name in ("rounds_by_kind", "operations", "faults", "fetches", "paths", "offers"):
            getattr(self, name).update(getattr(other, name))
        for kind, times in other.detection.items():
            self.detection[kind] += times
        self.bytes += other.bytes
        self.grown = max(self.grown, other.grown)
        self.findings += other.findings
