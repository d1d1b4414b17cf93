"""The simulator against closed forms, a step-by-step reference, and laws of conservation."""

from __future__ import annotations

import dataclasses
import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvxfer.errors import InvalidError
from kvxfer.serving import Link, Place, Policy, Reason, Slo
from kvxfer.serving.cost_model import DecodeCost, PrefillCost
from kvxfer.serving.sim import (
    Decided,
    EngineSpec,
    Fleet,
    Role,
    always_local,
    always_remote,
    fixed_threshold,
    simulate,
)
from kvxfer.serving.workload import Job, Workload, fixed, generate, lognormal

PREFILL = PrefillCost(0.010, 1e-4, 1e-9)
DECODE = DecodeCost(0.020, 1e-4, 1e-7)
ENGINE = EngineSpec(Role.BOTH, PREFILL, DECODE, 100_000, max_sequences=64)
SLO = Slo(1.0, 0.05)


def role(kind: Role, spec: EngineSpec = ENGINE, **fields) -> EngineSpec:
    return dataclasses.replace(spec, role=kind, **fields)


def one_and_one(link: Link, **fields) -> Fleet:
    return Fleet(((role(Role.PREFILL, **fields), 1), (role(Role.DECODE, **fields), 1)), link)


def ttft(outcome) -> float:
    return outcome.ttft


# By hand.


def test_one_request_where_it_is_decoded() -> None:
    (outcome,) = simulate(
        Fleet(((ENGINE, 1),)), Workload((Job(5.0, 1_000, 4),)), always_local
    ).outcomes
    assert outcome.ttft == pytest.approx(0.010 + 0.1 + 1e-3)
    steps = 3 * (0.020 + 1e-4) + 1e-7 * (1_000 + 1_001 + 1_002)
    assert outcome.last - outcome.first == pytest.approx(steps)


@pytest.mark.parametrize(("layers", "exposed"), [(1, 0.5), (10, 0.5 - 0.111)])
def test_one_request_by_way_of_a_prefill_engine(layers, exposed) -> None:
    link = Link(2e8, 100_000, latency=0.003, layers=layers)
    result = simulate(one_and_one(link), Workload((Job(0.0, 1_000, 4),)), always_remote)
    (outcome,) = result.outcomes
    step = 0.020 + 1e-4 + 1e-4
    # Overlapped, the link is taken to be busy from the start of the prefill on.
    assert outcome.ttft == pytest.approx(0.111 + exposed + 0.003 + step, rel=1e-3)
    assert result.bytes_moved == pytest.approx(1e8)


def test_a_hidden_transfer_costs_its_last_layer() -> None:
    link = Link(1e10, 100_000, layers=10)
    (outcome,) = simulate(
        one_and_one(link), Workload((Job(0.0, 1_000, 2),)), always_remote
    ).outcomes
    assert outcome.ttft == pytest.approx(0.111 + 0.001 + 0.0202)


def test_the_first_token_of_the_prefill_engine_where_it_is_sent() -> None:
    fleet = dataclasses.replace(one_and_one(Link(1e9, 100_000)), first_token_at_prefill=True)
    two, one = simulate(
        fleet, Workload((Job(0.0, 1_000, 2), Job(9.0, 1_000, 1))), always_remote
    ).outcomes
    assert two.ttft == pytest.approx(0.111)
    assert two.last - two.first == pytest.approx(0.1 + 0.0202)
    assert one.last == one.first == pytest.approx(9.111)


def test_a_long_prompt_beside_a_running_answer() -> None:
    spec = role(Role.BOTH, chunk_tokens=500)
    jobs = (Job(0.0, 100, 200), Job(0.5, 2_000, 1))
    result = simulate(Fleet(((spec, 1),)), Workload(jobs), always_local)
    step = DECODE.step(1, 100)
    assert result.outcomes[1].ttft == pytest.approx(4 * step + 0.2 + 0.004 + step / 2, abs=step)
    assert result.gaps.percentile(100) > 0.05
    assert result.gaps.percentile(50) == pytest.approx(step, rel=0.02)


def test_transfers_share_a_link_evenly() -> None:
    link = Link(1e8, 100_000)
    jobs = (Job(0.0, 1_000, 1), Job(0.0, 1_000, 1))
    fleet = one_and_one(link, batch_tokens=8_192)
    outcomes = simulate(fleet, Workload(jobs), always_remote).outcomes
    prefill = 0.010 + 0.2 + 2e-3
    for outcome in outcomes:
        assert outcome.ttft == pytest.approx(prefill + 2.0 + DECODE.step(2, 2_000))


def test_a_transfer_alone_has_the_whole_link_again() -> None:
    link = Link(1e8, 100_000)
    fleet = Fleet(((role(Role.PREFILL), 2), (role(Role.DECODE), 1)), link)
    jobs = (Job(0.0, 1_000, 1), Job(0.0, 3_000, 1))
    small, large = simulate(fleet, Workload(jobs), always_remote).outcomes
    starts = PREFILL.prompt(1_000), PREFILL.prompt(3_000)
    first = starts[0] + (starts[1] - starts[0]) + 2 * (1.0 - (starts[1] - starts[0]))
    assert small.ttft == pytest.approx(first + DECODE.step(1, 1_000))
    assert large.ttft == pytest.approx(starts[0] + 4.0 + DECODE.step(1, 3_000), rel=1e-3)


# Queues.


@pytest.mark.parametrize("utilisation", [0.3, 0.6, 0.8])
def test_waiting_as_in_an_m_d_1_queue(utilisation) -> None:
    spec = role(Role.BOTH, max_sequences=1)
    service = PREFILL.prompt(1_000)
    jobs = generate(15_000, utilisation / service, fixed(1_000), fixed(1), seed=3)
    result = simulate(Fleet(((spec, 1),)), jobs, always_local)
    waiting = result.mean(ttft) - service
    expected = utilisation * service / (2 * (1 - utilisation))
    assert waiting == pytest.approx(expected, rel=0.1)
    (engine,) = result.engines
    assert engine.busy / result.seconds == pytest.approx(utilisation, rel=0.03)


@pytest.mark.parametrize("concurrency", [1, 16, 64, 200])
def test_closed_loop_law(concurrency) -> None:
    jobs = generate(2_000, 1.0, lognormal(600, 0.7, 4_000), lognormal(100, 0.7, 500), seed=1)
    result = simulate(Fleet(((ENGINE, 1),)), jobs, always_local, concurrency=concurrency)
    inside = result.mean(lambda outcome: outcome.last - outcome.arrived) * result.request_rate
    # Little's law; at the end there are fewer clients than `concurrency`.
    assert inside == pytest.approx(concurrency, rel=0.12)
    assert inside <= concurrency * (1 + 1e-9)


def test_decode_in_a_closed_loop() -> None:
    free = role(Role.DECODE, prefill=PrefillCost(0.0, 1e-12), max_sequences=256)
    jobs = generate(1_500, 1.0, fixed(100), fixed(200))
    result = simulate(
        Fleet(((role(Role.PREFILL, free), 1), (free, 1)), Link(1e15, 1)), jobs, always_remote, 100
    )
    tpot = DECODE.step(100, 100 * 200)
    assert result.mean(lambda outcome: outcome.tpot) == pytest.approx(tpot, rel=0.01)
    assert result.output_rate == pytest.approx(100 / tpot, rel=0.01)


def reference(jobs, slots: int) -> list[tuple[float, float]]:
    """One engine, one step at a time: first and last token of each job."""
    now, waiting, running, prefilling = 0.0, list(range(len(jobs))), {}, {}
    first, last = [0.0] * len(jobs), [0.0] * len(jobs)
    while waiting or running or prefilling:
        if not running and not prefilling:
            now = max(now, jobs[waiting[0]].time)
        while waiting and jobs[waiting[0]].time <= now and len(running) + len(prefilling) < slots:
            job = waiting.pop(0)
            prefilling[job] = jobs[job].prompt_tokens
        seconds = 0.010
        if running:
            context = sum(jobs[j].prompt_tokens + n - 1 for j, n in running.items())
            seconds = 0.020 + 1e-4 * len(running) + 1e-7 * context
        budget, completed = 8_192 - len(running), []
        for job, left in list(prefilling.items()):
            take = min(left, budget)
            done = jobs[job].prompt_tokens - left
            seconds += 1e-4 * take + 1e-9 * ((done + take) ** 2 - done**2)
            budget -= take
            prefilling[job] -= take
            if prefilling[job] == 0:
                completed.append(job)
        now += seconds
        for job in list(running):
            running[job] += 1
        for job in completed:
            del prefilling[job]
            running[job] = 1
            first[job] = now
        for job, produced in list(running.items()):
            if produced == jobs[job].output_tokens:
                del running[job]
                last[job] = now
    return list(zip(first, last, strict=True))


@given(
    st.lists(
        st.tuples(st.floats(0, 2), st.integers(1, 9_000), st.integers(1, 150)),
        min_size=1,
        max_size=25,
    ),
    st.integers(1, 20),
)
@settings(max_examples=40)
def test_runs_of_steps_are_what_single_steps_are(rows, slots) -> None:
    now, jobs = 0.0, []
    for wait, prompt, output in rows:
        now += wait
        jobs.append(Job(now, prompt, output))
    spec = role(Role.BOTH, max_sequences=slots, kv_tokens=1_000_000)
    result = simulate(Fleet(((spec, 1),)), Workload(tuple(jobs)), always_local)
    expected = reference(jobs, slots)
    for outcome, (first, last) in zip(result.outcomes, expected, strict=True):
        assert outcome.first == pytest.approx(first, abs=1e-6)
        assert outcome.last == pytest.approx(last, abs=1e-6)


# Conservation.


@st.composite
def fleets(draw) -> Fleet:
    kv_tokens = draw(st.integers(2_000, 40_000))
    common = {
        "kv_tokens": kv_tokens,
        "max_sequences": draw(st.integers(1, 40)),
        "batch_tokens": draw(st.integers(64, 4_000)),
        "prefix_cache": draw(st.booleans()),
        "block_tokens": draw(st.sampled_from([1, 16, 64])),
    }
    chunk = draw(st.one_of(st.none(), st.integers(16, 512)))
    return Fleet(
        (
            (role(Role.PREFILL, **common), draw(st.integers(0, 2))),
            (role(Role.DECODE, chunk_tokens=chunk, **common), draw(st.integers(1, 2))),
            (role(Role.BOTH, **common), draw(st.integers(0, 1))),
        ),
        Link(draw(st.floats(1e6, 1e10)), 1_000, 0.001, draw(st.sampled_from([1, 32]))),
        draw(st.booleans()),
    )


@st.composite
def workloads(draw) -> Workload:
    generator = random.Random(draw(st.integers(0, 1_000)))
    rate = draw(st.sampled_from([1.0, 20.0, 1_000.0]))
    longest = draw(st.sampled_from([500, 5_000]))
    now, jobs, chains = 0.0, [], [[n * 1_000] for n in range(4)]
    for _ in range(draw(st.integers(1, 60))):
        now += generator.expovariate(rate)
        chain = generator.choice(chains)
        prompt = generator.randint(1, longest)
        full = prompt // 64
        while len(chain) < full:
            chain.append(chain[-1] + 1)
        shared = generator.randint(0, full)
        fresh = [-(len(jobs) * 1_000 + n) for n in range(1, full - shared + 1)]
        ids = tuple(chain[:shared] + fresh)
        jobs.append(Job(now, prompt, generator.randint(1, 300), ids))
    return Workload(tuple(jobs), 64)


routers = st.sampled_from(
    [
        lambda: always_local,
        lambda: always_remote,
        lambda: fixed_threshold(500),
        lambda: Decided(SLO, Policy(floor=10, threshold=400), Link(1e9, 1_000)),
    ]
)


@given(fleets(), workloads(), routers, st.one_of(st.none(), st.integers(1, 50)))
def test_nothing_is_lost_and_nothing_leaks(fleet, workload, router, concurrency) -> None:
    try:
        result = simulate(fleet, workload, router(), concurrency)
    except InvalidError as error:
        assert "memory" in str(error)  # noqa: PT017
        return
    seen = sorted([outcome.index for outcome in result.outcomes] + list(result.rejected))
    assert seen == list(range(len(workload.jobs)))
    assert all(engine.blocks_pinned == 0 for engine in result.engines)
    tokens = sum(outcome.output_tokens for outcome in result.outcomes)
    assert sum(engine.tokens_out for engine in result.engines) == tokens
    prompts = sum(outcome.prompt_tokens for outcome in result.outcomes)
    computed = sum(engine.tokens_prefilled for engine in result.engines)
    preempted = any(outcome.preemptions for outcome in result.outcomes)
    cached = any(spec.prefix_cache for spec, _ in fleet.engines)
    if not cached:
        assert computed >= prompts
        if not preempted:
            assert computed == prompts
    elif not preempted:
        assert len(result.outcomes) <= computed <= prompts
    remote = [outcome for outcome in result.outcomes if outcome.place is Place.REMOTE]
    most = sum(outcome.prompt_tokens for outcome in remote) * 1_000
    assert result.bytes_moved <= most * (1 + 1e-9)
    if not cached and not (
        fleet.first_token_at_prefill and any(o.output_tokens == 1 for o in remote)
    ):
        assert result.bytes_moved == pytest.approx(most)
    for outcome in result.outcomes:
        assert outcome.arrived < outcome.first <= outcome.last
        assert (outcome.first == outcome.last) == (outcome.output_tokens == 1)
    for engine in result.engines:
        assert engine.busy <= result.seconds * (1 + 1e-9)


def test_the_same_again() -> None:
    fleet = one_and_one(Link(1e9, 10_000, layers=4))
    jobs = generate(500, 8.0, lognormal(800, 1.0, 8_000), lognormal(60, 1.0, 500))
    first, second = (simulate(fleet, jobs, Decided(SLO, link=fleet.link)) for _ in range(2))
    assert first.outcomes == second.outcomes
    assert len({outcome.place for outcome in first.outcomes}) == 2


def test_preemption_is_counted_and_slows_down() -> None:
    jobs = Workload(tuple(Job(0.0, 100, 400) for _ in range(16)))
    tight = role(Role.BOTH, kv_tokens=3_200, prefix_cache=False)
    roomy = role(Role.BOTH, prefix_cache=False)
    slow = simulate(Fleet(((tight, 1),)), jobs, always_local)
    fast = simulate(Fleet(((roomy, 1),)), jobs, always_local)
    assert sum(outcome.preemptions for outcome in slow.outcomes) > 0
    assert sum(outcome.preemptions for outcome in fast.outcomes) == 0
    assert slow.seconds > fast.seconds


def test_a_request_that_fits_nowhere_is_rejected_and_the_rest_served() -> None:
    small = role(Role.BOTH, kv_tokens=2_000)
    jobs = Workload((Job(0.0, 100, 10), Job(0.1, 1_990, 50), Job(0.2, 100, 10)))
    result = simulate(Fleet(((small, 1),)), jobs, always_local)
    assert result.rejected == (1,)
    assert result.attainment(Slo(100, 100)) == pytest.approx(2 / 3)
    with pytest.raises(InvalidError, match="2000 tokens"):
        simulate(Fleet(((small, 1),)), Workload((Job(0.0, 5_000, 1),)), always_local)


# Prefix caches.


def chain(*ids: int) -> tuple[int, ...]:
    return ids


def test_a_prefix_is_computed_once_while_there_is_memory_for_it() -> None:
    ids = chain(1, 2, 3, 4)
    jobs = Workload(tuple(Job(float(n), 300, 2, ids) for n in range(3)), 64)
    result = simulate(Fleet(((ENGINE, 1),)), jobs, always_local)
    assert result.engines[0].tokens_prefilled == 300 + 44 + 44
    without = role(Role.BOTH, prefix_cache=False)
    result = simulate(Fleet(((without, 1),)), jobs, always_local)
    assert result.engines[0].tokens_prefilled == 900


def test_the_least_recently_used_prefix_makes_room() -> None:
    spec = role(Role.BOTH, kv_tokens=768)
    prompts = [chain(1, 2, 3, 4), chain(11, 12, 13, 14), chain(1, 2, 3, 4), chain(21, 22, 23, 24)]
    prompts += [chain(1, 2, 3, 4), chain(11, 12, 13, 14)]
    jobs = Workload(tuple(Job(float(n), 257, 1, ids) for n, ids in enumerate(prompts)), 64)
    result = simulate(Fleet(((spec, 1),)), jobs, always_local)
    # 48 blocks: two prompts of 17 do fit; the third, needing one more, takes the end of the second.
    assert result.engines[0].tokens_prefilled == 257 + 257 + 1 + 257 + 1 + 65


def test_only_what_the_decode_engine_lacks_is_moved() -> None:
    ids = chain(1, 2, 3, 4)
    jobs = Workload(tuple(Job(10.0 * n, 300, 2, ids) for n in range(2)), 64)
    result = simulate(one_and_one(Link(1e9, 1_000)), jobs, always_remote)
    assert result.bytes_moved == (300 + 44) * 1_000
    assert [outcome.uncached for outcome in result.outcomes] == [300, 44]


def test_conversations_stay_where_their_prefix_is() -> None:
    jobs = []
    for turn in range(4):
        for user in range(6):
            ids = tuple(user * 100 + n for n in range(4 * (turn + 1)))
            jobs.append(Job(turn * 100.0 + user, 64 * len(ids) + 10, 5, ids))
    result = simulate(Fleet(((ENGINE, 3),)), Workload(tuple(jobs), 64), always_local)
    last_turn = [o.uncached for o in result.outcomes[-6:]]
    assert last_turn == [4 * 64 + 10] * 6
    assert all(engine.tokens_out for engine in result.engines)


# Decisions.


def test_decide_sends_long_prompts_away_and_keeps_short_ones() -> None:
    link = Link(1e10, 10_000, layers=32)
    jobs = Workload(tuple(Job(float(n), 5_000 if n % 2 else 80, 20) for n in range(20)))
    result = simulate(one_and_one(link), jobs, Decided(SLO, link=link))
    assert {o.reason for o in result.outcomes if o.prompt_tokens == 80} == {Reason.SHORT}
    assert {o.reason for o in result.outcomes if o.prompt_tokens == 5_000} == {Reason.LONG}
    assert result.remote_shares() == (0.5, pytest.approx(10 * 5_000 / (10 * 5_080)))


def test_a_saturated_pool_overflows_to_the_decode_engine() -> None:
    link = Link(1e10, 10_000, layers=32)
    jobs = Workload(tuple(Job(n * 0.05, 2_500, 5) for n in range(100)))
    result = simulate(one_and_one(link), jobs, Decided(SLO, link=link))
    reasons = result.reasons()
    assert reasons[Reason.PREFILL_SATURATED]
    assert reasons[Reason.BOTH_SATURATED]
    remote = simulate(one_and_one(link), jobs, always_remote)
    assert result.mean(ttft) < remote.mean(ttft) / 2


def test_long_prompts_elsewhere_shorten_the_tail_between_tokens() -> None:
    link = Link(1e10, 10_000, layers=32)
    rows = [Job(n * 0.25, 50, 100) for n in range(200)]
    rows += [Job(1.5 * n, 4_096, 5) for n in range(33)]
    jobs = Workload(tuple(sorted(rows, key=lambda job: job.time)))
    apart = simulate(one_and_one(link), jobs, Decided(SLO, link=link))
    together = simulate(Fleet(((ENGINE, 2),)), jobs, always_local)
    assert together.gaps.percentile(99.5) > 5 * apart.gaps.percentile(99.5)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Fleet(((role(Role.PREFILL), 1),), Link(1, 1)),
        lambda: Fleet(((role(Role.PREFILL), 1), (role(Role.DECODE), 1))),
        lambda: role(Role.DECODE, batch_tokens=64, max_sequences=64),
        lambda: role(Role.DECODE, kv_tokens=4),
        lambda: Workload(()),
        lambda: Workload((Job(1.0, 1, 1), Job(0.5, 1, 1))),
        lambda: Job(0.0, 0, 1),
        lambda: Job(math.nan, 1, 1),
        lambda: simulate(
            Fleet(((role(Role.BOTH, block_tokens=24), 1),)),
            Workload((Job(0.0, 64, 1, (1,)),), 64),
            always_local,
        ),
    ],
)
def test_nonsense_is_refused(make) -> None:
    with pytest.raises(InvalidError):
        make()


def test_unequal_engines_share_the_load_by_their_speed() -> None:
    slow = role(Role.PREFILL, prefill=PrefillCost(0.010, 3e-4), gpus=1, price_per_hour=2, watts=300)
    fast = role(Role.PREFILL, gpus=1, price_per_hour=5, watts=700)
    decode = role(Role.DECODE, gpus=1, price_per_hour=5, watts=700)
    fleet = Fleet(((slow, 1), (fast, 1), (decode, 1)), Link(1e12, 1_000))
    jobs = generate(300, 8.0, fixed(1_200), fixed(5), seed=2)
    result = simulate(fleet, jobs, always_remote)
    little, much = (engine.tokens_prefilled for engine in result.engines[:2])
    assert 0 < little < much / 2
    assert (fleet.price_per_hour, fleet.watts, fleet.name) == (12, 1_700, "2P1D")
    assert result.joules_per_token == pytest.approx(1_700 / result.output_rate)
    assert result.cost_per_million == pytest.approx(12 / 3_600 / result.output_rate * 1e6)


def test_half_the_bytes_on_the_wire_take_half_the_time() -> None:
    jobs = generate(60, 1.0, fixed(2_000), fixed(5), seed=2)
    raw, coded = (
        simulate(one_and_one(Link(5e8, size)), jobs, always_remote) for size in (160_000, 80_000)
    )
    assert coded.bytes_moved == raw.bytes_moved / 2
    assert raw.mean(ttft) - coded.mean(ttft) > 0.3
