"""Real engines on the CPU: a pair must generate what a single one does."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytestmark = [
    pytest.mark.timeout(1800),
    pytest.mark.filterwarnings("default"),
]

LENGTHS = (1, 2, 31, 32, 33, 64, 100, 333, 1000, 3000)


@pytest.fixture(scope="module")
def rig(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Engines of block sizes 32 and 64, one that breaks what it loads if told so, and proxies."""
    from rig import corrupting, engines

    logs = tmp_path_factory.mktemp("engines")
    switch = logs / "break"
    single = engines.start_engine(model, logs / "single.log", core="0")
    p = engines.start_engine(model, logs / "prefill.log", role="kv_producer", core="0")
    d = engines.start_engine(model, logs / "both.log", role="kv_both", core="1", block_size=64)
    breakable = engines.start_engine(
        model,
        logs / "decode.log",
        role="kv_consumer",
        core="1",
        module="rig.corrupting",
        extra={"agent": {"transport": "tcp"}, "codec": "raw"},  # auto takes int8 on slow links
        env={corrupting.SWITCH: str(switch)},
    )
    serial = engines.start_proxy(logs / "serial.log", p, d, "serial")
    concurrent = engines.start_proxy(logs / "concurrent.log", p, d, "concurrent")
    smaller = engines.start_proxy(logs / "smaller.log", d, breakable, "serial")
    router = engines.start_router(logs / "router.log", p, d)
    proxies = [serial, concurrent, smaller, *([] if router is None else [router])]
    with engines.running(single, p, d, breakable, *proxies):
        yield SimpleNamespace(
            single=single,
            p=p,
            d=d,
            breakable=breakable,
            switch=switch,
            serial=serial,
            concurrent=concurrent,
            smaller=smaller,
            router=router,
            ask=engines.completion,
            idle=engines.wait_idle,
            tokens=engines.tokens,
            prompt=engines.prompt,
        )


def _logprobs(answer: dict[str, Any]) -> list[float]:
    return answer["choices"][0]["logprobs"]["token_logprobs"]


def _prefill(rig: Any, tokens: list[int]) -> dict[str, Any]:
    params = {"do_remote_decode": True, "do_remote_prefill": False}
    return rig.ask(rig.p.port, tokens, max_tokens=1, kv_transfer_params=params)[
        "kv_transfer_params"
    ]


@pytest.mark.parametrize("flow", ["serial", "concurrent"])
def test_pair_equals_single_engine(rig: Any, flow: str) -> None:
    proxy = getattr(rig, flow)
    before = rig.d.metric("vllm:kvxfer_loads_total")
    for length in LENGTHS:
        tokens = rig.prompt(length, f"equal {flow}")
        wanted, got = rig.ask(rig.single.port, tokens), rig.ask(proxy.port, tokens)
        assert rig.tokens(got) == rig.tokens(wanted), f"{length} tokens"
        assert _logprobs(got) == pytest.approx(_logprobs(wanted), abs=1e-4)
    rig.idle(rig.p)
    rig.idle(rig.d)
    assert rig.d.metric("vllm:kvxfer_loads_total") - before == len(LENGTHS) - 1
    assert rig.d.metric("vllm:kvxfer_failures_total") == 0
    assert rig.p.metric("vllm:kvxfer_leases_expired_total") == 0


def test_smaller_blocks_on_the_decode_side(rig: Any) -> None:
    """64 to 32, from an engine that does both, and over TCP."""
    before = rig.breakable.metric("vllm:kvxfer_loads_total")
    for length in LENGTHS:
        tokens = rig.prompt(length, "smaller")
        wanted, got = rig.ask(rig.single.port, tokens), rig.ask(rig.smaller.port, tokens)
        assert rig.tokens(got) == rig.tokens(wanted), f"{length} tokens"
        assert _logprobs(got) == pytest.approx(_logprobs(wanted), abs=1e-4)
    rig.idle(rig.d)
    rig.idle(rig.breakable)
    assert rig.breakable.metric("vllm:kvxfer_loads_total") - before == len(LENGTHS) - 1
    assert rig.breakable.metric("vllm:kvxfer_failures_total") == 0


def test_prefix_hits_on_either_side(rig: Any) -> None:
    tokens = rig.prompt(500, "prefix")
    for port, length in ((rig.p.port, 200), (rig.d.port, 100), (rig.d.port, 300)):
        rig.ask(port, tokens[:length], max_tokens=1)
    for length in (500, 450, 448, 250, 65):
        wanted = rig.ask(rig.single.port, tokens[:length])
        for proxy in (rig.serial, rig.concurrent):
            assert rig.tokens(rig.ask(proxy.port, tokens[:length])) == rig.tokens(wanted)
    rig.idle(rig.p)


def test_streaming(rig: Any) -> None:
    from rig.load import stream

    tokens = rig.prompt(300, "stream")
    got = stream(rig.serial.port, tokens, 8).tokens
    assert got == rig.tokens(rig.ask(rig.single.port, tokens))


def test_vllm_router(rig: Any) -> None:
    """vLLM's own router, set up as for NixlConnector, needs to know nothing of ours."""
    if rig.router is None:
        pytest.skip("vllm-router is not installed here; `make test-vllm` installs it")
    before = rig.d.metric("vllm:kvxfer_loaded_tokens_total")
    for length in (100, 700):
        text = " ".join(f"t{token}" for token in rig.prompt(length, "router"))
        wanted, got = (rig.ask(each.port, text)["choices"][0] for each in (rig.single, rig.router))
        assert got["text"] == wanted["text"]
    rig.idle(rig.p)
    rig.idle(rig.d)
    assert rig.d.metric("vllm:kvxfer_loaded_tokens_total") - before == 99 + 699


def test_several_samples(rig: Any) -> None:
    tokens = rig.prompt(300, "samples")
    answer = rig.ask(rig.serial.port, tokens, n=3, temperature=0.01, seed=1)
    wanted = rig.tokens(rig.ask(rig.single.port, tokens))
    assert [choice["token_ids"] for choice in answer["choices"]] == [wanted] * 3
    rig.idle(rig.p)


def test_a_broken_block_is_noticed_by_the_comparison(rig: Any) -> None:
    """The negative control: with this model the tokens depend on each block."""
    rig.switch.touch()
    noticed = 0
    for number in range(5):
        tokens = rig.prompt(60, number)
        got = rig.ask(rig.breakable.port, tokens, kv_transfer_params=_prefill(rig, tokens))
        noticed += rig.tokens(got) != rig.tokens(rig.ask(rig.single.port, tokens))
    rig.switch.unlink()
    assert noticed == 5


def test_a_flipped_bit_is_noticed_by_the_digest(rig: Any) -> None:
    from rig.relay import flipping

    tokens = rig.prompt(700, "flipped")
    wanted = rig.tokens(rig.ask(rig.single.port, tokens))
    before = rig.breakable.metric("vllm:kvxfer_failures_total")
    with flipping() as relay:
        params = relay.through(_prefill(rig, tokens))
        assert rig.tokens(rig.ask(rig.breakable.port, tokens, kv_transfer_params=params)) == wanted
        assert relay.flipped
    assert rig.breakable.lines("does not match its digest")
    rig.idle(rig.breakable)
    assert rig.breakable.metric("vllm:kvxfer_failures_total") == before + 1


def test_prefill_engine_is_killed(rig: Any) -> None:
    """Last, as it does what its name says."""
    tokens = rig.prompt(200, "killed")
    params = _prefill(rig, tokens)
    rig.p.kill()
    wanted = rig.tokens(rig.ask(rig.single.port, tokens))
    got = rig.ask(rig.d.port, tokens, kv_transfer_params=params)
    assert rig.tokens(got) == wanted  # recomputed
    for proxy in (rig.serial, rig.concurrent):
        assert rig.tokens(rig.ask(proxy.port, rig.prompt(150, "later"))) == rig.tokens(
            rig.ask(rig.single.port, rig.prompt(150, "later"))
        )
    rig.idle(rig.d)
