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


def test_hooks_that_are_left_to_the_base(fake: Any) -> None:
    """A hook that the next release adds shows here, to be looked at."""
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

    from kvxfer.integrations.vllm_connector import KvxferConnector

    hooks = {name for name in vars(KVConnectorBase_V1) if not name.startswith("_")}
    assert hooks - set(vars(KvxferConnector)) == {
        "bind_connector_metadata",
        "bind_gpu_block_pool",
        "build_connector_worker_meta",
        "clear_connector_metadata",
        "finish_forward",
        "get_block_ids_with_load_errors",  # would be wrong with several cache groups
        "get_external_cache_hit_sources",
        "get_finished_count",  # all ranks report
        "get_kv_connector_kv_cache_events",
        "get_mem_pool_context",
        "get_required_kvcache_layout",  # any will do
        "has_connector_metadata",
        "has_pending_push_work",  # vLLM steps as long as blocks of finished requests wait
        "register_finished_partial_tail",
        "requires_kv_delivery",  # of producers, as the base has it
        "reset_cache",
        "reset_capture_state",
        "role",
        "set_host_xfer_buffer_ops",
        "supports_divergent_local_hybrid_hits",
        "take_events",
    }


def _run(code: str) -> None:
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True, timeout=300)


def test_importing_loads_and_starts_nothing() -> None:
    """Also where there is no vLLM: an ImportError at this place would end its server."""
    _run(
        "import sys, threading\n"
        "sys.modules['vllm'] = sys.modules['torch'] = None\n"
        "import kvxfer.integrations.vllm_connector\n"
        "assert callable(kvxfer.integrations.vllm_connector.register)\n"
        "assert 'kvxfer._core' not in sys.modules\n"
        "assert threading.active_count() == 1\n"
    )


def test_what_every_process_of_vllm_loads(fake: Any) -> None:
    """The entry point, and the class: its frontend asks it for stats, metrics and layout."""
    _run(
        "import sys, threading\n"
        "from kvxfer.integrations.vllm_connector import register\n"
        "register(); register()\n"
        "from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory\n"
        "found = KVConnectorFactory.get_connector_class_by_name('KvxferConnector')\n"
        "assert found.__name__ == 'KvxferConnector'\n"
        "assert found.requires_piecewise_for_cudagraph({})\n"
        "found.build_kv_connector_stats({'loads': 1}).reduce()\n"
        "assert 'kvxfer._core' not in sys.modules\n"
        "assert 'kvxfer.integrations.vllm_connector.worker' not in sys.modules\n"
        "assert threading.active_count() == 1\n"
    )


def test_the_entry_point_is_named(fake: Any) -> None:
    from importlib.metadata import entry_points

    named = {entry.name: entry.value for entry in entry_points(group="vllm.general_plugins")}
    if "kvxfer" not in named:
        pytest.skip("kvxfer is imported from its sources, not installed")
    assert named["kvxfer"] == "kvxfer.integrations.vllm_connector:register"


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
    from kvxfer.errors import ConfigError

    with pytest.raises(
        ConfigError, match="has codex, which KvxferConnector does not know; .*codec"
    ):
        engine("kv_both", extra={"codex": "int8"})
    with pytest.raises(ConfigError, match="kv_connector_extra_config: .*int9"):
        engine("kv_both", extra={"codec": "int9"})
    with pytest.raises(ConfigError, match="lease is 0"):
        engine("kv_both", extra={"lease": 0})


@pytest.mark.parametrize(
    ("extra", "what"),
    [
        ({"lease": "30"}, "lease is '30': expected float"),
        ({"lease": True}, "lease is True: expected float"),
        ({"watchdog": float("inf")}, "watchdog is inf"),
        ({"port": 1.5}, "port is 1.5: expected int"),
        ({"codec": None}, "codec is None: expected str"),
        ({"host": 7}, "host is 7"),
        ({"concurrent": "false"}, "concurrent is 'false': expected bool"),
        ({"agent": ["tcp"]}, "agent is"),
        ({"agent": {"transports": "tcp"}}, "agent has transports.*transport,"),
        ({"agent": {"transport": 3}}, "transport is 3: expected str"),
    ],
)
def test_options_of_other_types_are_refused(
    engine: Callable[..., Any], extra: dict[str, Any], what: str
) -> None:
    from kvxfer.errors import ConfigError

    with pytest.raises(ConfigError, match=what):
        engine("kv_both", extra=extra)


def test_engines_that_cannot_be_served_are_refused(engine: Callable[..., Any]) -> None:
    from vllm.v1.kv_cache_interface import MambaSpec

    from kvxfer.errors import ConfigError, Error
    from kvxfer.integrations.vllm_connector.compat import check_supported

    assert issubclass(ConfigError, (Error, ValueError))
    config = engine("kv_both").config
    attention = SimpleNamespace(transfer_group_ids=[])
    check_supported(config, attention)
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        parallel = SimpleNamespace(**{name: 2})
        with pytest.raises(ConfigError, match=f"does not know {name} > 1, this engine has 2"):
            check_supported(SimpleNamespace(parallel_config=parallel), attention)
    group = SimpleNamespace(
        layer_names=["model.layers.3.mixer"], kv_cache_spec=MambaSpec.__new__(MambaSpec)
    )
    mamba = SimpleNamespace(transfer_group_ids=[0], kv_cache_groups=[group])
    with pytest.raises(ConfigError, match="'model.layers.3.mixer' keeps a MambaSpec"):
        check_supported(config, mamba)


def test_tensors_that_cannot_be_served_are_refused(engine: Callable[..., Any]) -> None:
    import torch

    from kvxfer.errors import LayoutError

    worker = engine("kv_both").worker
    (name, *_), shape = (
        worker.worker._kv_cache_config.kv_cache_groups[0].layer_names,
        (64, 4, 32, 128),
    )
    with pytest.raises(LayoutError, match=f"{name}' on meta: .* backend CPU_ATTN keeps KV is not"):
        worker.register_kv_caches({name: torch.empty(shape, device="meta")})
    with pytest.raises(LayoutError, match=f"{name}' has a KV tensor of shape .*--block-size"):
        worker.register_kv_caches({name: torch.empty((64, 4, 16, 128))})


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin", "model.gguf"])
@pytest.mark.parametrize("alone", [False, True])
def test_weights_that_differ_in_the_middle_only(
    fake: Any, tmp_path: Path, name: str, alone: bool
) -> None:
    from kvxfer.integrations.vllm_connector.compat import _weights

    file = tmp_path / name
    where = str(file if alone else tmp_path)
    kept = bytearray(4 << 20)
    file.write_bytes(kept)
    before = _weights(where)
    assert _weights(where) == before
    for at in range(1 << 20, 3 << 20, 1024):  # as a merged adapter does
        kept[at] = 1
    file.write_bytes(kept)
    assert _weights(where) != before


def test_weights_are_those_that_vllm_loads(fake: Any, tmp_path: Path) -> None:
    from kvxfer.integrations.vllm_connector.compat import _weights

    (tmp_path / "model.safetensors").write_bytes(bytes(100))
    before = _weights(str(tmp_path))
    (tmp_path / "training_args.bin").write_bytes(bytes(100))
    assert _weights(str(tmp_path)) == before
    assert _weights("somebody/model") == "somebody/model"


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


def test_a_line_a_minute_where_vllm_logs_none(
    engine: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from rig import pair

    from kvxfer.integrations.vllm_connector import scheduler

    lines: list[str] = []
    monkeypatch.setattr(scheduler.logger, "info", lambda text, *given: lines.append(text % given))
    p, d = engine("kv_producer"), engine("kv_consumer")
    assert not d.connector.scheduler.logs  # its stats logging is on
    d.connector.bind_kv_cache_manager(
        SimpleNamespace(log_stats=False, block_pool=d.scheduler.kv_cache_manager.block_pool)
    )
    for number in range(2):
        tokens = pair.prompt(100, number)
        pair.decode(d, tokens, pair.prefill(p, tokens)[1], p)
    assert not lines
    monkeypatch.setattr(scheduler, "_QUIET", 0.0)
    d.add([1, 2])
    pair.settle(d)
    (line,) = lines
    assert "loads=2" in line
    assert "loaded_tokens=198" in line
    assert "codec ratio=1.0" in line


def test_lines_in_the_log_of_vllm(engine: Callable[..., Any]) -> None:
    from rig import pair
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorLogging

    p, d = engine("kv_producer"), engine("kv_consumer")
    logging = {side: KVConnectorLogging(side.config.kv_transfer_config) for side in (p, d)}
    tokens = pair.prompt(100)
    for side in (p, d):
        counted = side._count
        side._count = lambda data, counted=counted, side=side: (
            counted(data),
            logging[side].observe(dict(data)) if data else None,
        )
    pair.decode(d, tokens, pair.prefill(p, tokens)[1], p)
    pair.settle(p, d)
    lines: list[str] = []
    for each in logging.values():
        each.log(lambda text, *given: lines.append(text % given))
    sent, loaded = lines
    assert "sends=1" in sent
    assert "sent_bytes=" in sent
    assert "loads=1" in loaded
    assert "GB/s=" in loaded


def _several(role: str, *others: dict[str, Any]) -> Any:
    from vllm.config import KVTransferConfig

    ours = {"kv_connector": "KvxferConnector", "kv_role": role}
    return KVTransferConfig(
        kv_connector="MultiConnector",
        kv_role=role,
        kv_load_failure_policy="recompute",
        kv_connector_extra_config={"connectors": [ours, *others]},
    )


def test_under_multi_connector(engine: Callable[..., Any], fake: Any) -> None:
    from rig import pair

    other = {
        "kv_connector": "KeepingConnector",
        "kv_role": "kv_both",
        "kv_connector_module_path": "rig.keeping",
    }
    p = engine("kv_producer", transfer=_several("kv_producer", other))
    d = engine("kv_consumer", transfer=_several("kv_consumer", other))
    for length in (1, 100, 500):
        tokens = pair.prompt(length)
        _, params = pair.prefill(p, tokens)
        pair.decode(d, tokens, params, p)
    name = d.add(pair.prompt(300), params=pair.prefill(p, pair.prompt(300))[1])
    d.step()
    d.abort(name)
    pair.settle(p, d)


def test_beside_the_offloading_connector(
    engine: Callable[..., Any], fake: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it keeps of fetched blocks serves later prompts, and both hold a request's blocks."""
    from rig import offloading, pair
    from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec

    made = []

    def worker(self: Any, kv_caches: Any) -> Any:
        made.append(offloading.Copies(kv_caches))
        return made[-1]

    monkeypatch.setattr(CPUOffloadingSpec, "get_worker", worker)
    other = {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"cpu_bytes_to_use": 64 << 20},
    }
    p = engine("kv_producer", num_blocks=24, transfer=_several("kv_producer", other))
    d = engine("kv_consumer", num_blocks=24, transfer=_several("kv_consumer", other))
    for number in range(8):  # more than either cache holds
        tokens = pair.prompt(200, number % 4)
        _, params = pair.prefill(p, tokens)
        pair.decode(d, tokens, params, p)
    pair.settle(p, d)
    assert d.stats["loads"] > 0
    assert "failures" not in d.stats
    assert all(each.stored for each in made)
    assert any(each.loaded for each in made)
