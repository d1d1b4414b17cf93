"""KV on GPUs, over a runtime of our own whose streams run late: no GPU is needed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from kvtest import fake_gpu
from kvtest.fake_gpu import Gpus

import kvxfer
from kvxfer import ConfigError, ResourceError, _core

pytestmark = pytest.mark.filterwarnings("default")

PREFILL, DECODE = 0, 1  # devices
Engines = Callable[..., Any]


@pytest.fixture(scope="module")
def gpus(fake: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gpus]:
    if _core.build_info()["sanitize"]:
        pytest.skip("ASan does not follow fibers between libraries; the C++ tests of GPUs run")
    with (
        pytest.MonkeyPatch.context() as patch,
        fake_gpu.runtimes(tmp_path_factory.mktemp("gpu"), patch) as found,
    ):
        yield found


@pytest.fixture
def streams(gpus: Gpus, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The stream that is torch's current one, by device."""
    import torch

    with gpus.stream(PREFILL) as first, gpus.stream(DECODE) as second:
        found = [first, second]
        monkeypatch.setattr(
            torch.cuda,
            "current_stream",
            lambda device: SimpleNamespace(cuda_stream=found[device.index]),
        )
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        yield found


@pytest.fixture
def engines(streams: list[int], model: Path) -> Iterator[Engines]:
    """Makes engines on GPUs, as ``engines("kv_producer", layout="LBNHC")``; closed at the end."""
    from rig.gpu import GpuEngine

    made = []

    def make(role: str, **options: Any) -> Any:
        device = PREFILL if role == "kv_producer" else DECODE
        options = {"layout": "LBNHC", "device": device, "stream": streams[device], **options}
        options.setdefault("extra", {}).setdefault("agent", {})["chunk_bytes"] = 1 << 16
        made.append(GpuEngine(model, role, **options))
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.fixture
def pair(fake: Any) -> Any:
    from rig import pair

    return pair


def finish(pair: Any, engine: Any, name: str, tokens: list[int], *others: Any) -> None:
    pair.step_until(lambda: engine.answers[name]["finish"] is not None, engine, *others)
    pair.check(engine, name, tokens)


@pytest.mark.parametrize("codec", ["raw", "fp8_e4m3"])
def test_hand_over(engines: Engines, pair: Any, codec: str) -> None:
    p = engines("kv_producer", layout="LBHNC", block_size=16)
    d = engines("kv_consumer", extra={"codec": codec})
    for length in (1, 2, 100):
        tokens = pair.prompt(length)
        _, params = pair.prefill(p, tokens)
        pair.decode(d, tokens, params, p)
    pair.settle(p, d)
    assert not p.verify()
    assert bool(d.verify()) == (codec != "raw")  # such numbers are rounded
    assert d.stats["loads"] == 2
    assert "failures" not in d.stats
    assert (d.stats["wire_bytes"] < d.stats["loaded_bytes"]) == (codec != "raw")


@pytest.mark.parametrize("cache", ["auto", "fp8"])
@pytest.mark.parametrize("here", ["kv_producer", "kv_consumer"])
def test_between_a_gpu_and_a_host(
    engines: Engines, engine: Engines, pair: Any, here: str, cache: str
) -> None:
    from rig.arithmetic import Numbers

    def numbers(scale: float) -> Any:
        # One scale is the other times a power of two, so that all numbers fit exactly.
        if cache == "fp8":
            scale = 1.0 if here == "kv_consumer" else scale  # a GPU changes none that it gets
            return Numbers("bfloat16", cache, (scale, scale / 2), levels=7)
        return Numbers("bfloat16", levels=200)

    one = engines(here, numbers=numbers(0.5), block_size=64)
    other = {"kv_producer": "kv_consumer", "kv_consumer": "kv_producer"}[here]
    p, d = one, engine(other, numbers=numbers(1.0))
    if here == "kv_consumer":
        p, d = d, p
    tokens = pair.prompt(100)
    _, params = pair.prefill(p, tokens)
    pair.decode(d, tokens, params, p)
    pair.settle(p, d)
    assert not one.verify()
    assert d.stats["loads"] == 1


def ask_for_what_is_late(pair: Any, p: Any, d: Any) -> tuple[str, list[int]]:
    """Prefill, offer, and have the decode side ask."""
    tokens = pair.prompt(70)
    _, params = pair.prefill(p, tokens)
    name = d.add(tokens, params=params)
    agent = p.worker.worker._agent
    pair.step_until(lambda: agent.stats.offers and agent.stats.serving, p, d)
    return name, tokens


def test_what_the_prefill_side_has_yet_to_write(engines: Engines, gpus: Gpus, pair: Any) -> None:
    p, d = engines("kv_producer"), engines("kv_consumer")
    with gpus.held(p.stream):
        name, tokens = ask_for_what_is_late(pair, p, d)
        for _ in range(20):
            d.step()
        assert d.answers[name]["finish"] is None
    finish(pair, d, name, tokens, p)
    pair.settle(p, d)
    assert not d.verify()


def test_control_offers_that_do_not_follow_the_stream(
    engines: Engines, gpus: Gpus, streams: list[int], pair: Any
) -> None:
    p, d = engines("kv_producer"), engines("kv_consumer")
    with gpus.held(p.stream), gpus.stream(PREFILL) as other:
        streams[PREFILL] = other
        name, tokens = ask_for_what_is_late(pair, p, d)
        finish(pair, d, name, tokens, p)
    pair.settle(p, d)
    assert d.verify()


def test_blocks_are_zeroed_before_they_are_loaded(engines: Engines, gpus: Gpus, pair: Any) -> None:
    p, d = engines("kv_producer"), engines("kv_consumer", zeroing=True)
    with gpus.held(d.stream):
        name, tokens = ask_for_what_is_late(pair, p, d)
        for _ in range(20):
            p.step()
            d.step()
        assert d.answers[name]["finish"] is None
    finish(pair, d, name, tokens, p)
    pair.settle(p, d)
    assert not d.verify()


def test_control_loads_that_start_before_the_zeroing(
    engines: Engines, pair: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    p, d = engines("kv_producer"), engines("kv_consumer", zeroing=True)
    worker, forward = d.worker.worker, d._forward
    worker._on_gpu = False

    def late_forward(output: Any) -> Any:
        for fetch in list(worker._by_fetch):
            fetch.wait()
        return forward(output)

    monkeypatch.setattr(d, "_forward", late_forward)
    tokens = pair.prompt(70)
    _, params = pair.prefill(p, tokens)
    p.step()
    pair.decode(d, tokens, params)
    pair.settle(p, d)
    assert d.verify()


@pytest.fixture
def marked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The layers that were said to be ready one by one."""
    found: list[str] = []
    mark = kvxfer.Offer.mark_ready
    monkeypatch.setattr(
        kvxfer.Offer, "mark_ready", lambda offer, layer: found.append(layer) or mark(offer, layer)
    )
    return found


@pytest.mark.parametrize("by", ["layers", "capture", "micro-batches", "zeroing"])
def test_asked_before_it_is_computed(
    engines: Engines,
    gpus: Gpus,
    pair: Any,
    fake: Any,
    monkeypatch: pytest.MonkeyPatch,
    marked: list[str],
    by: str,
) -> None:
    import torch
    from vllm.v1.kv_cache_interface import KVCacheConfig

    from kvxfer.integrations.vllm_connector.proxy import _standing

    if by == "zeroing":
        monkeypatch.setattr(KVCacheConfig, "needs_kv_cache_zeroing", True)
    p = engines("kv_producer", max_batched_tokens=64, micro_batches=by == "micro-batches")
    d = engines("kv_consumer")
    if by == "capture":
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    first = pair.prompt(3)
    _, params = pair.prefill(p, first)
    pair.decode(d, first, params, p)
    tokens = pair.prompt(100)
    with gpus.held(p.stream):
        name = d.add(tokens, params={**_standing(params), "transfer_id": "x"})
        d.step()
        p.add(tokens, params=fake.prefill_params(transfer_id="x"), max_tokens=1)
        for _ in range(20):
            p.step()
            d.step()
        assert d.answers[name]["finish"] is None
    finish(pair, d, name, tokens, p)
    pair.settle(p, d)
    assert not d.verify()
    assert d.stats["loads"] == 2
    assert marked == (p.layers[0] if by == "layers" else [])


def test_a_gpu_without_kernels_refuses_to_start(
    engines: Engines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = tmp_path / "code"
    code.write_bytes(b"for another device")
    monkeypatch.setenv("KVXFER_GPU_CODE", str(code))
    closed: list[kvxfer.Agent] = []
    close = kvxfer.Agent.close
    monkeypatch.setattr(kvxfer.Agent, "close", lambda agent: closed.append(agent) or close(agent))
    with pytest.raises(ResourceError, match="no kernels for device 0 of CUDA"):
        engines("kv_producer")
    assert closed


def test_what_is_required_is_refused_at_start(engines: Engines) -> None:
    with pytest.raises(ConfigError, match="gpudirect-rdma' cannot be had: chunks are staged"):
        engines("kv_consumer", extra={"agent": {"require": "gpudirect-rdma"}})
