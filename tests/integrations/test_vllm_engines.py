"""Real engines on the CPU: a pair must generate what a single one does."""

from __future__ import annotations

import json
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.filterwarnings("default"),
]

LENGTHS = (1, 2, 31, 32, 33, 64, 100, 333, 1000, 3000)


@pytest.fixture(scope="module")
def rig(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A single engine, a prefill engine, two decode engines (one of them broken), and proxies."""
    from rig import engines

    logs = tmp_path_factory.mktemp("engines")
    single = engines.start_engine(model, logs / "single.log", core="0")
    p = engines.start_engine(model, logs / "prefill.log", role="kv_producer", core="0")
    d = engines.start_engine(
        model, logs / "decode.log", role="kv_consumer", core="1", block_size=64
    )
    broken = engines.start_engine(
        model, logs / "broken.log", role="kv_consumer", core="1", module="rig.corrupting"
    )
    serial = engines.start_proxy(logs / "serial.log", p, d, "serial")
    concurrent = engines.start_proxy(logs / "concurrent.log", p, d, "concurrent")
    with engines.running(single, p, d, broken, serial, concurrent):
        yield SimpleNamespace(
            single=single,
            p=p,
            d=d,
            broken=broken,
            serial=serial,
            concurrent=concurrent,
            ask=engines.completion,
            tokens=engines.tokens,
            prompt=engines.prompt,
        )


def _logprobs(answer: dict[str, Any]) -> list[float]:
    return answer["choices"][0]["logprobs"]["token_logprobs"]


def _idle(server: Any) -> None:
    """Wait until the engine holds no request and no block."""
    deadline = time.monotonic() + 60
    names = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
    while any(server.metric(name) for name in names):
        assert time.monotonic() < deadline, server.log.read_text()[-3000:]
        time.sleep(0.3)


@pytest.mark.parametrize("flow", ["serial", "concurrent"])
def test_pair_equals_single_engine(rig: Any, flow: str) -> None:
    proxy = getattr(rig, flow)
    before = rig.d.metric("vllm:kvxfer_loads_total")
    for length in LENGTHS:
        tokens = rig.prompt(length, f"equal {flow}")
        wanted, got = rig.ask(rig.single.port, tokens), rig.ask(proxy.port, tokens)
        assert rig.tokens(got) == rig.tokens(wanted), f"{length} tokens"
        assert _logprobs(got) == pytest.approx(_logprobs(wanted), abs=1e-3)
    _idle(rig.p)
    _idle(rig.d)
    assert rig.d.metric("vllm:kvxfer_loads_total") - before == len(LENGTHS) - 1
    assert rig.d.metric("vllm:kvxfer_failures_total") == 0
    assert rig.p.metric("vllm:kvxfer_leases_expired_total") == 0


def test_prefix_hits_on_either_side(rig: Any) -> None:
    tokens = rig.prompt(500, "prefix")
    for port, length in ((rig.p.port, 200), (rig.d.port, 100), (rig.d.port, 300)):
        rig.ask(port, tokens[:length], max_tokens=1)
    for length in (500, 450, 448, 250, 65):
        wanted = rig.ask(rig.single.port, tokens[:length])
        assert rig.tokens(rig.ask(rig.serial.port, tokens[:length])) == rig.tokens(wanted)
    _idle(rig.p)


def test_streaming(rig: Any) -> None:
    tokens = rig.prompt(300, "stream")
    body = {
        "prompt": tokens,
        "max_tokens": 8,
        "temperature": 0,
        "stream": True,
        "return_token_ids": True,
        "ignore_eos": True,
    }
    request = urllib.request.Request(
        f"http://127.0.0.1:{rig.serial.port}/v1/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    got = []
    with urllib.request.urlopen(request, timeout=60) as answer:
        for line in answer:
            if line.startswith(b"data: {"):
                got += json.loads(line[6:])["choices"][0]["token_ids"] or []
    assert got == rig.tokens(rig.ask(rig.single.port, tokens))


def test_several_samples(rig: Any) -> None:
    tokens = rig.prompt(300, "samples")
    answer = rig.ask(rig.serial.port, tokens, n=3, temperature=0.01, seed=1)
    wanted = rig.tokens(rig.ask(rig.single.port, tokens))
    assert [choice["token_ids"] for choice in answer["choices"]] == [wanted] * 3
    _idle(rig.p)


def test_a_broken_block_is_noticed(rig: Any) -> None:
    """The negative control: with this model the tokens depend on each block."""
    params = {"do_remote_decode": True, "do_remote_prefill": False}
    noticed = 0
    for number in range(5):
        tokens = rig.prompt(60, number)
        answer = rig.ask(rig.p.port, tokens, max_tokens=1, kv_transfer_params=params)
        params_ = answer["kv_transfer_params"]
        got = rig.ask(rig.broken.port, tokens, kv_transfer_params=params_)
        noticed += rig.tokens(got) != rig.tokens(rig.ask(rig.single.port, tokens))
    assert noticed == 5


def test_prefill_engine_is_killed(rig: Any) -> None:
    """Last, as it does what its name says."""
    tokens = rig.prompt(200, "killed")
    params = {"do_remote_decode": True, "do_remote_prefill": False}
    answer = rig.ask(rig.p.port, tokens, max_tokens=1, kv_transfer_params=params)
    rig.p.kill()
    wanted = rig.tokens(rig.ask(rig.single.port, tokens))
    got = rig.ask(rig.d.port, tokens, kv_transfer_params=answer["kv_transfer_params"])
    assert rig.tokens(got) == wanted  # recomputed
    for proxy in (rig.serial, rig.concurrent):
        assert rig.tokens(rig.ask(proxy.port, rig.prompt(150, "later"))) == rig.tokens(
            rig.ask(rig.single.port, rig.prompt(150, "later"))
        )
    _idle(rig.d)
