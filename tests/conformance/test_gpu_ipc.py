"""Caches on GPUs of one host, in two processes: chunks go from GPU to GPU, over our own runtime."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from functools import partial

import pytest
from kvtest.agents import LONG, consumer, pair, registered, until
from kvtest.caches import Geometry, Paged
from kvtest.child import Child
from kvtest.coded import Coding, deliver_coded, fill_like_a_model
from kvtest.fake_gpu import Gpus
from kvtest.gpu_ipc import (
    BLOCKS,
    LAYERS,
    OTHER,
    OTHER_BLOCKS,
    SIDE,
    TOKENS,
    Prefill,
    all_given_back,
    all_slots_free,
    fetched,
    idle_prefill,
    launches,
    on_gpu,
)

import kvxfer
from kvxfer import Status


@pytest.fixture(scope="module")
def gpus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gpus]:
    with all_given_back(tmp_path_factory.mktemp("gpu")) as found:
        yield found


@pytest.fixture(scope="module")
def prefill(gpus: Gpus) -> Iterator[Prefill]:
    with idle_prefill() as found:
        yield found


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


def test_writes_that_do_not_arrive_are_noticed_before_any_fetch(prefill: Prefill) -> None:
    with consumer("shm") as decode, on_gpu(decode) as target:
        prefill.gpu("lose_writes", True)
        for _ in range(2):
            report = fetched(decode, prefill, target)
            assert report.path == "staged"
            assert "what the producer's GPU has written into" in report.path_why
        prefill.gpu("lose_writes", False)
        assert decode.stats.digest_errors == 0
    with consumer("shm") as decode, on_gpu(decode) as target:
        assert fetched(decode, prefill, target).path == "gpu-ipc"


def test_a_trial_that_cannot_be_looked_at_is_none(prefill: Prefill, gpus: Gpus) -> None:
    with consumer("shm") as decode, on_gpu(decode) as target:
        gpus.fail("cuMemcpyAsync", 1)  # after the first stamp
        report = fetched(decode, prefill, target)
        assert report.path == "staged"
        assert "it can't be seen what the producer's GPU has written" in report.path_why


def test_a_handle_like_that_of_other_memory_which_is_open(prefill: Prefill, gpus: Gpus) -> None:
    with (
        consumer("shm", "first") as first,
        on_gpu(first) as target,
        consumer("shm", "second") as second,
        on_gpu(second) as other,
    ):
        assert fetched(first, prefill, target).path == "gpu-ipc"
        gpus.repeat_handles(True)
        report = fetched(second, prefill, other)
        gpus.repeat_handles(False)
        assert report.path == "staged"
        assert "what was opened is not the consumer's memory" in report.path_why
        assert fetched(first, prefill, target).path == "gpu-ipc"


def test_two_producers_share_the_slots(prefill: Prefill) -> None:
    """And one of them goes while the other writes."""
    with consumer("shm", arena_bytes=8 * 16384, chunk_bytes=16384) as decode, Child() as child:
        second = Prefill(child, device=1)
        with on_gpu(decode) as target, on_gpu(decode) as other:
            for _ in range(2):
                tickets = [prefill.offer(), second.offer()]
                fetches = [
                    decode.fetch(ticket, into.cache, OTHER_BLOCKS, timeout=LONG)
                    for ticket, into in zip(tickets, (target, other), strict=True)
                ]
                for fetch, into in zip(fetches, (target, other), strict=True):
                    fetch.wait()
                    assert fetch.report.path == "gpu-ipc"
                    into.download()
                    want = Paged(OTHER)
                    want.deliver([prefill.source], BLOCKS, OTHER_BLOCKS, (0, TOKENS))
                    assert into.same_as(want)
            ticket = prefill.offer()
            # The stream of the offer is through then, and holds up no launch.
            fetched(decode, prefill, target, ticket)
            prefill.gpu("hold", True)
            before = prefill.gpu("calls", "cuLaunchKernel")
            fetch = decode.fetch(ticket, target.cache, OTHER_BLOCKS, timeout=LONG)
            until(lambda: launches(prefill, before))
            child.kill()
            until(lambda: decode.stats.peers == 1)
            prefill.gpu("hold", False)
            fetch.wait()
            assert fetch.report.path == "gpu-ipc"
        until(lambda: all_slots_free(decode))


def test_nothing_is_allocated_for_producers_without_gpus(gpus: Gpus) -> None:
    with consumer("shm") as decode, on_gpu(decode) as target, Child() as child:
        child.call("start", "prefill", "shm", listen="")
        child.call("cache", "host", SIDE, 3)
        ticket = child.call("offer", "host", BLOCKS, TOKENS)
        exports = gpus.calls("cuIpcGetMemHandle")
        fetch = decode.fetch(ticket, target.cache, OTHER_BLOCKS, timeout=LONG)
        fetch.wait()
        assert fetch.report.path == "staged"
        assert fetch.report.path_why == "'prefill' has no cache on a GPU"
        assert gpus.calls("cuIpcGetMemHandle") == exports
        # It gets one, which the connection that there is hears of.
        child.call("gpu_cache", "cache", SIDE, 0, 3, False)
        until(lambda: decode.stats.peers == 1)

        def moved() -> str:
            ticket = child.call("offer", "cache", BLOCKS, TOKENS)
            fetch = decode.fetch(ticket, target.cache, OTHER_BLOCKS, timeout=LONG)
            fetch.wait()
            return fetch.report.path

        until(lambda: moved() == "gpu-ipc")  # a fetch may be quicker than what it hears


def takes_gpu_ipc(child: Child, fetch: str) -> bool:
    return child.call("progress", fetch)[0] == "gpu-ipc"


def test_the_same_with_hip(gpus: Gpus, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVXFER_HIP_LIBRARY", os.environ["KVXFER_CUDA_LIBRARY"])
    monkeypatch.setenv("KVXFER_CUDA_LIBRARY", "libnone.so")
    with Child() as near, Child() as far:
        ours = Prefill(near)
        far.call("start", "decode", "shm")
        far.call("gpu_cache", "cache", SIDE, 1, None, False)
        for codec in ("raw", "fp8_e4m3"):
            far.call("fetch", codec, ours.offer(), "cache", BLOCKS, codec=codec)
            until(partial(takes_gpu_ipc, far, codec))
            assert far.call("wait_fetch", codec)[0] == "OK"
        assert ours.gpu("calls", "hipModuleLaunchKernel") > 0
        assert far.call("gpu", "calls", "hipModuleLaunchKernel") > 0
        assert ours.gpu("calls", "cuLaunchKernel") == 0
        far.call("close")
        ours.release()


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
