"""Short campaigns, and the controls that show that they would notice."""

from __future__ import annotations

import pytest
from faults.campaign.driver import Finding, Outcome, run
from faults.campaign.report import show, summary
from faults.campaign.schedule import TRANSPORTS, Schedule, Step, draw_schedule
from faults.campaign.shrink import as_test, shrink

STEPS = 30


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_round(transport: str) -> None:
    outcome = run(draw_schedule(7, transport, STEPS))
    assert outcome.findings == []
    assert outcome.fetches["OK"] > 0


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("sabotage", "kind"), [("wrong", "wrong"), ("late", "late"), ("leak", "leak")]
)
def test_what_goes_wrong_is_noticed(sabotage: str, kind: str) -> None:
    """The controls: a flipped bit, a handle that lasts too long, a descriptor that is kept."""
    schedule = draw_schedule(7, "loopback", STEPS)
    if sabotage == "late":
        asked = {"id": 10_000, "number": 0, "consumer": "decode-0", "skip": 0, "codec": "raw"}
        never_offered = [step for step in schedule.steps if step.args.get("number") != 0]
        schedule = Schedule(
            schedule.seed,
            schedule.transport,
            schedule.agents,
            schedule.offers,
            (Step(0.0, "fetch", {**asked, "timeout": 0.1}), *never_offered),
        )
    outcome = run(schedule, sabotage)
    assert kind in {finding.kind for finding in outcome.findings}


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_schedule_comes_from_its_seed(transport: str) -> None:
    one, same, other = (draw_schedule(seed, transport, 100) for seed in (3, 3, 4))
    assert one == same != other
    assert Schedule.from_json(one.to_json()) == one
    assert {step.kind for step in one.steps} > {"offer", "fetch", "ready", "rest"}


def test_shrinking_finds_the_steps_that_do_it() -> None:
    schedule = draw_schedule(5, "tcp", 100)
    guilty = [17, 60]
    wanted = [schedule.steps[i] for i in guilty]
    kept = shrink(schedule, lambda part: all(step in part.steps for step in wanted))
    assert [schedule.steps[i] for i in kept] == wanted
    text = as_test(schedule, "draw_schedule(5, 'tcp', 100)", kept, [Finding("wrong", "two\nlines")])
    compile(text, "made", "exec")
    assert str(kept) in text


def test_the_summary_counts() -> None:
    total = Outcome()
    for _ in range(2):
        total.add(
            Outcome(
                rounds=1,
                findings=[Finding("late", "so late")],
                detection={"killed": [0.1, 0.3], "partitioned": [], "corrupted": []},
            )
        )
    result = summary(total, seed=1)
    assert result["rounds"] == 2
    assert result["findings"]["late"] == 2
    assert result["findings"]["wrong"] == 0
    assert result["seconds until noticed"] == {"killed": {"times": 4, "median": 0.2, "max": 0.3}}
    assert "so late" in show(result)
