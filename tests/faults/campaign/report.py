"""What a campaign found, as JSON and for people."""

from __future__ import annotations

import json
import statistics
from typing import Any

from faults.campaign.outcome import FINDINGS, Outcome


def summary(outcome: Outcome, **about: Any) -> dict[str, Any]:
    """Return what is worth keeping of a campaign; all of it fits into JSON."""
    found = {kind: 0 for kind in FINDINGS}
    for finding in outcome.findings:
        found[finding.kind] += 1
    ended = dict(sorted(outcome.fetches.items()))
    return {
        **about,
        "rounds": outcome.rounds,
        "rounds by kind": dict(sorted(outcome.rounds_by_kind.items())),
        "operations": sum(outcome.operations.values()),
        "operations by kind": dict(sorted(outcome.operations.items())),
        "faults": sum(outcome.faults.values()),
        "faults by kind": dict(sorted(outcome.faults.items())),
        "fetches that delivered": ended.pop("OK", 0),
        "fetches that delivered by kind": dict(sorted(outcome.paths.items())),
        "bytes delivered and compared": outcome.bytes,
        "fetches that failed, by reason": ended,
        "offers, by how they ended": dict(sorted(outcome.offers.items())),
        "rests at which everything was counted": outcome.checks,
        "most bytes grown between rests": outcome.grown,
        "findings": found,
        "seconds until noticed": {
            what: {
                "times": len(times),
                "median": round(statistics.median(times), 4),
                "max": round(max(times), 4),
            }
            for what, times in outcome.detection.items()
            if times
        },
        "details": [f"{finding.kind}: {finding.why}" for finding in outcome.findings[:50]],
    }


def show(result: dict[str, Any]) -> str:
    """Return the summary as lines for a terminal."""
    lines = []
    for name, value in result.items():
        if isinstance(value, dict):
            inner = ", ".join(f"{key}: {json.dumps(item)}" for key, item in value.items())
            lines.append(f"  {name}: {inner or '-'}")
        elif name == "details":
            lines += [f"  {detail}" for detail in value]
        else:
            lines.append(f"  {name}: {value}")
    return "\n".join(lines)
