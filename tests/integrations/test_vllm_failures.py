"""What goes wrong in production: each request still ends once, and no block is lost."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.filterwarnings("default")


@pytest.fixture
def pair(fake: Any) -> Any:
    from rig import pair

    return pair


def _wait_expired(pair: Any, p: Any) -> None:
    pair.step_until(lambda: p.stats.get("leases_expired", 0) > 0, p)


def test_lease_ends_what_nobody_fetches(
    engine: Callable[..., Any], pair: Any, log: list[str]
) -> None:
    p, d = engine("kv_producer", extra={"lease": 0.05}), engine("kv_consumer")
    tokens = pair.prompt(100)
    name, params = pair.prefill(p, tokens)
    _wait_expired(pair, p)
    pair.settle(p)
    assert any(name in line and "nobody fetched" in line for line in log)
    pair.decode(d, tokens, params, p)  # too late: recomputed, not answered from reused blocks
    assert d.stats["failures"] == {"expired": 1}
    assert d.stats["stale_tickets"] == 1
    assert d.stats["recomputed_tokens"] == 99
    pair.step_until(lambda: p.stats.get("stale_refused") == 1, p)
    pair.settle(p, d)


def test_policy_fail(engine: Callable[..., Any], pair: Any) -> None:
    p = engine("kv_producer", extra={"lease": 0.05})
    d = engine("kv_consumer", policy="fail")
    tokens = pair.prompt(100)
    _, params = pair.prefill(p, tokens)
    _wait_expired(pair, p)
    name = d.add(tokens, params=params)
    pair.step_until(lambda: d.answers[name]["finish"] is not None, d, p)
    assert d.answers[name] == {"tokens": [], "finish": "error", "params": None}
    pair.settle(p, d)


def test_a_ticket_serves_once(engine: Callable[..., Any], pair: Any) -> None:
    p = engine("kv_producer")
    first, second = engine("kv_consumer"), engine("kv_consumer")
    tokens = pair.prompt(100)
    _, params = pair.prefill(p, tokens)
    again = {**params}
    pair.decode(first, tokens, params, p)
    pair.settle(p)
    pair.prefill(p, pair.prompt(1500))  # in the same blocks
    pair.decode(second, tokens, again, p)
    assert second.stats["failures"] == {"stale": 1}


def test_params_of_another_prompt(engine: Callable[..., Any], pair: Any, log: list[str]) -> None:
    p, d = engine("kv_producer"), engine("kv_consumer")
    _, params = pair.prefill(p, pair.prompt(100))
    pair.decode(d, pair.prompt(100, 1), params, p)
    assert d.stats["failures"] == {"mismatch": 1}
    assert any("mixed up two requests" in line for line in log)


@pytest.mark.parametrize(
    "missing",
    ["kvxfer", "version", "tokens", "agents", "signature", "layers", "name", "seal", "digest"],
)
def test_damaged_params(engine: Callable[..., Any], pair: Any, missing: str) -> None:
    from kvxfer.ticket import AgentRef, _signature, issue_ticket

    p, d = engine("kv_producer", extra={"lease": 0.5}), engine("kv_consumer")
    tokens = pair.prompt(100)
    _, params = pair.prefill(p, tokens)
    ours = params["kvxfer"]
    if missing == "kvxfer":
        del params["kvxfer"]
    elif missing == "version":
        ours["v"] = 1
    elif missing == "tokens":
        del ours["offer"]["tokens"]
    elif missing == "agents":
        ours["agents"] = 5
    elif missing == "layers":  # what anybody can sign where there is no secret
        forged = issue_ticket("g0", [AgentRef(name="p", address="127.0.0.1:5")], num_tokens=1)
        forged["agents"][0]["layers"] = [["model.layers.0.attn"]]
        ours["agents"] = {"g0": {**forged, "signature": _signature(forged, None)}}
    elif missing == "name":
        ours["offer"]["name"] = "\ud800"
    elif missing == "seal":
        del ours["seal"]
    elif missing == "digest":  # one prompt's KV for another
        tokens = pair.prompt(100, 9)
        ours["offer"]["digest"] = pair.prefill(p, tokens)[1]["kvxfer"]["offer"]["digest"]
    else:
        ours["agents"] = {"g0": {**ours["agents"]["g0"], "tokens": [0, 5000]}}
    pair.decode(d, tokens, params, p)
    assert d.stats["failures"] in ({"params": 1}, {"ticket": 1})
    pair.settle(p, d)


@pytest.mark.parametrize("value", [float("inf"), float("nan"), 0, -1, "many", None])
@pytest.mark.parametrize("name", ["tokens", "first", "lease"])
def test_numbers_that_are_none(
    engine: Callable[..., Any], pair: Any, name: str, value: object
) -> None:
    from kvxfer.errors import TicketError
    from kvxfer.integrations.vllm_connector.params import parse

    p = engine("kv_producer", extra={"lease": 0.1})
    request, params = pair.prefill(p, pair.prompt(40))
    request = p.scheduler.requests[request]
    parse(params, request, None)
    ours = params["kvxfer"]
    (ours if name in ours else ours["offer"])[name] = value
    with pytest.raises(TicketError, match="kv_transfer_params"):
        parse(params, request, None)
    pair.settle(p)


@pytest.mark.parametrize("transfer", [{}, {"transfer_id": "x"}])
def test_decode_engine_is_sent_a_prefill(
    engine: Callable[..., Any], pair: Any, fake: Any, log: list[str], transfer: dict[str, str]
) -> None:
    d = engine("kv_consumer")
    for number in range(2):
        tokens = pair.prompt(100, number)
        name = pair.decode(d, tokens, fake.prefill_params(**transfer))
        assert d.answers[name]["params"] is None
    pair.settle(d)
    assert sum("this engine is kv_consumer; a proxy sent it a prefill" in line for line in log) == 1


@pytest.mark.parametrize("transfer", [{}, {"transfer_id": "x"}])
def test_prompts_of_embeddings_are_not_offered(
    engine: Callable[..., Any], pair: Any, fake: Any, log: list[str], transfer: dict[str, str]
) -> None:
    p = engine("kv_producer")
    name = p.add(pair.prompt(100), params=fake.prefill_params(**transfer), max_tokens=1)
    request = p.scheduler.requests[name]
    tokens, request.prompt_token_ids = request.prompt_token_ids, None
    p.connector.scheduler._promises.clear()
    p.connector.on_new_request(request)
    assert not p.connector.scheduler._promises
    pair.step_until(lambda: p.answers[name]["finish"] is not None, p)
    assert p.answers[name]["params"] is None
    assert any("prompts of embeddings cannot be told apart" in line for line in log)
    assert tokens
    pair.settle(p)


@pytest.mark.parametrize("transfer", [{}, {"transfer_id": "x"}])
def test_prompt_that_has_left_the_window(
    engine: Callable[..., Any], pair: Any, fake: Any, transfer: dict[str, str]
) -> None:
    """A proxy that lets the prefill side go on generating."""
    p = engine("kv_producer", windows=(None, 40), extra={"lease": 0.1})
    name = p.add([5], params=fake.prefill_params(**transfer), max_tokens=100)
    pair.step_until(lambda: p.answers[name]["finish"] is not None, p)
    pair.check(p, name, [5], 100)
    if not transfer:
        assert p.answers[name]["params"] is None
    pair.settle(p)


def test_other_weights_are_refused_by_name(
    engine: Callable[..., Any], pair: Any, log: list[str], tmp_path: Path
) -> None:
    from rig.model import write_model

    p = engine("kv_producer", model=write_model(tmp_path / "tuned", seed=5), extra={"lease": 0.5})
    d = engine("kv_consumer")
    tokens = pair.prompt(100)
    _, params = pair.prefill(p, tokens)
    theirs = params["kvxfer"]["fields"]["weights"]
    pair.decode(d, tokens, params, p)
    assert d.stats["failures"] == {"mismatch": 1}
    ours = d.connector.scheduler._fields["weights"]
    assert any(f"weights is {ours!r} here and {theirs!r} there" in line for line in log)
    pair.settle(p, d)


def test_what_does_not_fit_is_declined(engine: Callable[..., Any], pair: Any) -> None:
    p, d = engine("kv_producer", extra={"lease": 1000}), engine("kv_consumer")
    tokens = pair.prompt(100)
    _, params = pair.prefill(p, tokens)
    ours = params["kvxfer"]
    ours["fields"] = {**ours["fields"], "quantization": "float7"}
    pair.decode(d, tokens, params, p)
    assert d.stats["failures"] == {"mismatch": 1}
    pair.settle(p, d)  # long before the lease ends


def test_mixed_up_params_leave_the_other_prompt_alone(
    engine: Callable[..., Any], pair: Any
) -> None:
    p, d = engine("kv_producer", extra={"lease": 1000}), engine("kv_consumer")
    tokens = pair.prompt(100)
    _, params = pair.prefill(p, tokens)
    pair.decode(d, pair.prompt(100, 1), {**params}, p)
    assert d.stats["failures"] == {"mismatch": 1}
    pair.decode(d, tokens, params, p)
    assert d.stats["loads"] == 1
    pair.settle(p, d)


@pytest.mark.parametrize("address", ["192.0.2.1:7", "example.com:7", "[2001:db8::1]:7", "x"])
def test_nobody_is_asked_elsewhere_without_a_secret(
    engine: Callable[..., Any], pair: Any, log: list[str], address: str
) -> None:
    from kvxfer import AgentRef, issue_ticket

    p, d = engine("kv_producer", extra={"lease": 0.5}), engine("kv_consumer")
    tokens = pair.prompt(100)
    _, params = pair.prefill(p, tokens)
    forged = issue_ticket("x", [AgentRef(name="y", address=address)], num_tokens=1)
    params["kvxfer"]["agents"] = {"g0": forged}
    pair.decode(d, tokens, params, p)
    assert d.stats["failures"] == {"ticket": 1}
    assert "declined" not in d.stats
    assert any(address in line and "KVXFER_SECRET" in line for line in log)
    pair.settle(p, d)


def test_secrets_differ(engine: Callable[..., Any], pair: Any) -> None:
    p = engine("kv_producer", extra={"agent": {"secret": "a"}, "lease": 0.5, "host": "127.0.0.1"})
    d = engine("kv_consumer", extra={"agent": {"secret": "b"}})
    tokens = pair.prompt(100)
    _, params = pair.prefill(p, tokens)
    pair.decode(d, tokens, params, p)
    assert d.stats["failures"] == {"ticket": 1}
    pair.settle(p, d)


def test_prefill_side_dies_before_the_fetch(engine: Callable[..., Any], pair: Any) -> None:
    p, d = engine("kv_producer"), engine("kv_consumer")
    tokens = pair.prompt(300)
    _, params = pair.prefill(p, tokens)
    p.close()
    pair.decode(d, tokens, params)
    assert d.stats["failures"] == {"unreachable": 1}
    pair.settle(d)


def test_prefill_side_dies_during_the_fetch(engine: Callable[..., Any], pair: Any) -> None:
    p, d = engine("kv_producer"), engine("kv_consumer")
    warm = pair.prompt(64)
    pair.decode(d, warm, pair.prefill(p, warm)[1], p)
    tokens = pair.prompt(300)
    _, params = pair.prefill(p, tokens)  # its worker makes the offer in the next step only
    name = d.add(tokens, params=params)
    d.step()
    p.close()
    pair.step_until(lambda: d.answers[name]["finish"] is not None, d)
    pair.check(d, name, tokens)
    assert set(d.stats["failures"]) <= {"closed", "peer_lost", "cancelled"}
    pair.settle(d)


def test_prefill_side_restarts(engine: Callable[..., Any], pair: Any) -> None:
    d = engine("kv_consumer")
    for number in range(2):
        p = engine("kv_producer", engine_id="prefill")
        tokens = pair.prompt(200, number)
        _, params = pair.prefill(p, tokens)
        pair.decode(d, tokens, params, p)
        pair.settle(p)
        p.close()
    assert d.stats["loads"] == 2


def test_load_times_out(engine: Callable[..., Any], pair: Any, log: list[str]) -> None:
    p = engine("kv_producer")
    d = engine("kv_consumer", extra={"load_timeout": 2.5, "watchdog": 0.5})
    tokens = pair.prompt(100)
    _, params = pair.prefill(p, tokens)
    both = [d.add(tokens, params=dict(params)) for _ in range(2)]
    # The prefill side is stuck: it makes no step.
    pair.step_until(lambda: all(d.answers[name]["finish"] is not None for name in both), d)
    assert d.stats["failures"] == {"timeout": 1}
    assert any("has been waiting for its KV" in line for line in log)
    (behind,) = {line.partition(" has")[0] for line in log if "behind one with the same" in line}
    assert behind == f"Request {both[1]}"
    pair.settle(p, d)


def test_prompts_that_wait_for_their_prefill_are_named(
    engine: Callable[..., Any], pair: Any, fake: Any, log: list[str]
) -> None:
    p = engine("kv_producer", num_blocks=12, extra={"watchdog": 0.3, "lease": 1000})
    d = engine("kv_consumer")
    tokens = pair.prompt(300)
    _, params = pair.prefill(p, tokens)  # its blocks are held: there is no place for another
    name = p.add(pair.prompt(300, 1), params=fake.prefill_params(transfer_id="x"), max_tokens=1)
    pair.step_until(lambda: any(f"Request {name} has been waiting" in line for line in log), p)
    p.abort(name)
    pair.decode(d, tokens, params, p)
    pair.settle(p, d)


def test_each_cache_of_a_failed_load_is_declined_once(
    engine: Callable[..., Any], pair: Any
) -> None:
    """Also where nothing was to be fetched of the first, and the last could not be fetched."""
    from kvxfer.integrations.vllm_connector.messages import LoadOrder, StepOrders

    windows = (None, 500, 600)
    p = engine("kv_producer", windows=windows, extra={"lease": 1000}, num_blocks=100)
    d = engine("kv_consumer", windows=windows, extra={"load_timeout": 5}, num_blocks=100)
    tokens = pair.prompt(100)
    _, params = pair.prefill(p, tokens)
    name = d.add(tokens, params=params)
    (order,) = d.scheduler.schedule().kv_connector_metadata.load
    first, second, third = order.parts
    parts = [
        dataclasses.replace(first, end=first.first),
        second,
        dataclasses.replace(third, end=10000),
    ]
    declined = []
    worker = d.worker.worker
    told = worker._decline
    worker._decline = lambda key, ticket: (declined.append(key), told(key, ticket))
    orders = StepOrders(load=[LoadOrder(name, "p", parts, 99)], ranks=d.connector.scheduler._ranks)
    d.worker.handle_preemptions(orders)
    failed: set[str] = set()

    def ended() -> bool:
        nonlocal failed
        failed |= d.worker.get_transfer_results(set()).failed_recving
        return bool(failed)

    pair.step_until(ended, p)
    assert failed == {name}
    assert sorted(declined) == [part.key for part in order.parts]
    pair.step_until(lambda: not p.worker.worker._sends, p)  # long before the lease ends


def test_late_orders_are_not_reported(engine: Callable[..., Any], pair: Any) -> None:
    """vLLM's engine dies of a report that it doesn't wait for."""
    from kvxfer.integrations.vllm_connector.messages import StepOrders

    p, d = engine("kv_producer"), engine("kv_consumer")
    tokens = pair.prompt(100)
    sent, params = pair.prefill(p, tokens)
    name = pair.decode(d, tokens, params, p)
    pair.settle(p, d)
    for each, request in ((p, sent), (d, name)):
        orders = StepOrders(withdraw=[(request, [], "")], cancel=[request, "who"])
        each.worker.handle_preemptions(orders)
        results = each.worker.get_transfer_results(set())
        assert not results.finished_sending | results.finished_recving | results.failed_recving


def test_wrong_bytes_are_noticed_by_the_comparison(engine: Callable[..., Any], pair: Any) -> None:
    """The negative control of all tests with this rig."""
    p, d = engine("kv_producer"), engine("kv_consumer")
    tokens = pair.prompt(200)
    _, params = pair.prefill(p, tokens)
    block = params["remote_block_ids"][0][2]
    next(iter(p.kv.values()))[block, 1, 7, 3] += 1
    name = d.add(tokens, params=params)
    pair.step_until(lambda: d.answers[name]["finish"] is not None, d, p)
    assert d.wrong


@pytest.mark.parametrize("digest", [True, False])
def test_bytes_that_flip_on_their_way(engine: Callable[..., Any], pair: Any, digest: bool) -> None:
    from kvxfer import _core

    agent = {"transport": "loopback", "digest": digest}
    p = engine("kv_producer", extra={"agent": agent, "lease": 1.0})
    d = engine("kv_consumer", extra={"agent": agent})
    faults = _core.LoopbackFaults()
    faults.corrupt_write, faults.seed = 1.0, 3
    there, here = p.worker.worker._agent, d.worker.worker._agent
    here._peers.attach_loopback(there._peers, faults)
    tokens = pair.prompt(200)
    _, params = pair.prefill(p, tokens)
    name = d.add(tokens, params=params)
    pair.step_until(lambda: d.answers[name]["finish"] is not None, d, p)
    if digest:
        pair.check(d, name, tokens)
        assert d.stats["failures"] == {"corrupt": 1}
    else:
        assert d.wrong
    pair.settle(p, d)
