"""In which way adapters reach GPU memory, why not, and what a fetch may require."""

from __future__ import annotations

import errno

import pytest
from kvtest import fake_verbs
from kvtest.agents import LONG, consumer, pair, producer, registered
from kvtest.caches import Geometry
from kvtest.direct import DIRECT, needs_fake_adapters
from kvtest.fake_gpu import HOST, Gpus, look, made
from kvtest.gpu_direct import (
    BLOCKS,
    EXPORT,
    PLACES,
    SIDE,
    TOKENS,
    moved,
    open_files,
    over_hip,
    peer_memory,
)

import kvxfer
from kvxfer import Status

pytestmark = needs_fake_adapters


@pytest.mark.parametrize("way", ["auto", "dmabuf", "peermem"])
def test_ways(gpus: Gpus, way: str) -> None:
    with peer_memory(gpus), pair("verbs", **DIRECT, gpudirect=way) as both:
        exported = gpus.calls(EXPORT)
        report = moved(*both)
    assert report.path == "direct"
    named = "by peer memory" if way == "peermem" else "by dma-buf"
    assert report.path_why.count(named) == 2
    assert (gpus.calls(EXPORT) > exported) is (way != "peermem")


@pytest.mark.parametrize("way", ["dmabuf", "peermem"])
@pytest.mark.parametrize(("here", "there"), PLACES)
def test_allocations_that_touch(gpus: Gpus, way: str, here: int, there: int) -> None:
    """As pools cut them out: each is registered by itself, and runs go on over their borders."""
    with (
        gpus.adjacent(),
        peer_memory(gpus),
        pair("verbs", **DIRECT, gpudirect=way) as both,
    ):
        moved(*both, here, there)
        before = fake_verbs.registrations()
        assert moved(*both, here, there).path == "direct"
        arrays = 2 * len(SIDE.layers)
        on_gpus = [place != HOST for place in (here, there)].count(True)
        registered_so = fake_verbs.registrations() - before
        assert registered_so >= on_gpus * arrays * len(fake_verbs.DEVICES)


@pytest.mark.parametrize("where", ["driver", "adapter"])
def test_without_dmabufs_peer_memory_is_taken(gpus: Gpus, where: str) -> None:
    with peer_memory(gpus), pair("verbs", **DIRECT) as both:
        moved(*both, HOST, 0)  # which makes the loop-backs
        with made(SIDE, 1) as other, registered(both[1], other.cache):
            pass  # the device is in use from here on
        files = open_files()
        if where == "driver":
            gpus.fail(EXPORT)
        else:
            fake_verbs.fail_calls("reg_dmabuf_mr", errno.EOPNOTSUPP, times=1000)
        report = moved(*both, HOST, 1)
        assert report.path == "direct"
        assert "written into this GPU by peer memory" in report.path_why
        assert open_files() == files + 2  # behind the scratch memory, which stays


@pytest.mark.parametrize(
    ("error", "why"),
    [
        (errno.EOPNOTSUPP, "cannot register dma-bufs"),
        (errno.EINVAL, "CONFIG_DMABUF_MOVE_NOTIFY and CONFIG_PCI_P2PDMA"),
        (errno.ENOMEM, "BAR may be too small"),
    ],
)
def test_where_no_way_works_it_is_staged_and_both_reasons_are_said(error: int, why: str) -> None:
    with pair("verbs", **DIRECT) as both:
        fake_verbs.fail_calls("reg_dmabuf_mr", error, times=1000)
        report = moved(*both)
        assert report.path == "staged"
        assert "by dma-buf: cannot register" in report.path_why
        assert why in report.path_why
        assert "by peer memory: cannot register" in report.path_why
        assert "load nvidia-peermem" in report.path_why
        assert "GPU memory goes through the host's" in report.why


def test_each_side_says_when_it_is_its_own_memory(gpus: Gpus) -> None:
    with pair("verbs", **DIRECT, gpudirect="dmabuf") as both:
        moved(*both, HOST, HOST)
        gpus.fail(EXPORT)
        assert "'prefill' cannot register its cache: by dma-buf" in moved(*both, 0, HOST).path_why
        gpus.fail(EXPORT)
        why = moved(*both, HOST, 0).path_why
        assert "the cache cannot be registered: by dma-buf: cuMemGetHandleForAddressRange" in why


@pytest.mark.parametrize(("here", "there"), [(0, HOST), (HOST, 1)])
def test_it_can_be_switched_off(gpus: Gpus, here: int, there: int) -> None:
    with pair("verbs", **DIRECT, gpudirect="off") as both:
        exported = gpus.calls(EXPORT)
        report = moved(*both, here, there)
        assert report.path == "staged"
        assert "gpudirect is set to off" in report.path_why
        assert gpus.calls(EXPORT) == exported
        assert moved(*both, HOST, HOST).path == "direct"


def test_descriptors_are_closed_and_keys_end(gpus: Gpus) -> None:
    with pair("verbs", **DIRECT) as both:
        moved(*both)  # the loop-backs are made once
        files, keys = open_files(), fake_verbs.remote_keys()
        with made(SIDE, 0) as source, made(SIDE, 1) as target:
            behind = open_files()
            with registered(both[0], source.cache), registered(both[1], target.cache):
                offer = both[0].offer(source.cache, BLOCKS, TOKENS)
                both[1].fetch(offer.ticket, target.cache, BLOCKS, timeout=LONG).wait(LONG)
                assert open_files() <= behind
                assert fake_verbs.remote_keys() > keys
            assert fake_verbs.remote_keys() == keys
        assert open_files() <= files  # agents of the test before may have closed theirs meanwhile
        fake_verbs.fail_calls("reg_dmabuf_mr", errno.EINVAL, skip=3, times=1)
        assert moved(*both).path == "staged"
        assert open_files() <= files
        assert fake_verbs.remote_keys() == keys


def test_registrations_are_cut_where_an_adapter_wants_it(gpus: Gpus) -> None:
    """Runs, too, at pieces of either side, which are not the same."""
    side = Geometry(layers=("a",), content=64, num_blocks=20, heads=(0, 2))  # arrays of 80 KiB
    with fake_verbs.max_mr_size(70_000), pair("verbs", **DIRECT) as both:
        moved(*both)
        before = fake_verbs.registrations()
        assert moved(*both, side=side).path == "direct"
        # Of both agents, with each adapter: each array in two pieces.
        assert fake_verbs.registrations() - before == 2 * 2 * 2 * 2


# What is required


def test_it_is_granted_where_it_happens(gpus: Gpus) -> None:
    knobs = {**DIRECT, "require": "gpudirect-rdma"}
    with producer("verbs", **knobs) as prefill, consumer("verbs", **knobs) as decode:
        for here in (0, HOST):
            report = moved(prefill, decode, here, 1)
            assert (report.transport, report.path) == ("verbs", "direct")
        with pytest.raises(kvxfer.InvalidError, match="the cache is in the host's memory"):
            moved(prefill, decode, 0, HOST)
        with pytest.raises(kvxfer.TransferError, match="codec int8 needs staging") as caught:
            moved(prefill, decode, 0, 1, codec="int8")
        assert caught.value.status is Status.NO_RESOURCES
    with pair("verbs", **DIRECT) as both:
        assert moved(*both, 0, 1, require="gpudirect-rdma").path == "direct"


def test_it_is_refused_with_the_reason_where_it_does_not(gpus: Gpus) -> None:
    fake_verbs.fail_calls("reg_dmabuf_mr", errno.EOPNOTSUPP, times=1000)
    with pair("verbs", **DIRECT) as both:
        with pytest.raises(
            kvxfer.TransferError, match="gpudirect-rdma is required.*staged.*dma-bufs.*nvidia-peer"
        ) as caught:
            moved(*both, HOST, 1, require="gpudirect-rdma")
        assert caught.value.status is Status.NO_RESOURCES
        assert moved(*both, HOST, 1).path == "staged"
    fake_verbs.fail_calls("reg_dmabuf_mr", 0, times=0)
    with pair("verbs", **DIRECT) as both:
        gpus.fail(EXPORT, 9)  # behind those of the consumer: its trial and eight arrays
        with pytest.raises(
            kvxfer.TransferError, match="'prefill' cannot register its cache: by dma-buf"
        ):
            moved(*both, 0, 1, require="gpudirect-rdma")


def test_a_producer_can_require_it(gpus: Gpus) -> None:
    with (
        producer("verbs", **DIRECT, require="gpudirect-rdma") as prefill,
        consumer("verbs") as decode,
    ):
        with pytest.raises(
            kvxfer.TransferError, match="'prefill' requires gpudirect-rdma.*does not ask for"
        ):
            moved(prefill, decode, 0, HOST)
        assert moved(prefill, decode, HOST, 1).path == "staged"  # no GPU of its own


@pytest.mark.parametrize("who", [None, "producer", "consumer"])
def test_short_runs_are_taken_where_it_is_required(gpus: Gpus, who: str | None) -> None:
    side = Geometry(layers=("a",), content=64, num_blocks=80, heads=(0, 2))
    blocks = range(79, -1, -1)  # not obvious to the consumer: one run each, of 4 KiB
    knobs = {"path": "auto", "require": "gpudirect-rdma"}
    with (
        producer("verbs", **(knobs if who == "producer" else {"path": "auto"})) as prefill,
        consumer("verbs", **(knobs if who == "consumer" else {"path": "auto"})) as decode,
        made(side, 1, seed=1) as source,
        made(side, 0) as target,
        registered(prefill, source.cache),
        registered(decode, target.cache),
        prefill.offer(source.cache, blocks, 80 * 16) as offer,
    ):
        moved(prefill, decode, 1, 0, require="gpudirect-rdma")  # the trial is over then
        fetch = decode.fetch(offer.ticket, target.cache, blocks, timeout=LONG)
        fetch.wait(LONG)
        assert look(target).same_as(look(source))
    if who is None:
        assert fetch.report.path == "staged"
        assert "packing is faster" in fetch.report.path_why
    else:
        assert fetch.report.path == "direct"
        assert "as set" in fetch.report.path_why


def test_what_cannot_be_is_refused_at_once() -> None:
    for knobs, why in (
        ({"transport": "ucx"}, "over UCX chunks are staged in host memory"),
        ({"transport": "tcp"}, "contradicts transport='tcp': say auto or verbs"),
        ({"gpudirect": "off"}, "contradicts gpudirect='off'"),
        ({"path": "staged"}, "chunks are staged in host memory with path='staged'"),
    ):
        settings = {"path": "direct", **knobs, "require": "gpudirect-rdma"}
        with pytest.raises(kvxfer.ConfigError, match=why):
            kvxfer.Config(**settings)
    with pytest.raises(kvxfer.ConfigError, match="gpudirect 'perhaps' is not known"):
        kvxfer.Config(gpudirect="perhaps")


def test_ucx_is_no_way_to_have_it(gpus: Gpus) -> None:
    """Of a consumer that leaves the transport open, from a producer that has UCX alone."""
    with (
        producer("ucx-tcp", **DIRECT) as prefill,
        kvxfer.Agent("decode", **DIRECT) as decode,
        pytest.raises(kvxfer.TransferError, match="no transport in common"),
    ):
        moved(prefill, decode, HOST, 1, require="gpudirect-rdma")


_OVER_HIP = """
from kvxfer import _core
from kvtest import fake_gpu, fake_verbs
from kvtest.agents import LONG, pair
from kvtest.caches import Geometry
from kvtest.direct import DIRECT
from kvtest.fake_gpu import GpuPaged, look
SIDE = Geometry(layers=("a", "b"), content=64, num_blocks=6, heads=(0, 2))
fake_verbs.use()
gpus = fake_gpu.gpus()
for way in ("dmabuf", "peermem"):
    if way == "peermem":
        fake_verbs.set_peer_memory(gpus.peer_memory)
    with pair("verbs", **DIRECT, gpudirect=way) as (prefill, decode):
        source, target = GpuPaged(SIDE, 0, seed=1), GpuPaged(SIDE, 1)
        prefill.register(source.cache)
        decode.register(target.cache)
        offer = prefill.offer(source.cache, range(6), 96, consumers=2)
        fetch = decode.fetch(offer.ticket, target.cache, range(6), timeout=LONG)
        fetch.wait(LONG)
        assert fetch.report.path == "direct", fetch.report
        assert look(target).same_as(source)
        gpus.hdp_flushed()  # the trial did that, too
        fetch = decode.fetch(offer.ticket, target.cache, range(6), timeout=LONG)
        fetch.wait(LONG)
        assert gpus.hdp_flushed()
    source.free()
    target.free()
assert fake_verbs.violations() == 0
print("HIP", fetch.report.path_why)
"""


def test_over_hip(gpus: Gpus) -> None:
    """In a process of its own, for there CUDA is not found. Dma-bufs have an offset there."""
    assert "written into this GPU by peer memory" in over_hip(_OVER_HIP)
