"""decide(): each reason, what must be monotone, and that it does not flap."""

from __future__ import annotations

import dataclasses
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvxfer.errors import InvalidError
from kvxfer.serving import (
    DecodeEngine,
    Gate,
    Gates,
    Link,
    Place,
    Policy,
    PrefillPool,
    Prompt,
    Reason,
    Slo,
    break_even_tokens,
    decide,
)

LINK = Link(25e9, 327_680, latency=0.02, layers=80)
SLO = Slo(2.0, 0.05)
POOL = PrefillPool(2, tokens_per_second=10_000, request_seconds=0.01)
ENGINE = DecodeEngine(
    kv_used=0.3, running=20, tokens_per_second=10_000, step_seconds=0.03, chunk_tokens=512
)


# Enough to find what breaks; more were run when these were written.
FEW = settings(max_examples=60)


def ask(
    prompt: Prompt,
    pool: PrefillPool = POOL,
    engine: DecodeEngine = ENGINE,
    *,
    link: Link = LINK,
    slo: Slo = SLO,
    policy: Policy | None = None,
    gates: Gates | None = None,
    now: float = 0.0,
):
    return decide(prompt, pool, engine, link, slo, policy or Policy(), gates or Gates(), now)


def change(what, **fields):
    return dataclasses.replace(what, **fields)


@pytest.mark.parametrize(
    ("prompt", "pool", "engine", "place", "reason"),
    [
        (Prompt(50_000), change(POOL, healthy=0), ENGINE, Place.LOCAL, Reason.NO_PREFILL),
        (Prompt(50_000, 49_990), POOL, ENGINE, Place.LOCAL, Reason.FULL_HIT),
        (Prompt(50_000, 49_901), POOL, ENGINE, Place.LOCAL, Reason.SHORT),
        (Prompt(99), POOL, ENGINE, Place.LOCAL, Reason.SHORT),
        (
            Prompt(1_000),
            change(POOL, inflight_tokens=40_000),
            ENGINE,
            Place.LOCAL,
            Reason.PREFILL_SATURATED,
        ),
        (
            Prompt(50_000),
            change(POOL, inflight_tokens=40_000),
            change(ENGINE, waiting_tokens=1e6),
            Place.REMOTE,
            Reason.BOTH_SATURATED,
        ),
        (Prompt(100), POOL, change(ENGINE, kv_used=0.8), Place.REMOTE, Reason.DECODE_PRESSURE),
        (Prompt(2_000), POOL, ENGINE, Place.REMOTE, Reason.LONG),
        (Prompt(1_999, 1), POOL, change(ENGINE, running=0), Place.LOCAL, Reason.FASTER),
        (
            Prompt(1_999),
            POOL,
            change(ENGINE, running=0, waiting_tokens=9_000),
            Place.REMOTE,
            Reason.FASTER,
        ),
        (Prompt(1_999), POOL, change(ENGINE, step_seconds=0.049), Place.REMOTE, Reason.MEETS_SLO),
        (
            Prompt(1_000),
            change(POOL, inflight_tokens=39_000),
            ENGINE,
            Place.LOCAL,
            Reason.MEETS_SLO,
        ),
        (
            Prompt(1_999),
            change(POOL, inflight_tokens=39_000),
            change(ENGINE, itl_seconds=0.06),
            Place.REMOTE,
            Reason.SPARES_DECODE,
        ),
        (
            Prompt(1_999),
            change(POOL, tokens_per_second=None),
            ENGINE,
            Place.LOCAL,
            Reason.RATE_UNKNOWN,
        ),
        (Prompt(2_000), change(POOL, tokens_per_second=None), ENGINE, Place.REMOTE, Reason.LONG),
    ],
)
def test_every_reason(prompt, pool, engine, place, reason) -> None:
    decision = ask(prompt, pool, engine)
    assert (decision.place, decision.reason) == (place, reason)
    assert decision.uncached == prompt.uncached


def test_uncached_tokens_count_and_not_the_length_of_the_prompt() -> None:
    idle = change(ENGINE, running=0)
    assert ask(Prompt(100_000, 99_000), engine=idle).place is Place.LOCAL
    assert ask(Prompt(3_000, 0), engine=idle).place is Place.REMOTE


def test_predictions_by_hand() -> None:
    pool = PrefillPool(2, 5_000, 3, 10_000, 0.01)
    link = Link(1e9, 100_000, latency=0.02, layers=10)
    decision = ask(Prompt(4_000, 1_000, 2_000), pool, ENGINE, link=link)
    # 2,000 tokens to compute, 3,000 to move: 0.3 s of which 0.18 s are hidden behind 9 layers.
    queue = (0.5 + 0.03) / 2
    assert decision.ttft_remote == pytest.approx(queue + 0.01 + 0.2 + 0.02 + 0.3 - 0.18 + 0.03)
    assert decision.ttft_local == pytest.approx(0.3 + 3_000 / 512 * 0.03)


def test_a_prefill_engine_without_the_prefix_has_to_compute_it() -> None:
    shared, cold = ask(Prompt(9_000, 8_000)), ask(Prompt(9_000, 8_000, 0))
    assert cold.ttft_remote - shared.ttft_remote == pytest.approx(0.8, rel=0.02)


def test_unknown_is_not_zero() -> None:
    full = Gates(pressured=Gate(True, 0.0))
    unknown = change(ENGINE, kv_used=None)
    assert ask(Prompt(200), engine=unknown, gates=full, now=9).reason is Reason.DECODE_PRESSURE
    assert ask(Prompt(200), engine=unknown).reason is not Reason.DECODE_PRESSURE


def test_auto_threshold_is_where_the_predictions_cross() -> None:
    idle = change(ENGINE, running=20)
    tokens = break_even_tokens(POOL, idle, LINK)
    assert tokens is not None
    assert 100 < tokens < math.inf
    for n, faster in ((math.ceil(tokens) + 1, True), (math.floor(tokens) - 1, False)):
        decision = ask(Prompt(n), engine=idle)
        assert (decision.ttft_remote < decision.ttft_local) is faster
    auto = Policy(threshold="auto", floor=0)
    assert ask(Prompt(math.ceil(tokens)), engine=idle, policy=auto).reason is Reason.LONG
    assert ask(Prompt(math.floor(tokens)), engine=idle, policy=auto).reason is not Reason.LONG


def test_auto_threshold_where_the_link_cannot_hide_the_transfer() -> None:
    slow = Link(1e8, 327_680, layers=80)
    assert break_even_tokens(POOL, ENGINE, slow) == math.inf
    decision = ask(Prompt(60_000), link=slow, policy=Policy(threshold="auto"))
    assert (decision.place, decision.reason) == (Place.LOCAL, Reason.FASTER)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Prompt(10, 11),
        lambda: Prompt(-1),
        lambda: Prompt(10, 0, 11),
        lambda: PrefillPool(-1),
        lambda: PrefillPool(1, tokens_per_second=0),
        lambda: PrefillPool(1, inflight_tokens=math.nan),
        lambda: DecodeEngine(kv_used=80),
        lambda: DecodeEngine(chunk_tokens=0),
        lambda: Slo(0, 1),
        lambda: Slo(1, math.inf),
        lambda: Policy(threshold="automatic"),
        lambda: Policy(kv_high=0.5, kv_low=0.6),
        lambda: Policy(dwell=-1),
        lambda: Link(0, 1),
        lambda: Link(1, 1, layers=0),
    ],
)
def test_nonsense_is_refused(make) -> None:
    with pytest.raises(InvalidError):
        make()


# Properties.

fractions = st.floats(0, 1)
rates = st.one_of(st.none(), st.floats(100, 1e6))
counts = st.integers(0, 300)
tokens = st.floats(0, 1e6)
times = st.floats(0, 100)


@st.composite
def prompts(draw) -> Prompt:
    total = draw(st.integers(0, 200_000))
    cached = draw(st.integers(0, total))
    return Prompt(total, cached, draw(st.one_of(st.none(), st.integers(0, total))))


@st.composite
def situations(draw) -> dict:
    gate = st.builds(Gate, st.booleans(), times)
    return {
        "prompt": draw(prompts()),
        "pool": PrefillPool(
            draw(st.integers(0, 8)), draw(tokens), draw(counts), draw(rates), draw(st.floats(0, 1))
        ),
        "engine": DecodeEngine(
            draw(st.one_of(st.none(), fractions)),
            draw(counts),
            draw(tokens),
            draw(rates),
            draw(st.floats(0, 0.2)),
            draw(st.one_of(st.none(), st.floats(0, 0.2))),
            draw(st.integers(1, 8192)),
            draw(st.sampled_from([1, 16, 128])),
        ),
        "link": Link(
            draw(st.floats(1e7, 1e12)),
            draw(st.floats(0, 1e6)),
            draw(st.floats(0, 1)),
            draw(st.integers(1, 100)),
        ),
        "slo": Slo(draw(st.floats(0.01, 10)), draw(st.floats(0.001, 1))),
        "policy": Policy(
            draw(st.integers(0, 500)),
            draw(st.one_of(st.just("auto"), st.integers(0, 5_000))),
            draw(st.one_of(st.none(), st.floats(0.01, 10))),
            0.8,
            0.7,
            0.9,
            1.0,
            draw(st.integers(1, 64)),
        ),
        "gates": Gates(draw(gate), draw(gate)),
        "now": draw(times),
    }


def asked(situation: dict, **changed):
    s = {**situation, **changed}
    return ask(
        s["prompt"],
        s["pool"],
        s["engine"],
        link=s["link"],
        slo=s["slo"],
        policy=s["policy"],
        gates=s["gates"],
        now=s["now"],
    )


def never_leaves(place: Place, before, after) -> bool:
    return not (before.place is place and after.place is not place)


@FEW
@given(situations())
def test_pure_and_always_answers(situation) -> None:
    first, second = asked(situation), asked(situation)
    assert first == second
    assert isinstance(first.reason, Reason)
    if situation["pool"].healthy == 0 or first.uncached == 0:
        assert first.place is Place.LOCAL


@FEW
@given(situations(), st.floats(0, 1e6), st.integers(0, 100))
def test_a_busier_pool_never_attracts(situation, more_tokens, more_queued) -> None:
    pool = situation["pool"]
    busier = change(
        pool,
        inflight_tokens=pool.inflight_tokens + more_tokens,
        queued=pool.queued + more_queued,
    )
    assert never_leaves(Place.LOCAL, asked(situation), asked(situation, pool=busier))


@FEW
@given(situations(), st.integers(1, 8))
def test_more_healthy_engines_never_repel(situation, more) -> None:
    pool = change(situation["pool"], healthy=situation["pool"].healthy + more)
    assert never_leaves(Place.REMOTE, asked(situation), asked(situation, pool=pool))


@FEW
@given(situations(), st.floats(1, 100))
def test_a_faster_link_never_repels(situation, factor) -> None:
    link = situation["link"]
    faster = change(link, bytes_per_second=link.bytes_per_second * factor)
    assert never_leaves(Place.REMOTE, asked(situation), asked(situation, link=faster))


@FEW
@given(situations(), fractions)
def test_a_fuller_decode_engine_never_attracts_prefill(situation, used) -> None:
    engine = situation["engine"]
    if engine.kv_used is None:
        return
    fuller = change(engine, kv_used=max(engine.kv_used, used))
    assert never_leaves(Place.REMOTE, asked(situation), asked(situation, engine=fuller))


@FEW
@given(situations(), st.floats(0, 1e6))
def test_more_waiting_on_the_decode_engine_never_attracts_prefill(situation, more) -> None:
    engine = situation["engine"]
    busier = change(engine, waiting_tokens=engine.waiting_tokens + more)
    assert never_leaves(Place.REMOTE, asked(situation), asked(situation, engine=busier))


@FEW
@given(situations(), st.integers(1, 50_000))
def test_a_longer_prompt_is_never_drawn_back_where_prefill_engines_are_no_slower(
    situation, more
) -> None:
    pool, engine, link = situation["pool"], situation["engine"], situation["link"]
    if pool.tokens_per_second is None or engine.tokens_per_second is None:
        return
    slope = 1 / pool.tokens_per_second + 1 / link.tokens_per_second
    if slope > 1 / engine.tokens_per_second:
        return
    situation["slo"] = Slo(1e9, 1e9)  # an SLO that only the decode engine meets may draw it back
    prompt = situation["prompt"]
    prompt = Prompt(prompt.tokens, prompt.cached)
    longer = Prompt(prompt.tokens + more, prompt.cached)
    before, after = asked(situation, prompt=prompt), asked(situation, prompt=longer)
    assert never_leaves(Place.REMOTE, before, after)


@FEW
@given(
    st.lists(st.tuples(st.floats(0, 2), fractions, st.floats(0, 1e5)), max_size=60),
    st.floats(0.1, 5),
)
def test_gates_do_not_flap_within_the_dwell(steps, dwell) -> None:
    gates, now = Gates(), 0.0
    switched: dict[str, float] = {}
    for wait, used, inflight in steps:
        now += wait
        decision = ask(
            Prompt(500),
            change(POOL, inflight_tokens=inflight),
            change(ENGINE, kv_used=used),
            policy=Policy(dwell=dwell),
            gates=gates,
            now=now,
        )
        for name in ("saturated", "pressured"):
            if getattr(decision.gates, name).on != getattr(gates, name).on:
                assert now - switched.get(name, -math.inf) >= dwell
                switched[name] = now
        gates = decision.gates


@FEW
@given(st.lists(st.floats(0.73, 0.79), max_size=40), st.booleans())
def test_levels_between_the_marks_switch_nothing(levels, on) -> None:
    gate = Gate(on, -100.0)
    for now, level in enumerate(levels):
        gate = gate.update(level, 0.8, 0.72, 1.0, float(now))
        assert gate.on is on


def test_a_gate_follows_its_level_after_the_dwell() -> None:
    gate = Gate().update(0.9, 0.8, 0.7, 1.0, 10.0)
    assert gate == Gate(True, 10.0)
    assert gate.update(0.1, 0.8, 0.7, 1.0, 10.9).on
    assert not gate.update(0.1, 0.8, 0.7, 1.0, 11.0).on
    assert not gate.update(0.1, 0.8, 0.7, 1.0, 5.0).on, "a clock that was set back"
