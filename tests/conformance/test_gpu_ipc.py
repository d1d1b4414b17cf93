"""Caches on GPUs of one host, in two processes: chunks go from GPU to GPU, over our own runtime."""

from __future__ import annotations

import contextlib
import gc
import random
import threading
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
from kvtest import fake_gpu
from kvtest.agents import LONG, consumer, pair, producer, registered, until
from kvtest.caches import Geometry, Paged
from kvtest.child import Child
from kvtest.coded import Coding, deliver_coded, fill_like_a_model
from kvtest.fake_gpu import GpuPaged, Gpus

import kvxfer
from kvxfer import Status, _core

LAYERS = ("layer.0", "layer.1")
SIDE = Geometry(layers=LAYERS, num_blocks=12, content=64, heads=(0, 2))
OTHER = Geometry(layers=LAYERS, num_blocks=24, content=64, heads=(0, 2), axes="BNHC", block_size=8)
BLOCKS, OTHER_BLOCKS = [7, 2, 9, 0, 5], [20, 3, 5, 17, 0, 9, 8, 1, 2]
TOKENS = 69  # no multiple of a block


@pytest.fixture(scope="module")
def gpus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gpus]:
    if _core.build_info()["sanitize"]:
        pytest.skip("ASan does not follow fibers between libraries; the C++ tests of GPUs run")
    with (
        pytest.MonkeyPatch.context() as patch,
        fake_gpu.runtimes(tmp_path_factory.mktemp("gpu"), patch) as found,
    ):
        before = found.open_handles()
        yield found
        gc.collect()
        assert found.open_handles() == before + found.given_up
        assert found.early_frees() == 0


class Prefill:
    """A producer in a process of its own, whose cache is on one of its GPUs."""

    def __init__(self, child: Child, device: int = 0, **knobs: Any) -> None:
        self.child = child
        self.before = child.call("gpu", "open_handles")
        child.call("start", "prefill", "shm", listen="", **knobs)
        child.call("gpu_cache", "cache", SIDE, device, 3, False)
        self.source = Paged(SIDE, seed=3)

    def offer(self) -> kvxfer.Ticket:
        return self.child.call("offer", "cache", BLOCKS, TOKENS, consumers=9)

    def release(self) -> None:
        self.child.call("release_offers")

    def gpu(self, method: str, *args: Any) -> Any:
        return self.child.call("gpu", method, *args)


@pytest.fixture(scope="module")
def prefill(gpus: Gpus) -> Iterator[Prefill]:
    with Child() as child:
        found = Prefill(child)
        yield found
        # Nothing of a consumer's stays open.
        found.release()
        child.call("forget", "cache")
        child.call("close")
        assert found.gpu("open_handles") == found.before


@contextlib.contextmanager
def on_gpu(agent: kvxfer.Agent, geometry: Geometry = OTHER, device: int = 1) -> Iterator[GpuPaged]:
    paged = GpuPaged(geometry, device)
    try:
        with registered(agent, paged.cache):
            yield paged
    finally:
        paged.free()


def fetched(
    decode: kvxfer.Agent,
    prefill: Prefill,
    target: Paged,
    ticket: kvxfer.Ticket | None = None,
) -> kvxfer.FetchReport:
    """Fetch all, compare every byte, and return the report."""
    ticket = ticket or prefill.offer()
    fetch = decode.fetch(ticket, target.cache, OTHER_BLOCKS, timeout=LONG)
    fetch.wait()
    if isinstance(target, GpuPaged):
        target.download()
    want = Paged(OTHER)
    want.deliver([prefill.source], BLOCKS, OTHER_BLOCKS, (0, TOKENS))
    assert target.same_as(want)
    return fetch.report


def launches(prefill: Prefill, before: int) -> bool:
    return prefill.gpu("calls", "cuLaunchKernel") > before


def all_slots_free(agent: kvxfer.Agent) -> bool:
    return agent.stats.free_slots == agent.stats.slots


def random_side(draw: random.Random) -> Geometry:
    return Geometry(
        axes=draw.choice(["BHNC", "BNHC", "PBHNC", "BPNHC"]),
        layers=LAYERS,
        content=draw.choice([16, 48, 64]),
        heads=(0, 2),
        block_size=draw.choice([4, 16]),
        num_blocks=40,
    )


@pytest.mark.parametrize("codec", ["raw", "fp8_e4m3", "int8"])
@pytest.mark.parametrize("seed", range(3))
def test_every_byte_is_the_hosts(prefill: Prefill, seed: int, codec: str) -> None:
    draw = random.Random(f"{seed} {codec}")
    ours = random_side(draw)
    theirs = kvxfer_side(random_side(draw), ours)
    tokens = draw.randrange(20, 140)
    blocks = draw.sample(range(40), theirs.blocks_for(tokens))
    own_blocks = draw.sample(range(40), ours.blocks_for(tokens))
    device = draw.randrange(2)
    prefill.child.call("gpu_cache", "drawn", theirs, draw.randrange(2), seed, True)
    source = Paged(theirs)
    fill_like_a_model(source, seed)
    opened = prefill.gpu("opened")
    with consumer("shm") as decode, on_gpu(decode, ours, device) as target:
        for name in ("first", "second"):
            ticket = prefill.child.call("offer", "drawn", blocks, tokens, id=name)
            fetch = decode.fetch(ticket, target.cache, own_blocks, codec=codec, timeout=LONG)
            fetch.wait()
            report = fetch.report
            assert (report.path, report.codec) == ("gpu-ipc", codec)
            assert report.path_why == "both caches are on GPUs of this host"
            assert "goes through the host" not in report.why
            assert prefill.child.call("wait_offer", name) == "OK"
        want = Paged(ours)
        deliver_coded(want, [source], blocks, own_blocks, (0, tokens), Coding(codec))
        target.download()
        assert target.same_as(want)
        assert prefill.gpu("opened") == opened + 1
    prefill.child.call("forget", "drawn")


def kvxfer_side(geometry: Geometry, like: Geometry) -> Geometry:
    return Geometry(**{**geometry.__dict__, "content": like.content})


def test_layers_and_several_fetches_share_the_slots(prefill: Prefill) -> None:
    """More at once than the arena has slots."""
    with consumer("shm", arena_bytes=4 * 4096, chunk_bytes=4096) as decode:
        with on_gpu(decode, device=0) as target:
            fetches = [
                decode.fetch(prefill.offer(), target.cache, OTHER_BLOCKS, timeout=LONG)
                for _ in range(4)
            ]
            for fetch in fetches:
                fetch.wait()
                assert (fetch.report.path, fetch.report.chunks > 8) == ("gpu-ipc", True)
            fetched(decode, prefill, target)
        until(lambda: all_slots_free(decode))


@pytest.mark.parametrize("codec", ["raw", "int8"])
def test_what_is_damaged_in_a_slot_is_found(prefill: Prefill, gpus: Gpus, codec: str) -> None:
    with consumer("shm") as decode, on_gpu(decode) as target:
        assert fetched(decode, prefill, target).path == "gpu-ipc"
        sent = prefill.child.call("stats")["bytes_sent"]
        with gpus.held():
            fetch = decode.fetch(
                prefill.offer(), target.cache, OTHER_BLOCKS, codec=codec, timeout=LONG
            )
            until(lambda: prefill.child.call("stats")["bytes_sent"] > sent)
            gpus.damage()
        with pytest.raises(kvxfer.TransferError, match="does not match its digest"):
            fetch.wait()
        assert (fetch.status, fetch.report.path) == (Status.CORRUPT, "gpu-ipc")
        assert decode.stats.digest_errors > 0
        # It need not have been by chance.
        report = fetched(decode, prefill, target)
        assert report.path == "staged"
        assert "a chunk from 'prefill' was damaged on its way from GPU to GPU" in report.path_why
    with consumer("shm") as decode, on_gpu(decode) as target:
        assert fetched(decode, prefill, target).path == "gpu-ipc"


@pytest.mark.parametrize(
    "call",
    [
        "cuDeviceGetUuid",
        "cuDeviceCanAccessPeer",
        "cuIpcOpenMemHandle",
        "cuMemGetAddressRange",
        "cuMemcpyAsync",  # of the stamp
    ],
)
def test_what_the_producer_cannot_open_is_staged(prefill: Prefill, call: str) -> None:
    with consumer("shm") as decode, on_gpu(decode) as target:
        prefill.gpu("fail", call)
        for _ in range(2):
            report = fetched(decode, prefill, target)
            assert report.path == "staged"
            assert f"'prefill': {call} failed" in report.path_why
    with consumer("shm") as decode, on_gpu(decode) as target:
        assert fetched(decode, prefill, target).path == "gpu-ipc"


@pytest.mark.parametrize(
    "call", ["cuDeviceGetUuid", "cuMemAlloc", "cuIpcGetMemHandle", "cuMemcpyAsync"]
)
def test_what_the_consumer_cannot_share_is_staged(prefill: Prefill, gpus: Gpus, call: str) -> None:
    with consumer("shm") as decode, on_gpu(decode) as target:
        gpus.fail(call)
        report = fetched(decode, prefill, target)
        assert report.path == "staged"
        assert "no memory of the GPU can be shared" in report.path_why
        assert f"{call} failed" in report.path_why
        assert "GPU memory goes through the host's" in report.why


def test_a_handle_that_opens_other_memory_is_not_used(prefill: Prefill) -> None:
    with consumer("shm") as decode, on_gpu(decode) as target:
        prefill.gpu("open_wrongly", True)
        report = fetched(decode, prefill, target)
        prefill.gpu("open_wrongly", False)
        assert report.path == "staged"
        assert "what was opened is not the consumer's memory" in report.path_why


@pytest.mark.parametrize(
    ("variable", "value", "why"),
    [
        ("FAKE_GPUS", "1", "is not visible to this process"),
        ("FAKE_GPU_NO_PEERS", "1", "has no peer access to the consumer's (0000:3c:00.0)"),
        ("KVXFER_GPU_IPC", "0", "'prefill' has gpu_ipc off"),
    ],
)
def test_producers_that_do_not_reach_the_gpu(
    gpus: Gpus, monkeypatch: pytest.MonkeyPatch, variable: str, value: str, why: str
) -> None:
    monkeypatch.setenv(variable, value)
    with Child() as child:
        far = Prefill(child)
        monkeypatch.delenv(variable)
        with consumer("shm") as decode, on_gpu(decode) as target:
            report = fetched(decode, far, target)
            assert report.path == "staged"
            assert why in report.path_why
            if variable == "FAKE_GPU_NO_PEERS":  # a GPU reaches itself
                with on_gpu(decode, device=0) as same:
                    assert fetched(decode, far, same).path == "gpu-ipc"


def test_it_can_be_turned_off(prefill: Prefill, gpus: Gpus) -> None:
    with consumer("shm", gpu_ipc=False) as decode, on_gpu(decode) as target:
        report = fetched(decode, prefill, target)
        assert (report.path, report.path_why) == ("staged", "gpu_ipc is off")


def test_nothing_is_written_that_is_not_checked(prefill: Prefill, gpus: Gpus) -> None:
    with consumer("shm", digest=False) as decode, on_gpu(decode) as target:
        report = fetched(decode, prefill, target)
        assert report.path == "staged"
        assert report.path_why.startswith("digest is off")


def test_memory_of_the_host_on_either_side_is_staged(prefill: Prefill, gpus: Gpus) -> None:
    with consumer("shm") as decode, on_gpu(decode) as target:
        prefill.child.call("cache", "host", SIDE, 3)
        ticket = prefill.child.call("offer", "host", BLOCKS, TOKENS)
        fetch = decode.fetch(ticket, target.cache, OTHER_BLOCKS, timeout=LONG)
        fetch.wait()
        assert fetch.report.path == "staged"
        assert fetch.report.path_why == "the producer's cache is in the host's memory"
        assert prefill.child.call("wait_offer", ticket["offer"]) == "OK"
        prefill.child.call("forget", "host")
        host = Paged(OTHER)
        with registered(decode, host.cache):
            assert fetched(decode, prefill, host).path == "staged"


def test_two_agents_of_one_process_go_through_the_host(gpus: Gpus) -> None:
    with pair("shm") as (near, decode), on_gpu(decode) as target, on_gpu(near, SIDE, 0) as source:
        offer = near.offer(source.cache, BLOCKS, TOKENS)
        fetch = decode.fetch(offer.ticket, target.cache, OTHER_BLOCKS, timeout=LONG)
        fetch.wait()
        assert fetch.report.path == "staged"
        assert fetch.report.path_why == "both agents are in one process"
        assert "GPU memory goes through the host's" in fetch.report.why
        assert offer.wait(LONG) is Status.OK


def test_cancel_leaves_slots_alone_that_are_written(prefill: Prefill) -> None:
    with consumer("shm") as decode, on_gpu(decode) as target:
        ticket = prefill.offer()
        fetched(decode, prefill, target, ticket)
        launched = prefill.gpu("calls", "cuLaunchKernel")
        prefill.gpu("hold", True)
        fetch = decode.fetch(ticket, target.cache, OTHER_BLOCKS, timeout=LONG)
        until(partial(launches, prefill, launched))
        fetch.cancel()
        assert fetch.status is Status.CANCELLED
        assert decode.stats.quarantined_slots > 0
        prefill.gpu("hold", False)
        until(lambda: decode.stats.quarantined_slots == 0)
        assert fetched(decode, prefill, target).path == "gpu-ipc"
        until(lambda: all_slots_free(decode))


def test_slots_are_free_when_a_producer_closes_and_lives_on(gpus: Gpus) -> None:
    with consumer("shm") as decode, on_gpu(decode) as target, Child() as child:
        closing = Prefill(child)
        assert fetched(decode, closing, target).path == "gpu-ipc"
        # One that is given up before the producer is told of any memory.
        with consumer("shm", "other") as other, on_gpu(other, device=0) as second:
            with gpus.stalled("cuMemAlloc"):
                fetch = other.fetch(closing.offer(), second.cache, OTHER_BLOCKS, timeout=LONG)
                until(lambda: other.stats.peers == 1)
                fetch.cancel()
            child.call("close")
            until(lambda: decode.stats.peers + other.stats.peers == 0)
            assert all_slots_free(decode)


def test_a_producer_that_is_killed_while_it_packs(gpus: Gpus) -> None:
    with consumer("shm", heartbeat_timeout=1000.0) as decode, on_gpu(decode) as target:
        for _ in range(2):
            with Child() as child:
                doomed = Prefill(child)
                ticket = doomed.offer()
                fetched(decode, doomed, target, ticket)
                launched = doomed.gpu("calls", "cuLaunchKernel")
                doomed.gpu("hold", True)
                fetch = decode.fetch(ticket, target.cache, OTHER_BLOCKS, timeout=LONG)
                until(partial(launches, doomed, launched))
                child.kill()
                with pytest.raises(kvxfer.TransferError, match="lost 'prefill'"):
                    fetch.wait()
                until(lambda: decode.stats.peers == 0)
                assert all_slots_free(decode)


def test_slots_stay_taken_until_a_process_has_ended_that_dies(gpus: Gpus) -> None:
    """Its sockets end first."""
    beats = {"heartbeat_interval": 0.1, "heartbeat_timeout": 2.0}
    with consumer("shm", **beats) as decode, on_gpu(decode) as target, Child() as child:
        dying = Prefill(child, **beats)
        ticket = dying.offer()
        fetched(decode, dying, target, ticket)
        launched = dying.gpu("calls", "cuLaunchKernel")
        dying.gpu("hold", True)
        fetch = decode.fetch(ticket, target.cache, OTHER_BLOCKS, timeout=LONG)
        until(partial(launches, dying, launched))
        child.call("shut_links")
        with pytest.raises(kvxfer.TransferError, match="lost 'prefill'"):
            fetch.wait()
        threading.Event().wait(0.2)
        taken = decode.stats
        assert (taken.peers, taken.free_slots < taken.slots) == (1, True)
        child.kill()
        until(lambda: decode.stats.peers == 0)
        assert all_slots_free(decode)


def test_slots_stay_taken_while_a_device_that_hangs_may_write_there(gpus: Gpus) -> None:
    with consumer("shm") as decode, on_gpu(decode) as target, Child() as child:
        hung = Prefill(child, gpu_timeout=0.3)
        ticket = hung.offer()
        fetched(decode, hung, target, ticket)
        hung.gpu("hold", True)
        fetch = decode.fetch(ticket, target.cache, OTHER_BLOCKS, timeout=LONG)
        with pytest.raises(kvxfer.TransferError, match="has not finished a chunk within 0.3"):
            fetch.wait()
        child.call("close")
        taken = decode.stats
        assert taken.free_slots < taken.slots
        assert taken.peers == 1  # whose end has not come
        child.kill()
        until(lambda: decode.stats.peers == 0)
        assert all_slots_free(decode)


def test_memory_is_not_freed_on_the_progress_thread(gpus: Gpus) -> None:
    """A peer lets go while close() is at work on the GPUs, and is the last to hold their memory."""
    before = gpus.open_handles()
    with Child() as child:
        slow = Prefill(child)
        target = GpuPaged(OTHER, 1)
        with consumer("shm") as decode:
            decode.register(target.cache)
            assert fetched(decode, slow, target).path == "gpu-ipc"
            child.stop()
            with gpus.stalled("cuModuleUnload"):
                unloads = gpus.calls("cuModuleUnload")
                closing = threading.Thread(target=decode.close)
                closing.start()
                until(lambda: gpus.calls("cuModuleUnload") > unloads)
                frees = gpus.calls("cuMemFree")
                child.resume()
                until(lambda: decode.stats.peers == 0)
                assert gpus.calls("cuMemFree") == frees
            closing.join(LONG)
        target.free()
    assert gpus.open_handles() == before


def test_memory_that_nobody_was_told_of_is_freed_at_the_end(gpus: Gpus) -> None:
    """It is ready when the producer, which is stopped then, is to be told no more."""
    before = gpus.open_handles()
    with Child() as child:
        stopped = Prefill(child)
        target = GpuPaged(OTHER, 1)
        with consumer("shm") as decode:
            decode.register(target.cache)
            ticket = stopped.offer()
            with gpus.stalled("cuIpcGetMemHandle"):
                exports = gpus.calls("cuIpcGetMemHandle")
                fetch = decode.fetch(ticket, target.cache, OTHER_BLOCKS, timeout=LONG)
                until(lambda: gpus.calls("cuIpcGetMemHandle") > exports)
                child.stop()
                fetch.cancel()
        target.free()
        assert gpus.open_handles() == before
        child.resume()


def test_a_device_that_hangs_keeps_no_slots_that_it_was_not_told_of(gpus: Gpus) -> None:
    with (
        consumer("shm", chunk_bytes=4096) as decode,
        on_gpu(decode) as target,
        consumer("shm", "other") as other,
        on_gpu(other, device=0) as second,
        Child() as child,
    ):
        hung = Prefill(child, gpu_timeout=0.5)
        ticket = hung.offer()
        fetched(other, hung, second, ticket)
        fetched(decode, hung, target, ticket)
        launched = hung.gpu("calls", "cuLaunchKernel")
        hung.gpu("hold", True)
        fetch = decode.fetch(ticket, target.cache, OTHER_BLOCKS, timeout=LONG)
        until(partial(launches, hung, launched + 3))  # as many as there are lanes
        late = other.fetch(ticket, second.cache, OTHER_BLOCKS, timeout=LONG)
        with pytest.raises(kvxfer.TransferError, match="has not finished a chunk within 0.5"):
            fetch.wait()
        with pytest.raises(kvxfer.TransferError, match="was given up"):
            late.wait()
        assert late.report.path == "gpu-ipc"
        until(lambda: all_slots_free(other))
        assert not all_slots_free(decode)
        child.kill()
        until(lambda: all_slots_free(decode))


def test_close_waits_for_no_device_that_hangs(gpus: Gpus) -> None:
    """A consumer's memory is open there of which nothing is under way."""
    with (
        consumer("shm") as decode,
        on_gpu(decode) as target,
        consumer("shm", "other") as other,
        on_gpu(other, device=0) as second,
        Child() as child,
    ):
        hung = Prefill(child, gpu_timeout=0.3)
        ticket = hung.offer()
        fetched(other, hung, second, ticket)
        fetched(decode, hung, target, ticket)
        hung.gpu("hold", True)
        fetch = decode.fetch(ticket, target.cache, OTHER_BLOCKS, timeout=LONG)
        with pytest.raises(kvxfer.TransferError, match="has not finished a chunk within 0.3"):
            fetch.wait()
        child.call("close")
        assert hung.gpu("calls", "cuIpcCloseMemHandle") == 0
        threading.Event().wait(0.2)
        assert other.stats.peers == 1  # the memory is open yet
        child.kill()
        until(lambda: decode.stats.peers + other.stats.peers == 0)
        assert all_slots_free(decode)
        assert all_slots_free(other)


def test_a_call_that_does_not_return_holds_up_no_other_peer(prefill: Prefill, gpus: Gpus) -> None:
    closes = prefill.gpu("calls", "cuIpcCloseMemHandle")
    with consumer("shm", "first") as first, on_gpu(first) as target:
        assert fetched(first, prefill, target).path == "gpu-ipc"
        prefill.gpu("stall", "cuIpcCloseMemHandle")
    gpus.given_up += 1  # what `first` had to leave there
    until(lambda: prefill.gpu("calls", "cuIpcCloseMemHandle") > closes)
    with consumer("shm") as decode, on_gpu(decode, device=0) as target:
        assert fetched(decode, prefill, target).path == "gpu-ipc"
        prefill.gpu("stall", None)


def test_a_consumer_that_is_killed(gpus: Gpus) -> None:
    with producer("shm") as near, on_gpu(near, SIDE, 0) as source:
        before = gpus.open_handles()
        with Child() as child:
            child.call("start", "decode", "shm")
            child.call("gpu_cache", "cache", OTHER, 1, None, False)
            offer = near.offer(source.cache, BLOCKS, TOKENS, consumers=9)
            for name in ("warm", "late"):
                child.call("fetch", name, offer.ticket, "cache", OTHER_BLOCKS)
                if name == "warm":
                    assert child.call("wait_fetch", name)[0] == "OK"
                    assert gpus.open_handles() == before + 1
                    gpus.hold(True)
            until(lambda: child.call("progress", "late")[0] == "gpu-ipc")
            child.kill()
        gpus.hold(False)
        until(lambda: near.stats.peers == 0 and gpus.open_handles() == before)
        offer.release()
        assert offer.wait(LONG) is Status.CANCELLED
        with Child() as child:
            child.call("start", "decode", "shm")
            child.call("gpu_cache", "cache", OTHER, 1, None, False)
            offer = near.offer(source.cache, BLOCKS, TOKENS, id="again")
            child.call("fetch", "f", offer.ticket, "cache", OTHER_BLOCKS)
            until(lambda: child.call("progress", "f")[0] == "gpu-ipc")
            assert child.call("wait_fetch", "f")[0] == "OK"


def test_memory_stays_while_a_producer_that_is_stopped_has_it_open(gpus: Gpus) -> None:
    before = gpus.open_handles()
    with Child() as child:
        stopped = Prefill(child)
        target = GpuPaged(OTHER, 1)
        with consumer("shm") as decode:
            decode.register(target.cache)
            assert fetched(decode, stopped, target).path == "gpu-ipc"
            child.stop()
        target.free()
        assert gpus.open_handles() == before + 1
        child.resume()
    assert gpus.early_frees() == 0
    gpus.given_up += 1
