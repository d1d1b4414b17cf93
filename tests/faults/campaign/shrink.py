"""Cuts a schedule that fails down to a short one that still fails."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from faults.campaign.driver import run
from faults.campaign.outcome import Finding
from faults.campaign.schedule import Schedule


def fails_like(
    schedule: Schedule, findings: Sequence[Finding], *, tries: int = 2, sabotage: str | None = None
) -> bool:
    """Whether a run of it finds a fault of the same kind. Races need more than one try."""
    kinds = {finding.kind for finding in findings}
    return any(
        kinds & {finding.kind for finding in run(schedule, sabotage).findings} for _ in range(tries)
    )


def shrink(
    schedule: Schedule, fails: Callable[[Schedule], bool], *, seconds: float = 120.0
) -> list[int]:
    """Return the numbers of few steps that fail by themselves, as far as the time goes.

    Parts of the list are left out, halves first, then quarters, down to single steps.
    """
    end = time.monotonic() + seconds
    kept, parts = list(range(len(schedule.steps))), 2
    while len(kept) > 1:
        size = -(-len(kept) // parts)
        for begin in range(0, len(kept), size):
            fewer = kept[:begin] + kept[begin + size :]
            if time.monotonic() > end:
                return kept
            if fails(schedule.keep(fewer)):
                kept, parts = fewer, max(2, parts - 1)
                break
        else:
            if size == 1:
                break
            parts = min(len(kept), 2 * parts)
    return kept


def as_test(schedule: Schedule, drawn: str, kept: Sequence[int], findings: list[Finding]) -> str:
    """Return the source of a test that runs these steps. `drawn` is how the schedule was made."""
    why = "; ".join(dict.fromkeys(finding.why.splitlines()[0][:90] for finding in findings[:2]))
    steps = "".join(f"    # {schedule.steps[i].kind} {schedule.steps[i].args}\n" for i in kept[:30])
    return (
        f"def test_seed_{schedule.seed}_over_{schedule.transport}() -> None:\n"
        f'    """{why}"""\n{steps}'
        f"    schedule = {drawn}.keep({list(kept)})\n"
        "    assert run(schedule).findings == []\n"
    )
