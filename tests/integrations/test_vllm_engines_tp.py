"""Real engines of different tensor parallel degrees."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytestmark = [pytest.mark.timeout(1800), pytest.mark.filterwarnings("default")]

LENGTHS = (2, 33, 333, 1500)


@pytest.fixture(scope="module")
def rig(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """An engine of two ranks that does both, and one of one rank on either side of it."""
    from rig import engines

    logs = tmp_path_factory.mktemp("tensor-parallel")
    p = engines.start_engine(model, logs / "prefill.log", role="kv_producer")
    two = engines.start_engine(
        model, logs / "two.log", role="kv_both", options=("--tensor-parallel-size", "2")
    )
    d = engines.start_engine(model, logs / "decode.log", role="kv_consumer", block_size=64)
    up = {
        flow: engines.start_proxy(logs / f"up-{flow}.log", p, two, flow)
        for flow in ("serial", "concurrent")
    }
    down = {
        flow: engines.start_proxy(logs / f"down-{flow}.log", two, d, flow)
        for flow in ("serial", "concurrent")
    }
    with engines.running(p, two, d, *up.values(), *down.values()):
        yield SimpleNamespace(
            p=p,
            two=two,
            d=d,
            up=up,
            down=down,
            ask=engines.completion,
            idle=engines.wait_idle,
            tokens=engines.tokens,
            prompt=engines.prompt,
        )


@pytest.mark.parametrize("flow", ["serial", "concurrent"])
@pytest.mark.parametrize("direction", ["up", "down"])
def test_pair_equals_single_engine(rig: Any, direction: str, flow: str) -> None:
    """The prefill engine of one rank, asked without params, is the single engine."""
    decode = rig.two if direction == "up" else rig.d
    ranks = 2 if direction == "up" else 1
    loads = decode.metric("vllm:kvxfer_loads_total")
    failures = decode.metric("vllm:kvxfer_failures_total")
    for length in LENGTHS:
        tokens = rig.prompt(length, f"{direction} {flow}")
        got = rig.ask(getattr(rig, direction)[flow].port, tokens)
        wanted = rig.ask(rig.p.port, tokens)
        assert rig.tokens(got) == rig.tokens(wanted), f"{length} tokens"
        assert got["choices"][0]["logprobs"]["token_logprobs"] == pytest.approx(
            wanted["choices"][0]["logprobs"]["token_logprobs"], abs=1e-3
        )
    for engine in (rig.p, rig.two, rig.d):
        rig.idle(engine)
    assert decode.metric("vllm:kvxfer_loads_total") - loads == ranks * len(LENGTHS)
    assert decode.metric("vllm:kvxfer_failures_total") == failures
