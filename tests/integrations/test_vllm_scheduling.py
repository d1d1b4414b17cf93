"""What vLLM's own scheduler-level tests of connectors check, for this one."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

pytestmark = pytest.mark.filterwarnings("default")


@pytest.fixture
def pair(fake: Any) -> Any:
    from rig import pair

    return pair


def test_others_go_on_while_one_waits(engine: Callable[..., Any], pair: Any) -> None:
    p, d = engine("kv_producer"), engine("kv_consumer")
    here, there = pair.prompt(100, 1), pair.prompt(100)
    _, params = pair.prefill(p, there)  # makes its offer in the next step only
    first = d.add(here, max_tokens=20)
    second = d.add(there, params=params)
    for count in range(1, 11):
        d.step()
        assert len(d.answers[first]["tokens"]) == count
        assert d.status(second) == "WAITING_FOR_REMOTE_KVS"
    pair.step_until(lambda: all(d.answers[n]["finish"] for n in (first, second)), d, p)
    pair.check(d, first, here, 20)
    pair.check(d, second, there)
    pair.settle(p, d)


@pytest.mark.parametrize("arrives", [True, False])
def test_blocks_are_nobodys_prefix_before_they_are_loaded(
    engine: Callable[..., Any], pair: Any, arrives: bool
) -> None:
    p = engine("kv_producer", extra={"lease": 0.05})
    d = engine("kv_consumer", extra={"load_timeout": 0.5})
    tokens = pair.prompt(130)
    _, params = pair.prefill(p, tokens)
    waiting = d.add(tokens, params=params)
    d.step()
    other = d.add(tokens)
    pair.step_until(lambda: d.answers[other]["finish"] is not None, d)
    pair.check(d, other, tokens)  # computed, not read from blocks that hold nothing yet
    pair.step_until(lambda: d.answers[waiting]["finish"] is not None, d, *([p] if arrives else []))
    pair.check(d, waiting, tokens)
    assert d.stats.get("failures") == (None if arrives else {"timeout": 1})
    pair.decode(d, tokens, None)
    pair.settle(p, d)


@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_one_of_several_loads_fails(engine: Callable[..., Any], pair: Any, policy: str) -> None:
    p, gone = engine("kv_producer"), engine("kv_producer")
    d = engine("kv_consumer", policy=policy)
    prompts = [pair.prompt(100, number) for number in range(3)]
    params = [
        pair.prefill(side, tokens)[1] for side, tokens in zip((p, gone, p), prompts, strict=True)
    ]
    gone.close()
    names = [d.add(tokens, params=given) for tokens, given in zip(prompts, params, strict=True)]
    pair.step_until(lambda: all(d.answers[name]["finish"] for name in names), d, p)
    for at, (tokens, name) in enumerate(zip(prompts, names, strict=True)):
        if at == 1 and policy == "fail":
            assert d.answers[name] == {"tokens": [], "finish": "error", "params": None}
        else:
            pair.check(d, name, tokens)
    assert d.stats["failures"] == {"unreachable": 1}
    pair.settle(p, d)
    pair.decode(d, prompts[1], None)  # no block of the failed load serves as its prefix


def test_one_rank_of_several_fails(engine: Callable[..., Any], pair: Any) -> None:
    """The request fails once, when all ranks have reported, and is computed here."""
    p, d = engine("kv_producer", tp=2, extra={"lease": 0.5}), engine("kv_consumer", tp=2)
    tokens = pair.prompt(200)
    _, params = pair.prefill(p, tokens)
    p.step()  # makes the offers
    p.ranks[1].worker.worker._agent.close()
    name = d.add(tokens, params=params)
    pair.step_until(lambda: d.answers[name]["finish"] is not None, d)
    pair.check(d, name, tokens)
    assert sum(d.stats["failures"].values()) == 1
    pair.settle(d)


def test_too_few_blocks_to_load_into(engine: Callable[..., Any], pair: Any) -> None:
    p, d = engine("kv_producer"), engine("kv_consumer", num_blocks=8)
    here, there = pair.prompt(190), pair.prompt(100, 1)
    first = d.add(here, max_tokens=20)
    d.step()
    _, params = pair.prefill(p, there)
    second = d.add(there, params=params)
    for _ in range(5):
        d.step()
    assert d.status(second) == "WAITING"
    pair.step_until(lambda: all(d.answers[n]["finish"] for n in (first, second)), d, p)
    pair.check(d, first, here, 20)
    pair.check(d, second, there)
    assert d.stats["loads"] == 1
    pair.settle(p, d)


def test_too_few_blocks_after_the_load(engine: Callable[..., Any], pair: Any) -> None:
    """Who runs grows into the last free blocks, while what was loaded waits for its turn."""
    p, d = engine("kv_producer", num_blocks=100), engine("kv_consumer", num_blocks=11)
    prompts = [pair.prompt(96, number) for number in range(3)]
    names = []
    for tokens in prompts:
        _, params = pair.prefill(p, tokens)
        names.append(d.add(tokens, params=params, max_tokens=90))
        d.step()
        p.step()
    pair.step_until(lambda: all(d.answers[name]["finish"] for name in names), d, p)
    for tokens, name in zip(prompts, names, strict=True):
        pair.check(d, name, tokens, 90)
    pair.settle(p, d)


def _crowd(pair: Any, side: Any) -> None:
    """Run more requests than there are blocks for: some are preempted."""
    preempted = []
    preempt = side.scheduler._preempt_request

    def told(request: Any, *given: Any, **more: Any) -> Any:
        preempted.append(request.request_id)
        return preempt(request, *given, **more)

    side.scheduler._preempt_request = told
    prompts = [pair.prompt(100, f"crowd {number}") for number in range(3)]
    names = [side.add(tokens, max_tokens=90) for tokens in prompts]
    pair.step_until(lambda: all(side.answers[name]["finish"] for name in names), side)
    for tokens, name in zip(prompts, names, strict=True):
        pair.check(side, name, tokens, 90)
    assert preempted
    side.scheduler._preempt_request = preempt


def test_preemption_of_others(engine: Callable[..., Any], pair: Any, fake: Any) -> None:
    """While a fetch runs, and while an offer waits."""
    from kvxfer.integrations.vllm_connector.proxy import _standing

    p, d = engine("kv_producer", num_blocks=17), engine("kv_consumer", num_blocks=17)
    _, params = pair.prefill(p, [5, 6])
    pair.decode(d, [5, 6], params, p)
    pair.settle(p, d)
    tokens = pair.prompt(130)
    name = d.add(tokens, params={**_standing(params), "transfer_id": "x"})
    d.step()
    _crowd(pair, d)
    assert d.status(name) == "WAITING_FOR_REMOTE_KVS"
    p.add(tokens, params=fake.prefill_params(transfer_id="x"), max_tokens=1)
    pair.step_until(lambda: d.answers[name]["finish"] is not None, d, p)
    pair.check(d, name, tokens)
    pair.settle(p, d)

    tokens = pair.prompt(130, 1)
    _, params = pair.prefill(p, tokens)
    prompts = [pair.prompt(100, number) for number in range(3)]
    others = [p.add(each, max_tokens=90) for each in prompts]
    for _ in range(100):
        p.step()  # its scheduler waits for the blocks that are on offer, and preempts nobody
    assert p.scheduler.connector.has_pending_block_frees()
    pair.decode(d, tokens, params, p)
    pair.step_until(lambda: all(p.answers[other]["finish"] for other in others), p)
    for each, other in zip(prompts, others, strict=True):
        pair.check(p, other, each, 90)
    assert d.stats["loads"] == 3
    assert "failures" not in d.stats
    pair.settle(p, d)


@pytest.mark.parametrize("lookahead", [1, 5, 40])
@pytest.mark.parametrize("transfer", [False, True])
def test_blocks_for_drafts_are_not_moved(
    engine: Callable[..., Any], pair: Any, fake: Any, lookahead: int, transfer: bool
) -> None:
    """Speculative decoding allocates blocks beyond the tokens; sides may differ in it."""
    for there, here in ((lookahead, 0), (0, lookahead), (lookahead, lookahead)):
        p = engine("kv_producer", lookahead=there)
        d = engine("kv_consumer", lookahead=here)
        for length in (1, 31, 32, 33, 64, 100):
            tokens = pair.prompt(length)
            _, params = pair.prefill(p, tokens)
            assert params["kvxfer"]["offer"]["tokens"] == length
            name = d.add(tokens, params=params)
            output = d.scheduler.schedule
            orders = []

            def schedule(output: Any = output, orders: list[Any] = orders) -> Any:
                found = output()
                orders.append(found.kv_connector_metadata)
                return found

            d.scheduler.schedule = schedule
            pair.step_until(lambda: d.answers[name]["finish"] is not None, d, p)  # noqa: B023
            d.scheduler.schedule = output
            pair.check(d, name, tokens)
            for load in (load for each in orders for load in each.load):
                (part,) = load.parts
                assert (part.first, part.end) == (0, length - 1)
                assert len(part.blocks) == -(-(length - 1) // 32)
        pair.settle(p, d)
        assert "failures" not in d.stats
        assert p.stats["sends"] == 6


def test_partial_hits_on_the_prefill_side(engine: Callable[..., Any], pair: Any) -> None:
    """What it had in its cache is on offer like what it computed."""
    p, d = engine("kv_producer"), engine("kv_consumer", prefix_caching=False)
    base = pair.prompt(128)
    pair.decode(p, base, None)
    for length in (40, 64, 96, 128):
        tokens = base[:length] + pair.prompt(50, length)
        _, params = pair.prefill(p, tokens)
        pair.decode(d, tokens, params, p)
    assert d.stats["loads"] == 4
    pair.settle(p, d)


def test_samples_of_a_prompt_in_the_concurrent_flow(
    engine: Callable[..., Any], pair: Any, fake: Any
) -> None:
    """A proxy that sends n samples to the decode side under one name."""
    from kvxfer.integrations.vllm_connector.proxy import _standing

    p, d = engine("kv_producer", extra={"lease": 0.3}), engine("kv_consumer")
    standing = _standing(pair.prefill(p, pair.prompt(3))[1])
    pair.settle(p)
    tokens = pair.prompt(200)
    names = [d.add(tokens, params={**standing, "transfer_id": "x"}) for _ in range(4)]
    d.step()
    p.add(tokens, params=fake.prefill_params(transfer_id="x"), max_tokens=1)
    pair.step_until(lambda: all(d.answers[name]["finish"] for name in names), d, p)
    for name in names:
        pair.check(d, name, tokens)
    assert d.stats["loads"] == 1
    assert "failures" not in d.stats
    pair.settle(p, d)


def test_whose_sibling_failed_computes(engine: Callable[..., Any], pair: Any) -> None:
    p, d = engine("kv_producer"), engine("kv_consumer")
    tokens = pair.prompt(200)
    _, params = pair.prefill(p, tokens)
    p.close()
    names = [d.add(tokens, params=dict(params)) for _ in range(3)]
    pair.step_until(lambda: all(d.answers[name]["finish"] for name in names), d)
    for name in names:
        pair.check(d, name, tokens)
    assert d.stats["failures"] == {"unreachable": 1}
    pair.settle(d)


def test_an_engine_that_does_both(engine: Callable[..., Any], pair: Any) -> None:
    """Each sends to the other, as in conversations whose turns are prefilled anywhere."""
    one, other = engine("kv_both"), engine("kv_both")
    for number in range(3):
        tokens = pair.prompt(150, number)
        for p, d in ((one, other), (other, one)):
            _, params = pair.prefill(p, tokens)
            pair.decode(d, tokens, params, p)
    pair.settle(one, other)


def test_only_steps_without_tokens_may_rest(engine: Callable[..., Any], pair: Any) -> None:
    """The runners don't tell: behind the forward, one of them has no context of it any more."""
    d = engine("kv_consumer")
    idle = []
    build = d.connector.scheduler.build
    d.connector.scheduler.build = lambda output: idle.append(build(output)) or idle[-1]
    d.step()
    d.add(pair.prompt(3), max_tokens=1)
    d.step()
    assert [orders.idle for orders in idle] == [True, False]


def test_aborted_before_its_load_was_started(
    engine: Callable[..., Any], pair: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU a load starts behind the forward: here that does not come to it in its step."""
    p = engine("kv_producer", extra={"lease": 1000})
    d = engine("kv_consumer", extra={"load_timeout": 1000})
    _, params = pair.prefill(p, pair.prompt(100))
    monkeypatch.setattr(d.worker.worker, "_on_gpu", True)
    name = d.add(pair.prompt(100), params=params)
    with monkeypatch.context() as patch:
        patch.setattr(d.worker, "start_load_kv", lambda _: None)
        d.step()
    d.abort(name)
    pair.settle(d, p)
    assert d.stats["failures"] == {"cancelled": 1}
    assert d.stats["declined"] == 1


@pytest.mark.parametrize(("in_flight", "replicas"), [(1, 1), (2, 1), (3, 1), (1, 2)])
def test_when_a_worker_rests(
    engine: Callable[..., Any],
    pair: Any,
    monkeypatch: pytest.MonkeyPatch,
    in_flight: int,
    replicas: int,
) -> None:
    """Not while a step may be under way, and not where other replicas wait for its steps."""
    from vllm.config import VllmConfig

    monkeypatch.setattr(VllmConfig, "max_concurrent_batches", in_flight)
    p = engine("kv_producer", extra={"lease": 1000}, dp=replicas)
    name, _ = pair.prefill(p, pair.prompt(100))
    worker, rests = p.worker.worker, []
    monkeypatch.setattr(worker, "_ends", SimpleNamespace(poll=rests.append))
    counts = []
    for _ in range(4):
        p.step()
        counts.append(len(rests))
    p.add(pair.prompt(3), max_tokens=1)
    p.step()
    p.step()
    counts.append(len(rests))
    never = replicas > 1
    first = [0 if never else max(0, step + 2 - in_flight) for step in range(4)]
    assert counts == [*first, first[-1] + (in_flight == 1 and not never)]
    for offer in worker._sends[name].offers:
        offer.release()
    pair.settle(p)
