"""Real engines with a second connector beside ours, under vLLM's MultiConnector.

That is vLLM's ExampleConnector, which writes all KV to disk: its OffloadingConnector says "CPU
Offloading is currently only supported on CUDA-alike and XPU GPUs", so that it starts on no CPU.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytestmark = [
    pytest.mark.slow,  # three starts of engines
    pytest.mark.timeout(1800),
    pytest.mark.filterwarnings("default"),
]


def test_pair_equals_single_engine(model: Path, tmp_path: Path) -> None:
    from rig import engines

    def start(role: str, core: str) -> engines.Server:
        ours = {
            "kv_connector": "KvxferConnector",
            "kv_role": role,
            "kv_load_failure_policy": "recompute",
        }
        store = {
            "kv_connector": "ExampleConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"shared_storage_path": str(tmp_path / role)},
        }
        more: dict[str, Any] = {"connector": "MultiConnector", "role": role, "core": core}
        return engines.start_engine(
            model, tmp_path / f"{role}.log", extra={"connectors": [ours, store]}, **more
        )

    single = engines.start_engine(model, tmp_path / "single.log", core="0")
    p, d = start("kv_producer", "0"), start("kv_consumer", "1")
    proxies = [
        engines.start_proxy(tmp_path / f"{f}.log", p, d, f) for f in ("serial", "concurrent")
    ]
    with engines.running(single, p, d, *proxies):
        for proxy in proxies:
            for length in (40, 300, 1000):
                tokens = engines.prompt(length, f"multi {proxy.port}")
                wanted, got = (engines.completion(each.port, tokens) for each in (single, proxy))
                assert engines.tokens(got) == engines.tokens(wanted), f"{length} tokens"
        engines.wait_idle(p)
        engines.wait_idle(d)
        assert d.metric("vllm:kvxfer_loads_total") == 6
        assert d.metric("vllm:kvxfer_failures_total") == 0
    assert list((tmp_path / "kv_producer").iterdir())  # the other connector has worked too
