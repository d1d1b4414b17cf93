"""What vLLM expects of a connector's class, so that the next release's changes show at once."""

from __future__ import annotations

import inspect
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytestmark = pytest.mark.filterwarnings("default")


def test_signatures_are_those_of_the_base(fake: Any) -> None:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import (
        KVConnectorBase_V1,
        SupportsHMA,
    )

    from kvxfer.integrations.vllm_connector import KvxferConnector

    own = {name for name, value in vars(KvxferConnector).items() if inspect.isroutine(value)}
    own |= {name for name, value in vars(KvxferConnector).items() if isinstance(value, classmethod)}
    ours = {"scheduler", "worker"}
    for name in sorted(own - ours):
        if name.startswith("_") and name != "__init__":
            continue
        base = getattr(KVConnectorBase_V1, name, None) or getattr(SupportsHMA, name)
        wanted = inspect.signature(base).parameters
        found = inspect.signature(getattr(KvxferConnector, name)).parameters
        assert list(found) == list(wanted), name
        for parameter, theirs in wanted.items():
            assert found[parameter].kind == theirs.kind, f"{name}({parameter})"
            assert found[parameter].default == theirs.default, f"{name}({parameter})"
    assert not KvxferConnector.__abstractmethods__


def test_importing_starts_nothing(fake: Any) -> None:
    code = (
        "import sys, threading\n"
        "from kvxfer.integrations.vllm_connector import register\n"
        "register(); register()\n"
        "assert threading.active_count() == 1\n"
        "assert 'kvxfer.integrations.vllm_connector.worker' not in sys.modules\n"
        "from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory\n"
        "found = KVConnectorFactory.get_connector_class_by_name('KvxferConnector')\n"
        "assert found.__name__ == 'KvxferConnector'\n"
        "assert 'kvxfer.integrations.vllm_connector.worker' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True, timeout=300)


def test_by_module_path(fake: Any) -> None:
    from vllm.config import KVTransferConfig
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    config = KVTransferConfig(
        kv_connector="KvxferConnector",
        kv_connector_module_path="kvxfer.integrations.vllm_connector",
        kv_role="kv_both",
    )
    found = KVConnectorFactory.get_connector_class(config)
    assert found.__name__ == "KvxferConnector"
    assert KVConnectorFactory.supports_hma_config(config)


def test_unknown_options_are_refused(engine: Callable[..., Any]) -> None:
    with pytest.raises(ValueError, match="has codex, which KvxferConnector does not know; .*codec"):
        engine("kv_both", extra={"codex": "int8"})
    with pytest.raises(ValueError, match="kv_connector_extra_config: .*int9"):
        engine("kv_both", extra={"codec": "int9"})
    with pytest.raises(ValueError, match="lease is 0"):
        engine("kv_both", extra={"lease": 0})


def test_weights_that_differ_in_the_middle_only(fake: Any, tmp_path: Path) -> None:
    from kvxfer.integrations.vllm_connector.compat import _weights

    file = tmp_path / "model.safetensors"
    kept = bytearray(4 << 20)
    file.write_bytes(kept)
    before = _weights(str(tmp_path))
    assert _weights(str(tmp_path)) == before
    for at in range(1 << 20, 3 << 20, 1024):  # as a merged adapter does
        kept[at] = 1
    file.write_bytes(kept)
    assert _weights(str(tmp_path)) != before


def test_revision_names_the_commit(fake: Any, engine: Callable[..., Any]) -> None:
    from kvxfer.integrations.vllm_connector.compat import engine_fields

    config = engine("kv_both").config
    before = engine_fields(config)
    config.model_config.hf_config._commit_hash = "abc123"
    after = engine_fields(config)
    assert {name for name in before if before[name] != after[name]} == {"model revision"}
    assert "abc123" in after["model revision"]


def test_stats_go_through_pickle_and_add_up(fake: Any) -> None:
    from kvxfer.integrations.vllm_connector.stats import Stats

    one, other = Stats(), Stats()
    one.add(loads=1, loaded_bytes=2e9)
    one.took("load_seconds", 0.5)
    one.failed("stale")
    other.add(loads=2)
    other.took("load_seconds", 1.5)
    other.failed("stale")
    total = pickle.loads(pickle.dumps(one)).aggregate(pickle.loads(pickle.dumps(other)))
    assert total.reduce() == {
        "loads": 3,
        "loaded_bytes": 2e9,
        "load_seconds median": 1.5,
        "load_seconds max": 1.5,
        "failures stale": 2,
        "GB/s": 1.0,
    }
    assert one.take() is not None
    assert one.is_empty()
    assert one.take() is None


def test_prometheus_metrics(fake: Any) -> None:
    from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

    from kvxfer.integrations.vllm_connector import KvxferConnector

    registry = CollectorRegistry()

    def make(kind: Any) -> Any:
        return lambda **options: kind(**options, registry=registry)

    metrics = KvxferConnector.build_prom_metrics(
        SimpleNamespace(kv_transfer_config=None),
        {kind: make(kind) for kind in (Counter, Gauge, Histogram)},
        ["engine"],
        {0: ["0"]},
    )
    metrics.observe({"loads": 2, "load_seconds": [0.1, 0.2], "failures": {"stale": 3}}, 0)
    labels = {"engine": "0"}
    assert registry.get_sample_value("vllm:kvxfer_loads_total", labels) == 2
    assert registry.get_sample_value("vllm:kvxfer_load_seconds_count", labels) == 2
    labels["reason"] = "stale"
    assert registry.get_sample_value("vllm:kvxfer_failures_total", labels) == 3


def test_under_multi_connector(engine: Callable[..., Any], fake: Any) -> None:
    from rig import pair
    from vllm.config import KVTransferConfig

    def transfer(role: str) -> KVTransferConfig:
        ours = {"kv_connector": "KvxferConnector", "kv_role": role}
        other = {
            "kv_connector": "KeepingConnector",
            "kv_role": role,
            "kv_connector_module_path": "rig.keeping",
        }
        return KVTransferConfig(
            kv_connector="MultiConnector",
            kv_role=role,
            kv_load_failure_policy="recompute",
            kv_connector_extra_config={"connectors": [ours, other]},
        )

    p = engine("kv_producer", transfer=transfer("kv_producer"))
    d = engine("kv_consumer", transfer=transfer("kv_consumer"))
    for length in (1, 100, 500):
        tokens = pair.prompt(length)
        _, params = pair.prefill(p, tokens)
        pair.decode(d, tokens, params, p)
    name = d.add(pair.prompt(300), params=pair.prefill(p, pair.prompt(300))[1])
    d.step()
    d.abort(name)
    pair.settle(p, d)
