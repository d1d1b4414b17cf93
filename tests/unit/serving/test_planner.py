"""The planner: what it recommends, when it says don't, and what it says when nothing will do."""

from __future__ import annotations

import dataclasses
import re

import pytest

from kvxfer.errors import InvalidError
from kvxfer.serving import Link, Slo
from kvxfer.serving.cost_model import DecodeCost, PrefillCost
from kvxfer.serving.goodput import Search
from kvxfer.serving.placement import judge
from kvxfer.serving.planner import Question, fleets, plan, router_of, shifts
from kvxfer.serving.promise import Promise
from kvxfer.serving.rate_matching import Bottleneck, Lengths, closed_loop, decode_batch, estimate
from kvxfer.serving.sim import EngineSpec, Fleet, Role, always_local, always_remote, simulate
from kvxfer.serving.workload import Job, Workload, fixed, generate, lognormal

# Roughly a 70B model on four H100s: 9,000 tokens/s of prefill, 30 ms a step and more with load.
PREFILL, DECODE = PrefillCost(0.02, 1.1e-4), DecodeCost(0.028, 3e-4, 2e-8)
FAST = Link(25e9, 163_840, latency=0.005, layers=80)


def engine(role: Role, **fields) -> EngineSpec:
    values = {"kv_tokens": 400_000, "gpus": 4, "batch_tokens": 8_192} | fields
    return EngineSpec(role, PREFILL, DECODE, **values)


P, D, A = (engine(role, chunk_tokens=1_024) for role in Role)
LONG = generate(80, 2.0, lognormal(6_000, 0.5, 30_000), lognormal(200, 0.5, 800), seed=4)


def ask(workload: Workload = LONG, slo: Slo | None = None, **fields) -> Question:
    values = {"engines": (P, D, A), "link": FAST, "gpus": 16} | fields
    return Question(workload, slo or Slo(3.0, 0.05), **values)


def fleet(prefill: int, decode: int, both: int = 0, link: Link = FAST) -> Fleet:
    return Fleet(((P, prefill), (D, decode), (A, both)), link)


# Closed form.


def test_batches_by_hand() -> None:
    lengths = Lengths(1_000, 200)
    decode = engine(Role.DECODE)
    per_sequence = 3e-4 + 2e-8 * 1_100
    batch, why = decode_batch(decode, lengths, 0.05)
    assert (batch, why) == (pytest.approx(0.022 / per_sequence), Bottleneck.DECODE)
    assert decode_batch(decode, lengths, 10.0)[1] is Bottleneck.SEQUENCES
    tight = engine(Role.DECODE, kv_tokens=11_000)
    assert decode_batch(tight, lengths, 10.0) == (10.0, Bottleneck.MEMORY)
    assert decode_batch(decode, lengths, 0.028) == (0.0, Bottleneck.TPOT)


def test_the_slower_side_is_the_bottleneck() -> None:
    lengths, slo = Lengths(6_000, 200), Slo(3.0, 0.05)
    few, many = (estimate(fleet(n, 2), lengths, slo) for n in (1, 8))
    assert few.bottleneck is Bottleneck.PREFILL
    assert many.bottleneck is Bottleneck.DECODE
    assert many.rate > 2 * few.rate
    assert few.tpot < many.tpot <= 0.05 * (1 + 1e-9)
    slow = dataclasses.replace(FAST, bytes_per_second=1e9)
    assert estimate(fleet(8, 2, link=slow), lengths, slo).bottleneck is Bottleneck.LINK


@pytest.mark.parametrize(("prefill", "decode"), [(1, 1), (2, 1), (1, 2)])
def test_closed_form_and_simulation_agree_on_a_smooth_load(prefill, decode) -> None:
    jobs = generate(400, 1.0, fixed(3_000), fixed(150), seed=1)
    lengths = Lengths(3_000, 150)
    expected = closed_loop(fleet(prefill, decode), lengths, 64)
    result = simulate(fleet(prefill, decode), jobs, always_remote, concurrency=64)
    assert result.request_rate == pytest.approx(expected.rate, rel=0.12)


def test_an_aggregated_engine_by_steps() -> None:
    jobs = generate(400, 1.0, fixed(3_000), fixed(150), seed=1)
    alone = Fleet(((engine(Role.BOTH, max_sequences=24), 1),))
    expected = estimate(alone, Lengths(3_000, 150), Slo(1e6, 1e6))
    assert expected.bottleneck is Bottleneck.SEQUENCES
    result = simulate(alone, jobs, always_local, concurrency=24)
    assert result.request_rate == pytest.approx(expected.rate, rel=0.12)


# Goodput.


def test_goodput_by_both_meanings() -> None:
    question = ask()
    search = Search(fleet(2, 2), LONG, question.slo, router_of(question))
    joint, separate = (search.goodput(promise) for promise in Promise)
    assert 0 < joint.rate <= separate.rate * 1.05
    assert joint.result is not None
    assert joint.result.attainment(question.slo) >= 0.9
    beyond = simulate(fleet(2, 2), LONG.at_rate(joint.rate * 1.3), router_of(question)())
    assert beyond.attainment(question.slo) < 0.9


def test_goodput_of_a_fleet_that_can_never_keep_its_promise() -> None:
    question = ask(slo=Slo(0.05, 0.05))
    found = Search(fleet(1, 1), LONG, question.slo, router_of(question)).goodput(Promise.JOINT)
    assert (found.rate, found.result) == (0.0, None)


# Plans.


def test_no_fleet_exceeds_the_gpus_and_none_leaves_room() -> None:
    big = dataclasses.replace(D, gpus=8)
    question = ask(engines=(P, big, A), gpus=24)
    found = list(fleets(question))
    assert len({one.name for one in found}) == len(found)
    assert {"2P2D", "4P1D", "2P1D+2A", "0P0D+6A", "1P1D+3A"} >= {"2P2D", "4P1D"}
    names = {one.name for one in found}
    assert {"2P2D", "4P1D", "2P1D+2A", "6A"} <= names
    for one in found:
        assert 24 - 4 < one.gpus <= 24
        assert one.count(Role.PREFILL) == 0 or one.count(Role.DECODE) + one.count(Role.BOTH)


def test_long_prompts_and_a_strict_tpot_call_for_disaggregation() -> None:
    answer = plan(ask(slo=Slo(3.0, 0.04)), confirm=2, precision=0.1)
    assert answer.infeasible is None
    assert answer.best is not None
    assert answer.best.fleet.count(Role.PREFILL)
    together = next(one for one in answer.candidates if not one.fleet.count(Role.PREFILL))
    assert together.simulated is not None, "the alternative is always looked at"
    assert together.rate < answer.best.rate


@pytest.mark.parametrize(
    "question",
    [
        ask(link=Link(0.1e9, 163_840, layers=80)),  # 1 GbE: 610 tokens/s
        ask(generate(80, 4.0, fixed(150), fixed(300), seed=1), Slo(0.5, 0.2)),
        ask(slo=Slo(3.0, 0.5), engines=(P, D, dataclasses.replace(A, chunk_tokens=None))),
    ],
    ids=["slow link", "short prompts", "loose tpot"],
)
def test_do_not_disaggregate(question) -> None:
    answer = plan(question, confirm=1, precision=0.1)
    assert answer.best is not None
    assert not answer.best.fleet.count(Role.PREFILL)


def test_prices_decide_where_they_differ() -> None:
    lengths = (fixed(4_000), fixed(150))
    cheap = dataclasses.replace(A, price_per_hour=8.0)
    dear = (dataclasses.replace(P, price_per_hour=40.0), dataclasses.replace(D, price_per_hour=40))
    question = ask(generate(100, 2.0, *lengths), engines=(*dear, cheap), gpus=8)
    answer = plan(question, confirm=2, precision=0.1)
    assert answer.best is not None
    assert answer.best.fleet.name == "2A"
    result = answer.best.simulated.result
    assert result.cost_per_million == pytest.approx(16 / 3_600 / result.output_rate * 1e6)


def test_the_cheapest_that_serves_the_rate_asked_for() -> None:
    question = ask(gpus=8, rate=0.2)
    answer = plan(question, confirm=2, precision=0.1)
    assert answer.best is not None
    assert answer.best.rate >= 0.2


@pytest.mark.parametrize(
    ("question", "message"),
    [
        (ask(slo=Slo(3.0, 0.02)), r"decode step takes 31.* promised are 20 ms a token"),
        (ask(slo=Slo(0.1, 0.05)), r"without any queue; promised are 100"),
        (ask(rate=1_000.0), r"16 GPUs serve .* asked for are 1e\+03"),
    ],
)
def test_infeasible_because(question, message) -> None:
    answer = plan(question, confirm=1, precision=0.2)
    assert answer.best is None
    assert answer.infeasible is not None
    assert re.search(message, answer.infeasible), answer.infeasible


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: plan(ask(gpus=2)), "2 GPUs are too few"),
        (lambda: ask(link=None), "kvxfer bench"),
        (lambda: ask(engines=(P,)), "no kind of engine that decodes"),
        (lambda: ask(engines=(P, D, D)), "same role"),
        (lambda: Lengths(0, 10), "prompt_tokens"),
        (lambda: Lengths(10, 10, 1.0), "cached_share"),
    ],
)
def test_questions_without_an_answer(make, message) -> None:
    with pytest.raises(InvalidError, match=message):
        make()


def test_what_changes_when_the_load_does() -> None:
    found = {shift.what: shift for shift in shifts(ask(engines=(P, D), gpus=32))}
    prefill = {what: shift.fleet.count(Role.PREFILL) for what, shift in found.items()}
    assert prefill["prompts x 2"] > prefill["prompts x 0.5"]
    assert prefill["answers x 0.5"] >= prefill["answers x 2"]
    assert found["half of each prompt cached"].estimate.rate > found["prompts x 2"].estimate.rate


# Placements: what a link can hide.


@pytest.mark.parametrize(
    ("name", "rate", "hidden"),
    [("NVLink", 450e9, True), ("InfiniBand", 25e9, True), ("10 GbE", 1.25e9, False)],
)
def test_placements(name, rate, hidden) -> None:
    link = Link(rate, 327_680, layers=80)
    placement = judge(name, link, PrefillCost(0.0, 1e-4), 32_768)
    assert placement.needed_bytes_per_second == pytest.approx(3.277e9, rel=1e-3)
    assert placement.hidden is hidden
    assert ("not hidden" in placement.verdict) is not hidden
    # Hidden, the last of 80 layers remains; else all of it but what ran beside 79 of them.
    transfer = 32_768 * 327_680 / rate
    expected = transfer / 80 if hidden else transfer - 3.2768 * 79 / 80
    assert placement.exposed == pytest.approx(expected)


def test_a_workload_all_at_once_needs_a_rate() -> None:
    jobs = Workload((Job(0.0, 100, 5), Job(0.0, 100, 5)))
    with pytest.raises(InvalidError, match="at once"):
        plan(ask(jobs))
