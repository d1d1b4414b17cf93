"""Caches on GPUs, over a runtime of our own whose streams run late: no GPU is needed."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from kvtest import fake_gpu
from kvtest.agents import LONG, consumer, pair, producer, registered, until
from kvtest.caches import Geometry, Paged
from kvtest.coded import Coding, deliver_coded, fill_like_a_model
from kvtest.fake_gpu import DEVICES, HOST, GpuPaged, Gpus, look, made

import kvxfer
from kvxfer import Status
from kvxfer._streams import stream_handle

SIDE = Geometry(layers=("layer.0", "layer.1"), num_blocks=12, content=64, heads=(0, 2))
OTHER = dataclasses.replace(SIDE, axes="BNHC", block_size=8, num_blocks=24)
BLOCKS, OTHER_BLOCKS = [7, 2, 9, 0, 5], [20, 3, 5, 17, 0, 9, 8, 1, 2]
TOKENS = 69  # no multiple of a block


@pytest.fixture(scope="module")
def gpus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gpus]:
    with fake_gpu.without_leaks(tmp_path_factory.mktemp("gpu")) as found:
        yield found


@pytest.fixture(scope="module", params=["loopback", "shm", "tcp"])
def agents(request: pytest.FixtureRequest, gpus: Gpus) -> Iterator[tuple[kvxfer.Agent, ...]]:
    with pair(request.param) as both:
        yield both


def wipe(paged: Paged) -> None:
    assert isinstance(paged, GpuPaged)
    paged.poison()
    with fake_gpu.gpus().stream(paged.device) as stream:
        paged.upload(stream)
        fake_gpu.gpus().wait(paged.device, stream)


def expected(source: Paged, geometry: Geometry = OTHER) -> Paged:
    want = Paged(geometry)
    want.deliver([source], BLOCKS, OTHER_BLOCKS, (0, TOKENS))
    return want


@pytest.mark.parametrize(("here", "there"), [(0, 0), (0, 1), (1, HOST), (HOST, 1)])
def test_raw_between_gpus_and_hosts(
    agents: tuple[kvxfer.Agent, ...], here: int, there: int
) -> None:
    prefill, decode = agents
    with (
        made(SIDE, here, seed=3) as source,
        made(OTHER, there) as target,
        registered(prefill, source.cache),
        registered(decode, target.cache),
    ):
        with prefill.offer(source.cache, BLOCKS, TOKENS) as offer:
            fetch = decode.fetch(offer.ticket, target.cache, OTHER_BLOCKS, timeout=LONG)
            fetch.wait()
            assert offer.wait(LONG) is Status.OK
        assert look(target).same_as(expected(source))


@pytest.mark.parametrize(("here", "there"), [(0, 1), (1, HOST), (HOST, 1)])
@pytest.mark.parametrize("codec", ["fp8_e4m3", "int8"])
def test_codecs_between_gpus_and_hosts(
    agents: tuple[kvxfer.Agent, ...], codec: str, here: int, there: int
) -> None:
    prefill, decode = agents
    with made(SIDE, here) as source, made(OTHER, there) as target:
        fill_like_a_model(source, 5)
        if isinstance(source, GpuPaged):
            with fake_gpu.gpus().stream(here) as stream:
                source.upload(stream)
                fake_gpu.gpus().wait(here, stream)
        with (
            registered(prefill, source.cache),
            registered(decode, target.cache),
            prefill.offer(source.cache, BLOCKS, TOKENS) as offer,
        ):
            fetch = decode.fetch(
                offer.ticket, target.cache, OTHER_BLOCKS, timeout=LONG, codec=codec
            )
            fetch.wait()
            report = fetch.report
        want = Paged(OTHER)
        done = deliver_coded(want, [source], BLOCKS, OTHER_BLOCKS, (0, TOKENS), Coding(codec))
        assert look(target).same_as(want)
        assert (report.codec, report.exceptions) == (codec, done.exceptions)


def test_nothing_is_read_before_the_stream_has_written_it(
    agents: tuple[kvxfer.Agent, ...], gpus: Gpus
) -> None:
    prefill, decode = agents
    with (
        made(SIDE, 1, seed=1) as source,
        made(OTHER, 0) as target,
        gpus.stream(1) as stream,
        registered(prefill, source.cache),
        registered(decode, target.cache),
    ):
        assert isinstance(source, GpuPaged)
        with gpus.held(stream):
            source.fill(2)
            source.upload(stream)
            offer = prefill.offer(source.cache, BLOCKS, TOKENS, stream=stream)
            fetch = decode.fetch(offer.ticket, target.cache, OTHER_BLOCKS, timeout=LONG)
            until(lambda: prefill.stats.serving == 1)
            with pytest.raises(TimeoutError):
                fetch.wait(0.05)
            assert fetch.report.bytes == 0
        fetch.wait()
        assert offer.wait(LONG) is Status.OK
        assert look(target).same_as(expected(source))
        # The control: an offer that is not told of the stream reads what was there before.
        with gpus.held(stream), gpus.stream(1) as other:
            was = expected(source)
            wipe(target)
            source.fill(4)
            source.upload(stream)
            offer = prefill.offer(source.cache, BLOCKS, TOKENS, stream=other)
            decode.fetch(offer.ticket, target.cache, OTHER_BLOCKS, timeout=LONG).wait()
            assert offer.wait(LONG) is Status.OK
            assert look(target).same_as(was)
        gpus.wait(1, stream)


def test_layers_are_sent_as_their_streams_get_there(
    agents: tuple[kvxfer.Agent, ...], gpus: Gpus
) -> None:
    prefill, decode = agents
    with (
        made(SIDE, 0, seed=1) as source,
        made(OTHER, 1) as target,
        gpus.stream(0) as first,
        gpus.stream(0) as second,
        registered(prefill, source.cache),
        registered(decode, target.cache),
    ):
        offer = prefill.offer(source.cache, BLOCKS, TOKENS, ready=False)
        fetch = decode.fetch(offer.ticket, target.cache, OTHER_BLOCKS, timeout=LONG)
        until(lambda: prefill.stats.serving == 1)
        with gpus.held(second):
            assert isinstance(source, GpuPaged)
            source.upload(second)  # or it would have nothing to do, and be there at once
            offer.mark_ready("layer.1", stream=second)
            offer.mark_ready("layer.0", stream=first)
            until(lambda: fetch.report.bytes * 2 == TOKENS * target.cache.layout.token_bytes())
            assert not fetch.done
        fetch.wait()
        assert offer.wait(LONG) is Status.OK
        assert look(target).same_as(expected(source))


def test_nothing_is_written_before_the_stream_has_let_go(
    agents: tuple[kvxfer.Agent, ...], gpus: Gpus
) -> None:
    prefill, decode = agents
    with (
        made(SIDE, HOST, seed=1) as source,
        made(OTHER, 1) as target,
        gpus.stream(1) as stream,
        registered(prefill, source.cache),
        registered(decode, target.cache),
    ):
        assert isinstance(target, GpuPaged)

        def start() -> kvxfer.Fetch:
            return decode.fetch(
                offer.ticket, target.cache, OTHER_BLOCKS, timeout=LONG, stream=stream
            )

        with prefill.offer(source.cache, BLOCKS, TOKENS) as offer:
            with gpus.held(stream):
                target.upload(stream)  # as the zeroing of blocks: what it finds it overwrites
                fetch, cancelled = start(), start()
                until(lambda: prefill.stats.serving == 2)
                with pytest.raises(TimeoutError):
                    fetch.wait(0.05)
                cancelled.cancel()  # ends at once, and never writes
                assert look(target).poisoned
            fetch.wait()
        assert look(target).same_as(expected(source))
    until(lambda: decode.stats.free_slots == decode.stats.slots)


def test_graphs_are_captured_while_transfers_run(
    agents: tuple[kvxfer.Agent, ...], gpus: Gpus
) -> None:
    prefill, decode = agents
    with (
        made(SIDE, 0, seed=1) as source,
        made(OTHER, 1) as target,
        gpus.stream(0) as stream,
        gpus.stream(0) as captured,
        registered(prefill, source.cache),
        registered(decode, target.cache),
    ):
        late = prefill.offer(source.cache, BLOCKS, TOKENS, ready=False)
        with gpus.capture(0, captured):
            with gpus.held(stream):
                assert isinstance(source, GpuPaged)
                source.upload(stream)
                offer = prefill.offer(source.cache, BLOCKS, TOKENS, stream=stream)
                fetch = decode.fetch(offer.ticket, target.cache, OTHER_BLOCKS, timeout=LONG)
                until(lambda: prefill.stats.serving == 1)
            fetch.wait()
            assert offer.wait(LONG) is Status.OK
            for call in (
                lambda: prefill.offer(source.cache, BLOCKS, TOKENS, stream=captured),
                lambda: late.mark_ready("layer.1", stream=captured),
                lambda: late.mark_all_ready(stream=captured),
                lambda: prefill.fetch(late.ticket, source.cache, BLOCKS, stream=captured),
            ):
                with pytest.raises(kvxfer.InvalidError, match="captured into a graph"):
                    call()
        late.release()
        assert look(target).same_as(expected(source))


def test_what_fails_on_a_gpu_is_named_and_costs_one_fetch(
    agents: tuple[kvxfer.Agent, ...], gpus: Gpus
) -> None:
    prefill, decode = agents
    with (
        made(SIDE, 0, seed=1) as source,
        made(OTHER, 1) as target,
        registered(prefill, source.cache),
        registered(decode, target.cache),
    ):
        with prefill.offer(source.cache, BLOCKS, TOKENS) as offer:
            for call in ("cuLaunchKernel", "cuMemcpyAsync"):
                gpus.fail(call)
                fetch = decode.fetch(offer.ticket, target.cache, OTHER_BLOCKS, timeout=LONG)
                with pytest.raises(kvxfer.TransferError, match=f"{call} failed: .*out of memory"):
                    fetch.wait()
                assert fetch.status is Status.NO_RESOURCES
            decode.fetch(offer.ticket, target.cache, OTHER_BLOCKS, timeout=LONG).wait()
        assert look(target).same_as(expected(source))


@pytest.mark.parametrize("call", ["cuEventRecord", "cuEventQuery"])
def test_events_that_fail_for_a_while_cost_no_device(gpus: Gpus, call: str) -> None:
    """It is not given up: what a stream has done can be asked for again."""
    with (
        pair("loopback") as (prefill, decode),
        made(SIDE, 0, seed=1) as source,
        registered(prefill, source.cache),
    ):
        target = Paged(OTHER)
        decode.register(target.cache)
        with prefill.offer(source.cache, BLOCKS, TOKENS, consumers=2) as offer:
            decode.fetch(offer.ticket, target.cache, OTHER_BLOCKS, timeout=LONG).wait()
            gpus.fail_often(call, 0, 12)
            with pytest.raises(kvxfer.TransferError, match=f"{call} failed"):
                decode.fetch(offer.ticket, target.cache, OTHER_BLOCKS, timeout=LONG).wait()
            decode.fetch(offer.ticket, target.cache, OTHER_BLOCKS, timeout=LONG).wait()
        assert target.same_as(expected(source))


def test_a_lost_device_leaves_other_caches_alone(gpus: Gpus) -> None:
    with (
        pair("loopback") as (prefill, decode),
        made(SIDE, 0, seed=1) as source,
        made(OTHER, 1) as target,
        registered(prefill, source.cache),
        registered(decode, target.cache),
    ):
        host, host_target = Paged(SIDE, seed=1), Paged(OTHER)
        prefill.register(host.cache)
        decode.register(host_target.cache)
        offer = prefill.offer(source.cache, BLOCKS, TOKENS, lease=LONG, consumers=2)
        decode.fetch(offer.ticket, host_target.cache, OTHER_BLOCKS, timeout=LONG).wait()
        with gpus.lost():
            with pytest.raises(kvxfer.ResourceError, match="cuPointerGetAttributes failed"):
                decode.fetch(offer.ticket, target.cache, OTHER_BLOCKS, timeout=LONG)
            with pytest.raises(kvxfer.TransferError, match="could not pack .*failed"):
                decode.fetch(offer.ticket, host_target.cache, OTHER_BLOCKS, timeout=LONG).wait()
            with prefill.offer(host.cache, BLOCKS, TOKENS) as other:
                decode.fetch(other.ticket, host_target.cache, OTHER_BLOCKS, timeout=LONG).wait()
            assert host_target.same_as(expected(host))
        offer.release()


def test_a_device_that_hangs_holds_up_no_other_cache(gpus: Gpus) -> None:
    with (
        pair("loopback", chunk_bytes=4096) as (prefill, decode),
        made(SIDE, 0, seed=1) as stuck,
        made(SIDE, 1, seed=2) as other,
        made(OTHER, 1) as target,
    ):
        host, first, last = Paged(SIDE, seed=3), Paged(OTHER), Paged(OTHER)
        for agent, caches in (prefill, [stuck, other, host]), (decode, [target, first, last]):
            for paged in caches:
                agent.register(paged.cache)
        sides = ((stuck, first), (other, target), (host, last))
        offers = [prefill.offer(source.cache, BLOCKS, TOKENS) for source, _ in sides]
        gpus.wait(0, 0)
        with gpus.held_device(0):
            fetches = [
                decode.fetch(offer.ticket, to.cache, OTHER_BLOCKS, timeout=LONG)
                for offer, (_, to) in zip(offers, sides, strict=True)
            ]
            for fetch in fetches[1:]:
                fetch.wait()
            assert not fetches[0].done
        fetches[0].wait()
        assert fetches[0].report.chunks > 13  # more than may wait for all pools together
        for source, to in sides:
            assert look(to).same_as(expected(source))


def test_caches_that_cannot_be_registered(gpus: Gpus) -> None:
    with pair("loopback") as (prefill, _):
        one, other = GpuPaged(SIDE, 0), GpuPaged(SIDE, 1)
        tensors = {"a": tuple(one.memory[0]), "b": tuple(other.memory[0])}
        mixed = kvxfer.Cache(tensors, "BHNC", dtype="bfloat16")
        with pytest.raises(
            kvxfer.InvalidError, match="'b', plane 'k' is on device 1 .*on device 0"
        ):
            prefill.register(mixed)
        prefill.register(other.cache)
        other.free()
        with pytest.raises(kvxfer.InvalidError, match="on device 1 .*was freed"):
            prefill.offer(other.cache, BLOCKS, TOKENS)
        prefill.unregister(other.cache)
        with pytest.raises(kvxfer.InvalidError, match="knows no device memory there: was it freed"):
            prefill.register(other.cache)
        one.free()
        host = Paged(SIDE)
        prefill.register(host.cache)
        with pytest.raises(kvxfer.InvalidError, match="not on a GPU: leave it out"):
            prefill.offer(host.cache, BLOCKS, TOKENS, stream=7)


def test_without_kernels_for_the_device(
    gpus: Gpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    foreign = tmp_path / "code"
    foreign.write_bytes(b"for another device")
    monkeypatch.setenv("KVXFER_GPU_CODE", str(foreign))
    with pair("loopback") as (prefill, _), made(SIDE, 0) as source:
        with pytest.raises(kvxfer.ResourceError, match="no kernels for device 0 of CUDA"):
            prefill.register(source.cache)
        monkeypatch.setenv("KVXFER_GPU_CODE", str(tmp_path / "none"))
        with pytest.raises(kvxfer.InvalidError, match="KVXFER_GPU_CODE names .*none"):
            prefill.register(source.cache)


def test_a_kernel_that_is_missing_is_said_at_once(gpus: Gpus) -> None:
    with pair("loopback") as (prefill, _), made(SIDE, 0) as source:
        gpus.fail("cuModuleGetFunction", 7)
        with pytest.raises(kvxfer.ResourceError, match="no kernels .*GetFunction of kvxfer_"):
            prefill.register(source.cache)
        prefill.register(source.cache)


def test_nothing_waits_for_a_driver_that_is_slow_to_start(gpus: Gpus) -> None:
    with (
        pair("loopback") as (prefill, decode),
        made(SIDE, 0) as slow,
        ThreadPoolExecutor(1) as other,
    ):
        source, target = Paged(SIDE, seed=1), Paged(OTHER)
        prefill.register(source.cache)
        decode.register(target.cache)
        loaded = gpus.calls("cuModuleLoadData")
        registering = threading.Thread(target=prefill.register, args=[slow.cache])
        with gpus.stalled("cuModuleLoadData"):
            registering.start()
            until(lambda: gpus.calls("cuModuleLoadData") > loaded)
            offer = other.submit(prefill.offer, source.cache, BLOCKS, TOKENS).result(LONG)
            decode.fetch(offer.ticket, target.cache, OTHER_BLOCKS, timeout=LONG).wait()
        registering.join(LONG)
        assert target.same_as(expected(source))
        prefill.unregister(slow.cache)


def test_layers_are_marked_without_looking_for_their_memory_again(gpus: Gpus) -> None:
    with pair("loopback") as (prefill, _), made(SIDE, 0) as source:
        prefill.register(source.cache)
        offer = prefill.offer(source.cache, BLOCKS, TOKENS, ready=False)
        asked = gpus.calls("cuPointerGetAttributes")
        offer.mark_all_ready()
        assert gpus.calls("cuPointerGetAttributes") == asked
        offer.release()
        source.free()
        with pytest.raises(kvxfer.InvalidError, match="was freed"):
            prefill.offer(source.cache, BLOCKS, TOKENS, ready=False)
        source.memory = []


def test_a_stream_that_takes_its_time_is_asked_ever_more_rarely(gpus: Gpus) -> None:
    with pair("loopback") as (prefill, _), made(SIDE, 0) as source, gpus.stream(0) as stream:
        assert isinstance(source, GpuPaged)
        prefill.register(source.cache)
        with gpus.held(stream):
            source.upload(stream)
            before = gpus.calls("cuEventQuery")
            began = time.monotonic()
            offer = prefill.offer(source.cache, BLOCKS, TOKENS, stream=stream)
            time.sleep(0.3)
            asked = gpus.calls("cuEventQuery") - before
            assert 2 < asked < 100 + 1000 * (time.monotonic() - began)  # about 340
        offer.release()


def test_close_gives_back_the_memory_of_devices(gpus: Gpus) -> None:
    source = GpuPaged(SIDE, 0, seed=1)
    before = gpus.open_handles()
    with pair("loopback") as (prefill, decode):
        target = Paged(OTHER)
        prefill.register(source.cache)
        decode.register(target.cache)
        offer = prefill.offer(source.cache, BLOCKS, TOKENS)
        decode.fetch(offer.ticket, target.cache, OTHER_BLOCKS, timeout=LONG).wait()
        assert gpus.open_handles() > before
    assert gpus.open_handles() == before
    assert offer.released  # which holds the cache
    source.free()


def test_streams_are_taken_from_what_libraries_pass_around(gpus: Gpus) -> None:
    class Torch:
        cuda_stream = 7

    class CuPy:
        ptr = 8

    class Other:
        def __cuda_stream__(self) -> tuple[int, int]:
            return 0, 9

    with made(SIDE, 0) as paged:
        found = [stream_handle(s, paged.cache) for s in (None, 6, Torch(), CuPy(), Other())]
        assert found == [0, 6, 7, 8, 9]
        for wrong in ("main", -1, 1 << 64):
            with pytest.raises(kvxfer.InvalidError, match="expected a stream of torch or CuPy"):
                stream_handle(wrong, paged.cache)


def test_a_gpu_that_never_answers_is_given_up(gpus: Gpus) -> None:
    with (
        producer("loopback", gpu_timeout=0.2) as prefill,
        consumer("loopback") as decode,
    ):
        source, target = GpuPaged(SIDE, DEVICES - 1, seed=1), Paged(OTHER)
        prefill.register(source.cache)
        decode.register(target.cache)
        offer = prefill.offer(source.cache, BLOCKS, TOKENS)
        gpus.wait(source.device, 0)
        with gpus.held():
            fetch = decode.fetch(offer.ticket, target.cache, OTHER_BLOCKS, timeout=LONG)
            with pytest.raises(kvxfer.TransferError, match="has not finished a chunk within 0.2"):
                fetch.wait()
            with pytest.raises(kvxfer.TransferError, match="was given up"):
                decode.fetch(offer.ticket, target.cache, OTHER_BLOCKS, timeout=LONG).wait()
            late = prefill.offer(source.cache, BLOCKS, TOKENS, id="late")
            assert late.wait(LONG) is Status.NO_RESOURCES
            assert "did not get there in time" in late.message
            assert fetch.report.bytes == 0
            prefill.close()
    # Its lanes, with stream, event and four pieces of memory each, the module, and four tensors.
    gpus.given_up += 4 * 6 + 1 + 4
