"""Real engines in bfloat16, whose blocks some CPUs pack in ways that strides cannot describe."""

from __future__ import annotations

import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

pytestmark = [pytest.mark.timeout(1800), pytest.mark.filterwarnings("default")]

LENGTHS = (2, 31, 32, 33, 64, 100, 333, 1000, 3000)


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    pytest.importorskip("vllm", reason="vLLM is not installed here; `make test-vllm` installs it")
    from rig import engines, load, overlap
    from rig.model import write_model

    logs = tmp_path_factory.mktemp("bfloat16")
    model = write_model(logs / "model", dtype="bfloat16")
    single = engines.start_engine(model, logs / "single.log", dtype="bfloat16", core="0")
    shared: dict[str, Any] = {"dtype": "bfloat16"}
    p = overlap.start_traced(model, logs, "prefill", role="kv_producer", core="0", **shared)
    d = overlap.start_traced(model, logs, "decode", role="kv_consumer", core="1", **shared)
    serial = engines.start_proxy(logs / "serial.log", p, d, "serial")
    concurrent = engines.start_proxy(logs / "concurrent.log", p, d, "concurrent")
    with engines.running(single, p, d, serial, concurrent):
        yield SimpleNamespace(
            single=single,
            p=p,
            d=d,
            serial=serial,
            concurrent=concurrent,
            ask=engines.completion,
            idle=engines.wait_idle,
            prompt=engines.prompt,
            load=load,
            traced=lambda since: overlap.read(logs, "prefill", "decode", since),
        )


def test_pair_equals_single_engine(rig: Any) -> None:
    """Within the noise of two runs of one engine: a prompt's end is computed in other batches."""
    answers = {}
    noise = 0.0
    for length in LENGTHS:
        for flow in ("serial", "concurrent"):
            tokens = rig.prompt(length, f"bfloat16 {flow}")
            first, again = (rig.ask(rig.single.port, tokens) for _ in range(2))  # then from cache
            noise = max(noise, rig.load.distance(first, again))
            answers[flow, length] = first, rig.ask(getattr(rig, flow).port, tokens)
    assert 0 < noise < 0.2
    for (flow, length), (wanted, got) in answers.items():
        assert not rig.load.disagreement(wanted, got, 2 * noise), f"{flow}, {length} tokens"
    rig.idle(rig.p)
    rig.idle(rig.d)
    assert rig.d.metric("vllm:kvxfer_loads_total") == len(answers)
    assert rig.d.metric("vllm:kvxfer_failures_total") == 0


def test_layers_are_sent_while_others_are_computed(rig: Any) -> None:
    rig.ask(rig.concurrent.port, rig.prompt(40, "warm"))
    early = []
    for attempt in range(3):  # a process that got no core for long proves nothing
        since = time.monotonic()
        rig.ask(rig.concurrent.port, rig.prompt(2000, f"overlap {attempt}"), max_tokens=1)
        rig.idle(rig.d)
        overlap = rig.traced(since)
        print(overlap.table())
        early.append(overlap.early)
        if early[-1] >= 0.5:
            return
    pytest.fail(f"only {early} had arrived when the last layer was written")
