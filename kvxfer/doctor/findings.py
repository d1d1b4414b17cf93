"""What the doctor says of one thing."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass


class State(enum.Enum):
    """How much it matters."""

    OK = "ok"
    INFO = "info"
    """Absent, or worth knowing; nothing that is used here suffers."""
    WARN = "warn"
    """Transfers work, but slower or less safely than they could."""
    BAD = "bad"
    """Something that should work here does not."""


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at."""

    id: str
    """Stable and machine-readable: ``nic.port_down``."""
    what: str
    found: str
    state: State = State.OK
    why: str = ""
    """Why it hurts."""
    fix: str = ""
    """What to do, as a command where there is one."""

    @property
    def group(self) -> str:
        return self.id.partition(".")[0]

    @property
    def hurts(self) -> bool:
        return self.state in (State.WARN, State.BAD)

    def record(self) -> dict[str, str]:
        """Return the object that ``--json`` prints."""
        return {
            "id": self.id,
            "group": self.group,
            "what": self.what,
            "found": self.found,
            "state": self.state.value,
            "why": self.why,
            "fix": self.fix,
        }


def counts(findings: Iterable[Finding]) -> dict[str, int]:
    """Return how many findings have each state."""
    count = {state.value: 0 for state in State}
    for finding in findings:
        count[finding.state.value] += 1
    return count
