"""The life of requests on both sides, after what vLLM's own connector tests check."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest

pytestmark = pytest.mark.filterwarnings("default")

NIXL_KEYS = {
    "do_remote_prefill",
    "do_remote_decode",
    "remote_block_ids",
    "remote_engine_id",
    "remote_request_id",
    "remote_host",
    "remote_port",
    "tp_size",
}


@pytest.fixture
def pair(fake: Any) -> Any:
    from rig import pair

    return pair


@pytest.mark.parametrize(("block", "other"), [(32, 32), (32, 64), (64, 32)])
def test_prompts_of_all_lengths(
    engine: Callable[..., Any], pair: Any, block: int, other: int
) -> None:
    p, d = engine("kv_producer", block_size=block), engine("kv_consumer", block_size=other)
    lengths = [1, 2, 31, 32, 33, 63, 64, 65, 127, 128, 500, 1000]
    for length in lengths:
        tokens = pair.prompt(length)
        _, params = pair.prefill(p, tokens)
        pair.decode(d, tokens, params, p)
    pair.settle(p, d)
    # Of each prompt all but the last token; of the first nothing is left then.
    assert d.stats["loaded_tokens"] == sum(lengths) - len(lengths)
    assert d.stats["loads"] == len(lengths) - 1
    assert d.stats["declined"] == 1
    assert p.stats["sends"] == len(lengths)


def test_prefill_side_keeps_blocks_until_they_are_fetched(
    engine: Callable[..., Any], pair: Any
) -> None:
    p, d = engine("kv_producer"), engine("kv_consumer")
    tokens = pair.prompt(100)
    name, params = pair.prefill(p, tokens)
    assert params.keys() >= NIXL_KEYS
    assert params["do_remote_prefill"] is True
    assert params["remote_request_id"] == name
    assert [len(group) for group in params["remote_block_ids"]] == [4]
    for _ in range(5):
        p.step()
    assert p.status(name) == "FINISHED_LENGTH_CAPPED"
    assert p.free_blocks == 63 - 4
    assert p.scheduler.has_requests()  # or the engine would sleep and never report the end
    pair.decode(d, tokens, params, p)
    pair.settle(p, d)


def test_params_survive_json_and_msgpack(engine: Callable[..., Any], pair: Any) -> None:
    import json

    import msgspec

    p, d = engine("kv_producer"), engine("kv_consumer")
    tokens = pair.prompt(70)
    _, params = pair.prefill(p, tokens)
    params = msgspec.msgpack.decode(msgspec.msgpack.encode(json.loads(json.dumps(params))))
    pair.decode(d, tokens, params, p)
    assert d.stats["loads"] == 1


def test_ordinary_requests_are_left_alone(engine: Callable[..., Any], pair: Any) -> None:
    p = engine("kv_both")
    tokens = pair.prompt(50)
    name = pair.decode(p, tokens, None)
    assert p.answers[name]["params"] is None
    pair.settle(p)
    assert not p.stats


def test_decode_without_params_is_told(
    engine: Callable[..., Any], pair: Any, log: list[str]
) -> None:
    d = engine("kv_consumer")
    pair.decode(d, pair.prompt(50), None)
    assert any("without kv_transfer_params" in line for line in log)
    assert d.connector.scheduler.stats.data.get("prefills_without_params", 0) <= 1


def test_request_waits_without_computing(engine: Callable[..., Any], pair: Any) -> None:
    p, d = engine("kv_producer"), engine("kv_consumer")
    tokens = pair.prompt(100)
    _, params = pair.prefill(p, tokens)
    name = d.add(tokens, params=params)
    output = d.scheduler.schedule()
    assert output.total_num_scheduled_tokens == 0
    assert d.status(name) == "WAITING_FOR_REMOTE_KVS"
    assert len(output.kv_connector_metadata.load) == 1


def test_abort_during_prefill(engine: Callable[..., Any], pair: Any, fake: Any) -> None:
    p = engine("kv_producer", max_batched_tokens=64)
    name = p.add(pair.prompt(300), params=fake.prefill_params(), max_tokens=1)
    p.step()
    p.abort(name)
    pair.settle(p)
    assert p.answers[name]["params"] is None


def test_abort_while_the_blocks_wait(engine: Callable[..., Any], pair: Any) -> None:
    p, d = engine("kv_producer"), engine("kv_consumer")
    tokens = pair.prompt(100)
    name, params = pair.prefill(p, tokens)
    p.abort(name)  # too late: it has finished
    pair.decode(d, tokens, params, p)
    pair.settle(p, d)


@pytest.mark.parametrize("steps", [0, 1, 2, 3])
def test_abort_on_the_decode_side(engine: Callable[..., Any], pair: Any, steps: int) -> None:
    p, d = engine("kv_producer", extra={"lease": 1000}), engine("kv_consumer")
    tokens = pair.prompt(1000)
    _, params = pair.prefill(p, tokens)
    name = d.add(tokens, params=params)
    for _ in range(steps):
        d.step()
    d.abort(name)
    pair.settle(p, d)  # long before the lease ends
    pair.decode(d, tokens, None)


def test_abort_before_the_offer_is_made(engine: Callable[..., Any], pair: Any) -> None:
    p, d = engine("kv_producer"), engine("kv_consumer")
    tokens = pair.prompt(1000)
    _, params = pair.prefill(p, tokens)
    name = d.add(tokens, params=params)
    d.step()  # the fetch waits there: the producer's worker has not heard of it
    d.abort(name)
    pair.settle(p, d)


def test_rejected_by_the_frontend(engine: Callable[..., Any], pair: Any) -> None:
    p, d = engine("kv_producer", extra={"lease": 1000}), engine("kv_consumer")
    tokens = pair.prompt(100)
    _, params = pair.prefill(p, tokens)
    name = d.add(tokens, params=params, abort_immediately=True)
    d.abort(name)
    pair.settle(p, d)


def test_prefix_hits_on_the_decode_side(engine: Callable[..., Any], pair: Any) -> None:
    p, d = engine("kv_producer", extra={"lease": 1000}), engine("kv_consumer")
    tokens = pair.prompt(128)
    _, params = pair.prefill(p, tokens)
    pair.decode(d, tokens, params, p)
    assert d.stats["loaded_tokens"] == 127
    longer = tokens + pair.prompt(100, 1)  # the four blocks of before are here
    _, params = pair.prefill(p, longer)
    pair.decode(d, longer, params, p)
    assert d.stats["loaded_tokens"] == 127 + 99
    whole = [*tokens, 5]  # nothing but the last token is missing
    _, params = pair.prefill(p, whole)
    pair.decode(d, whole, params, p)
    assert d.stats["loads"] == 2
    assert d.stats["declined"] == 1
    pair.settle(p, d)


def test_prefix_hit_on_the_prefill_side(engine: Callable[..., Any], pair: Any) -> None:
    p, d = engine("kv_producer"), engine("kv_consumer")
    for tokens in (pair.prompt(128), [*pair.prompt(128), 7, 8], pair.prompt(128)[:64]):
        _, params = pair.prefill(p, tokens)
        pair.decode(d, tokens, params, p)
    pair.settle(p, d)


def test_chunked_prefill(engine: Callable[..., Any], pair: Any) -> None:
    p, d = engine("kv_producer", max_batched_tokens=64), engine("kv_consumer")
    tokens = pair.prompt(1000)
    _, params = pair.prefill(p, tokens)
    pair.decode(d, tokens, params, p)
    pair.settle(p, d)


def test_several_samples_of_one_prompt_fetch_once(engine: Callable[..., Any], pair: Any) -> None:
    p, d = engine("kv_producer"), engine("kv_consumer")
    tokens = pair.prompt(200)
    _, params = pair.prefill(p, tokens)
    names = [d.add(tokens, params=dict(params)) for _ in range(3)]
    pair.step_until(lambda: all(d.answers[name]["finish"] for name in names), d, p)
    for name in names:
        pair.check(d, name, tokens)
    assert d.stats["loads"] == 1
    assert "failures" not in d.stats
    pair.settle(p, d)


def test_many_at_once(engine: Callable[..., Any], pair: Any, fake: Any) -> None:
    p = engine("kv_producer", num_blocks=200)
    d = engine("kv_consumer", block_size=64, num_blocks=100)
    prompts = [pair.prompt(40 + 13 * number, number) for number in range(16)]
    sent = [p.add(tokens, params=fake.prefill_params(), max_tokens=1) for tokens in prompts]
    pair.step_until(lambda: all(p.answers[name]["finish"] for name in sent), p)
    names = [
        d.add(tokens, params=p.answers[name]["params"])
        for tokens, name in zip(prompts, sent, strict=True)
    ]
    pair.step_until(lambda: all(d.answers[name]["finish"] for name in names), d, p)
    for tokens, name in zip(prompts, names, strict=True):
        pair.check(d, name, tokens)
    pair.settle(p, d)


def test_preemption_on_the_decode_side(engine: Callable[..., Any], pair: Any) -> None:
    p, d = engine("kv_producer", num_blocks=200), engine("kv_consumer", num_blocks=14)
    prompts = [pair.prompt(100, number) for number in range(3)]
    params = [pair.prefill(p, tokens)[1] for tokens in prompts]
    names = [
        d.add(tokens, params=given, max_tokens=60)
        for tokens, given in zip(prompts, params, strict=True)
    ]
    pair.step_until(lambda: all(d.answers[name]["finish"] for name in names), d, p)
    for tokens, name in zip(prompts, names, strict=True):
        pair.check(d, name, tokens, 60)
    pair.settle(p, d)


@pytest.mark.parametrize("window", [40, 64, 100])
def test_sliding_windows(engine: Callable[..., Any], pair: Any, window: int) -> None:
    windows = (None, window)
    for block, other in itertools.product((32, 64), repeat=2):
        keeps = block >= other  # else no prefix cache takes what is on offer
        p = engine("kv_producer", block_size=block, windows=windows, num_blocks=400)
        d = engine(
            "kv_consumer",
            block_size=other,
            windows=windows,
            num_blocks=400,
            prefix_caching=keeps,
        )
        for length in (1, 2, window - 1, window, window + 1, 127, 128, 129, 160, 161, 500):
            tokens = pair.prompt(length, window)
            _, params = pair.prefill(p, tokens)
            pair.decode(d, tokens, params, p)
        pair.settle(p, d)
        assert "failures" not in d.stats


def test_half_a_block_of_a_window_is_not_cached(
    engine: Callable[..., Any], pair: Any, log: list[str]
) -> None:
    windows = (None, 65)
    p = engine("kv_producer", windows=windows, extra={"lease": 1000})
    d = engine("kv_consumer", block_size=64, windows=windows)
    tokens = pair.prompt(233)
    _, params = pair.prefill(p, tokens)
    pair.decode(d, tokens, params, p)
    assert d.stats["failures"] == {"mismatch": 1}
    wanted = "cache g1 is on offer from 160"
    assert any(wanted in line and "use equal block sizes" in line for line in log)
    pair.settle(p, d)  # declined
    pair.decode(d, tokens[:192] + pair.prompt(20, 1), None)
    pair.settle(p, d)
