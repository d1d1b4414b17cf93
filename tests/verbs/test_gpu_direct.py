"""The direct path of caches on GPUs: adapters and GPUs that are none, but reach each other."""

from __future__ import annotations

import contextlib
import errno
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from kvtest import fake_gpu, fake_verbs
from kvtest.agents import LONG, consumer, pair, producer, registered, until
from kvtest.caches import Geometry, Paged
from kvtest.direct import BUSY, DIRECT, needs_fake_adapters
from kvtest.fake_gpu import HOST, GpuPaged, Gpus, look, made
from kvtest.strategies import Case, cases, examples

import kvxfer
from kvxfer import Status, _core

pytestmark = needs_fake_adapters

PLACES = [(0, 1), (1, 1), (1, HOST), (HOST, 1)]
# Small, for kernels run as fibers.
SIDE = Geometry(layers=("a", "b", "c", "d"), content=64, num_blocks=6, heads=(0, 2))
TOKENS = SIDE.num_blocks * SIDE.block_size
BLOCKS = range(SIDE.num_blocks)
EXPORT = "cuMemGetHandleForAddressRange"
FLUSH = "cuFlushGPUDirectRDMAWrites"


@pytest.fixture(scope="module")
def gpus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gpus]:
    if _core.build_info()["sanitize"]:
        pytest.skip("ASan does not follow fibers between libraries; the C++ tests of GPUs run")
    with (
        pytest.MonkeyPatch.context() as patch,
        fake_gpu.runtimes(tmp_path_factory.mktemp("gpu"), patch) as found,
    ):
        before = found.open_handles() - found.given_up
        yield found
        assert found.open_handles() == before + found.given_up


@pytest.fixture(autouse=True)
def adapters(gpus: Gpus) -> Iterator[None]:
    fake_verbs.use()
    with fake_verbs.no_faults_left():
        yield


@pytest.fixture(scope="module")
def agents(gpus: Gpus) -> Iterator[tuple[kvxfer.Agent, kvxfer.Agent]]:
    fake_verbs.use()
    with pair("verbs", **DIRECT) as both:
        yield both


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def moved(
    prefill: kvxfer.Agent,
    decode: kvxfer.Agent,
    here: int = 0,
    there: int = 1,
    side: Geometry = SIDE,
    **options: object,
) -> kvxfer.Report:
    """Fetch once from device to device, compare, and return the report."""
    with (
        made(side, here, seed=1) as source,
        made(side, there) as target,
        registered(prefill, source.cache),
        registered(decode, target.cache),
    ):
        blocks = range(side.num_blocks)
        with prefill.offer(source.cache, blocks, side.num_blocks * side.block_size) as offer:
            fetch = decode.fetch(offer.ticket, target.cache, blocks, timeout=LONG, **options)
            fetch.wait(LONG)
            assert look(target).same_as(source)
            assert offer.wait(LONG) is Status.OK
    return fetch.report


@settings(max_examples=examples(15), deadline=None)
@given(case=cases())
def test_any_geometry(agents: tuple[kvxfer.Agent, kvxfer.Agent], case: Case) -> None:
    prefill, decode = agents
    here, there = PLACES[case.seed % len(PLACES)]
    expected = Paged(case.consumer)
    with (
        made(case.producer, here, case.seed) as source,
        made(case.consumer, there) as target,
        registered(prefill, source.cache),
        registered(decode, target.cache),
    ):
        expected.deliver(
            [source],
            case.producer_blocks,
            case.consumer_blocks,
            case.wanted,
            offered_from=case.offered[0],
            first_slot=case.slot,
        )
        offer = prefill.offer(
            source.cache,
            case.producer_blocks,
            case.offered[1] - case.offered[0],
            first_token=case.offered[0],
        )
        fetch = decode.fetch(
            offer.ticket,
            target.cache,
            case.consumer_blocks,
            tokens=slice(*case.wanted),
            first_slot=case.first_slot,
            timeout=LONG,
        )
        fetch.wait(LONG)
        assert offer.wait(LONG) is Status.OK
        assert look(target).same_as(expected)
        row = case.consumer.content * source.arrays[0][0].itemsize
        if row >= 16:
            assert fetch.report.path == "direct"


@pytest.mark.parametrize(("here", "there"), PLACES)
def test_gpus_and_hosts_in_every_pair(
    agents: tuple[kvxfer.Agent, kvxfer.Agent], here: int, there: int
) -> None:
    before = sum(map(fake_verbs.bytes_sent, fake_verbs.DEVICES))
    report = moved(*agents, here, there)
    assert report.path == "direct"
    assert sum(map(fake_verbs.bytes_sent, fake_verbs.DEVICES)) - before >= report.bytes
    said = {
        "as set": True,
        "read from the producer's GPU by dma-buf": here != HOST,
        "written into this GPU by dma-buf": there != HOST,
    }
    assert report.path_why.split("; ") == [text for text, so in said.items() if so]
    assert "through the host" not in report.why


# Order


def test_nothing_is_read_before_the_stream_has_written_it(
    agents: tuple[kvxfer.Agent, kvxfer.Agent], gpus: Gpus
) -> None:
    prefill, decode = agents
    with (
        made(SIDE, 1, seed=1) as source,
        made(SIDE, 0) as target,
        gpus.stream(1) as stream,
        gpus.stream(1) as other,
        registered(prefill, source.cache),
        registered(decode, target.cache),
    ):
        assert isinstance(source, GpuPaged)
        with gpus.held(stream):
            source.fill(3)
            source.upload(stream)
            offer = prefill.offer(source.cache, BLOCKS, TOKENS, stream=stream)
            fetch = decode.fetch(offer.ticket, target.cache, BLOCKS, timeout=LONG)
            until(lambda: prefill.stats.serving == 1)
            with pytest.raises(TimeoutError):
                fetch.wait(0.05)
            assert fetch.report.bytes == 0
        fetch.wait(LONG)
        assert fetch.report.path == "direct"
        assert look(target).same_as(source)
        # The control: an offer that is not told of the stream reads what was there before.
        old = Paged(SIDE, seed=3)
        with gpus.held(stream):
            source.fill(4)
            source.upload(stream)
            offer = prefill.offer(source.cache, BLOCKS, TOKENS, stream=other)
            decode.fetch(offer.ticket, target.cache, BLOCKS, timeout=LONG).wait(LONG)
            assert look(target).same_as(old)
        gpus.wait(1, stream)


def test_no_adapter_writes_before_the_stream_has_let_go(
    agents: tuple[kvxfer.Agent, kvxfer.Agent], gpus: Gpus
) -> None:
    prefill, decode = agents
    with (
        made(SIDE, HOST, seed=1) as source,
        made(SIDE, 1) as target,
        gpus.stream(1) as stream,
        gpus.stream(1) as other,
        registered(prefill, source.cache),
        registered(decode, target.cache),
    ):
        assert isinstance(target, GpuPaged)
        poison = Paged(SIDE)

        def start(after: int) -> kvxfer.Fetch:
            return decode.fetch(offer.ticket, target.cache, BLOCKS, timeout=LONG, stream=after)

        with prefill.offer(source.cache, BLOCKS, TOKENS, consumers=4) as offer:
            sent = prefill.stats.bytes_sent
            with gpus.held(stream):
                target.upload(stream)  # as the zeroing of blocks: what it finds it overwrites
                fetch, cancelled = start(stream), start(stream)
                until(lambda: prefill.stats.serving == 2)
                with pytest.raises(TimeoutError):
                    fetch.wait(0.05)
                cancelled.cancel()  # ends at once, and never writes
                assert prefill.stats.bytes_sent == sent
            fetch.wait(LONG)
            assert fetch.report.path == "direct"
            assert look(target).same_as(source)
            # The control: a fetch that is not told of the stream is overwritten by it.
            target.poison()
            with gpus.held(stream):
                target.upload(stream)
                start(other).wait(LONG)
            gpus.wait(1, stream)
            assert look(target).same_as(poison)
    until(lambda: decode.stats.free_slots == decode.stats.slots)


def test_layers_that_become_ready_one_by_one(agents: tuple[kvxfer.Agent, kvxfer.Agent]) -> None:
    prefill, decode = agents
    with (
        made(SIDE, 0, seed=1) as source,
        made(SIDE, 1) as target,
        registered(prefill, source.cache),
        registered(decode, target.cache),
    ):
        offer = prefill.offer(source.cache, BLOCKS, TOKENS, ready=False)
        fetch = decode.fetch(offer.ticket, target.cache, BLOCKS, timeout=LONG)
        for layer in (2, 0, 3, 1):
            offer.mark_ready(layer)
        fetch.wait(LONG)
        assert fetch.report.path == "direct"
        assert look(target).same_as(source)
        assert offer.wait(LONG) is Status.OK


@pytest.mark.parametrize("digest", [True, False])
def test_what_adapters_wrote_is_settled_before_it_is_published(
    gpus: Gpus, monkeypatch: pytest.MonkeyPatch, digest: bool
) -> None:
    """By the driver's call where it says that it takes one; else by having adapters read.

    Which they do in any case where no digest finds what an order does not hold for.
    """
    with pair("verbs", **DIRECT, digest=digest) as both:
        moved(*both)
        flushed, read = gpus.calls(FLUSH), fake_verbs.fetched_sends()
        chunks = moved(*both).chunks
        assert gpus.calls(FLUSH) - flushed == chunks
        monkeypatch.setenv("FAKE_CUDA_ORDERING", "100")
        ordered = moved(*both).chunks
        assert gpus.calls(FLUSH) - flushed == chunks
        expected = 0 if digest else (chunks + ordered) * len(fake_verbs.DEVICES)
        assert fake_verbs.fetched_sends() - read == expected
        monkeypatch.setenv("FAKE_CUDA_ORDERING", "0")
        monkeypatch.setenv("FAKE_CUDA_FLUSH_OPTIONS", "2")
        expected += moved(*both).chunks * len(fake_verbs.DEVICES)
        assert gpus.calls(FLUSH) - flushed == chunks
        assert fake_verbs.fetched_sends() - read == expected


def test_an_adapter_that_is_down_keeps_no_other_from_reading(
    gpus: Gpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pair("verbs", **DIRECT) as both:
        moved(*both)
        monkeypatch.setenv("FAKE_CUDA_FLUSH_OPTIONS", "2")
        fake_verbs.set_port(fake_verbs.DEVICES[0], False)
        moved(*both)  # which finds out
        read = fake_verbs.fetched_sends()
        report = moved(*both)
        assert report.path == "direct"
        assert fake_verbs.fetched_sends() - read == report.chunks * (len(fake_verbs.DEVICES) - 1)


def test_a_flush_that_fails_fails_the_fetch(gpus: Gpus) -> None:
    with pair("verbs", **DIRECT) as both:
        moved(*both)
        gpus.fail(FLUSH)
        with pytest.raises(kvxfer.TransferError, match=f"{FLUSH} failed"):
            moved(*both)
        moved(*both)


@pytest.mark.parametrize("end", [Status.CANCELLED, Status.PEER_LOST])
def test_what_is_written_behind_the_end_is_settled_before_blocks_are_given_back(
    gpus: Gpus, end: Status
) -> None:
    """No COMMIT tells of it: it must not be seen after what the next owner of them writes."""
    with (
        pair("verbs", **DIRECT, heartbeat_timeout=5 * LONG) as (prefill, decode),
        made(SIDE, HOST, seed=1) as source,
        made(SIDE, 1) as target,
    ):
        prefill.register(source.cache)
        decode.register(target.cache)
        offer = prefill.offer(source.cache, BLOCKS, TOKENS, consumers=3)
        decode.fetch(offer.ticket, target.cache, BLOCKS, timeout=LONG).wait(LONG)
        fake_verbs.hold_sends(True)
        sent = prefill.stats.bytes_sent
        fetch = decode.fetch(offer.ticket, target.cache, BLOCKS, timeout=LONG)
        until(lambda: prefill.stats.bytes_sent > sent)
        flushed, read = gpus.calls(FLUSH), fake_verbs.fetched_sends()
        ends = fetch.cancel if end is Status.CANCELLED else prefill.close
        thread = threading.Thread(target=ends)
        thread.start()
        if end is Status.CANCELLED:
            until(lambda: decode.stats.quarantined_slots > 0)
            assert (gpus.calls(FLUSH), fake_verbs.fetched_sends()) == (flushed, read)
            fake_verbs.hold_sends(False)
        with pytest.raises(kvxfer.TransferError):
            fetch.wait(LONG)
        assert fetch.status is end
        assert fetch.report.chunks == 0
        if end is Status.CANCELLED:  # else the producer says more
            assert fake_verbs.fetched_sends() - read == len(fake_verbs.DEVICES)
        assert gpus.calls(FLUSH) - flushed == 1
        fake_verbs.hold_sends(False)
        thread.join(LONG)


# What is damaged


def test_a_flipped_bit_is_found(agents: tuple[kvxfer.Agent, kvxfer.Agent]) -> None:
    prefill, decode = agents
    with (
        made(SIDE, 0, seed=1) as source,
        made(SIDE, 1) as target,
        registered(prefill, source.cache),
        registered(decode, target.cache),
    ):
        offer = prefill.offer(source.cache, BLOCKS, TOKENS, consumers=2)
        warm = decode.fetch(offer.ticket, target.cache, BLOCKS, timeout=LONG)
        warm.wait(LONG)
        assert warm.report.path == "direct"
        before = decode.stats.digest_errors
        fake_verbs.flip_writes(1)
        fetch = decode.fetch(offer.ticket, target.cache, BLOCKS, timeout=LONG)
        with pytest.raises(kvxfer.TransferError, match="does not match its digest"):
            fetch.wait(LONG)
        assert fetch.status is Status.CORRUPT
        assert decode.stats.digest_errors > before
        offer.release()


def test_bytes_that_change_behind_the_digest_are_found(gpus: Gpus) -> None:
    """The producer digests on the GPU, then the adapter reads what is no longer the same."""
    with (
        pair("verbs", **DIRECT, **BUSY) as (prefill, decode),
        made(SIDE, 0, seed=1) as source,
        made(SIDE, 1) as target,
        gpus.stream(0) as stream,
    ):
        assert isinstance(source, GpuPaged)
        moved(prefill, decode)
        prefill.register(source.cache)
        decode.register(target.cache)
        offer = prefill.offer(source.cache, BLOCKS, TOKENS, consumers=2)
        decode.fetch(offer.ticket, target.cache, BLOCKS, timeout=LONG).wait(LONG)
        fake_verbs.hold_sends(True)
        sent = prefill.stats.bytes_sent
        fetch = decode.fetch(offer.ticket, target.cache, BLOCKS, timeout=LONG)
        until(lambda: prefill.stats.bytes_sent > sent)
        source.fill(2)
        source.upload(stream)
        gpus.wait(0, stream)
        fake_verbs.hold_sends(False)
        with pytest.raises(kvxfer.TransferError, match="does not match its digest"):
            fetch.wait(LONG)
        offer.release()


def test_cancel_returns_only_when_no_write_is_under_way(gpus: Gpus) -> None:
    with (
        pair("verbs", **DIRECT, **BUSY, heartbeat_timeout=5 * LONG) as (prefill, decode),
        made(SIDE, 0, seed=1) as source,
        made(SIDE, 1) as target,
        gpus.stream(1) as stream,
    ):
        assert isinstance(target, GpuPaged)
        prefill.register(source.cache)
        decode.register(target.cache)
        offer = prefill.offer(source.cache, BLOCKS, TOKENS, consumers=3)
        decode.fetch(offer.ticket, target.cache, BLOCKS, timeout=LONG).wait(LONG)
        target.poison()
        target.upload(stream)
        gpus.wait(1, stream)
        fake_verbs.hold_sends(True)
        sent = prefill.stats.bytes_sent
        fetch = decode.fetch(offer.ticket, target.cache, BLOCKS, timeout=LONG)
        until(lambda: prefill.stats.bytes_sent > sent)
        thread = threading.Thread(target=fetch.cancel)
        thread.start()
        until(lambda: decode.stats.quarantined_slots > 0)
        thread.join(0.05)
        assert thread.is_alive()
        fake_verbs.hold_sends(False)
        thread.join(LONG)
        assert not look(target).poisoned  # the control: what was under way did land meanwhile
        target.poison()
        target.upload(stream)
        gpus.wait(1, stream)
        until(lambda: prefill.stats.serving == 0)
        assert look(target).poisoned
        decode.fetch(offer.ticket, target.cache, BLOCKS, timeout=LONG).wait(LONG)
        assert look(target).same_as(source)


# In which way, and why not


@contextlib.contextmanager
def peer_memory(gpus: Gpus) -> Iterator[None]:
    fake_verbs.set_peer_memory(gpus.peer_memory)
    try:
        yield
    finally:
        fake_verbs.set_peer_memory(None)


@pytest.mark.parametrize("way", ["auto", "dmabuf", "peermem"])
def test_ways(gpus: Gpus, way: str) -> None:
    with peer_memory(gpus), pair("verbs", **DIRECT, gpudirect=way) as both:
        exported = gpus.calls(EXPORT)
        report = moved(*both)
    assert report.path == "direct"
    named = "by peer memory" if way == "peermem" else "by dma-buf"
    assert report.path_why.count(named) == 2
    assert (gpus.calls(EXPORT) > exported) is (way != "peermem")


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
                assert open_files() == behind
                assert fake_verbs.remote_keys() > keys
            assert fake_verbs.remote_keys() == keys
        assert open_files() == files
        fake_verbs.fail_calls("reg_dmabuf_mr", errno.EINVAL, skip=3, times=1)
        assert moved(*both).path == "staged"
        assert (open_files(), fake_verbs.remote_keys()) == (files, keys)


def test_registrations_are_cut_where_an_adapter_wants_it(gpus: Gpus) -> None:
    """Runs, too, at pieces of either side, which are not the same."""
    side = Geometry(layers=("a",), content=64, num_blocks=20, heads=(0, 2))  # arrays of 80 KiB
    with fake_verbs.max_mr_size(70_000), pair("verbs", **DIRECT) as both:
        moved(*both)
        before = fake_verbs.registrations()
        assert moved(*both, side=side).path == "direct"
        # Of both agents, with each adapter: each array in two pieces.
        assert fake_verbs.registrations() - before == 2 * 2 * 2 * 2


# Whether it works


def test_a_registration_that_leads_nowhere_is_not_used(gpus: Gpus) -> None:
    """Known from then on for that device; others are tried for themselves."""
    with pair("verbs", **DIRECT, gpudirect="dmabuf") as both:
        fake_verbs.lose_gpu_writes(True)
        report = moved(*both, HOST, 1)
        fake_verbs.lose_gpu_writes(False)
        assert report.path == "staged"
        assert "wrote into scratch memory is not there, or elsewhere" in report.path_why
        assert "GPUDirect is off for this device" in report.path_why
        allocated = gpus.calls("cuMemHostAlloc")
        again = moved(*both, HOST, 1)
        assert (again.path, again.path_why) == ("staged", report.path_why)
        assert gpus.calls("cuMemHostAlloc") == allocated
        assert moved(*both, HOST, 0).path == "direct"
        assert moved(*both, 1, HOST).path == "direct"  # to read is another matter


def test_where_one_way_leads_nowhere_the_other_is_taken(gpus: Gpus) -> None:
    """And for a while the first one is not tried again: that may take seconds."""
    with peer_memory(gpus):
        with pair("verbs", **DIRECT) as both:
            gpus.fail(EXPORT)  # of the scratch memory
            assert "by peer memory" in moved(*both, HOST, 1).path_why
            exported = gpus.calls(EXPORT)
            assert "by peer memory" in moved(*both, HOST, 1).path_why
            assert gpus.calls(EXPORT) == exported
        with pair("verbs", **DIRECT) as both:
            assert "by dma-buf" in moved(*both, HOST, 1).path_why


def test_all_adapters_must_pass(gpus: Gpus) -> None:
    with pair("verbs", **DIRECT) as both:
        moved(*both, HOST, HOST)
        fake_verbs.set_port(fake_verbs.DEVICES[0], False)
        report = moved(*both, HOST, 1)
        assert report.path == "staged"
        assert f"'{fake_verbs.DEVICES[0]}' has no active port" in report.path_why


def test_an_adapter_that_damages_what_it_writes_is_found(gpus: Gpus) -> None:
    with pair("verbs", **DIRECT, gpudirect="dmabuf") as both:
        moved(*both, HOST, HOST)
        fake_verbs.flip_writes(1)
        report = moved(*both, HOST, 1)
    assert report.path == "staged"
    assert "is wrong: GPUDirect is off" in report.path_why


def test_a_device_that_hangs_in_the_trial_costs_nobody_else_the_direct_path(gpus: Gpus) -> None:
    tiny = Geometry(layers=("a",), content=64, num_blocks=2, heads=(0, 1))
    with (
        pair("verbs", **DIRECT, gpudirect="dmabuf", gpu_timeout=1.0) as (prefill, decode),
        made(tiny, HOST, seed=1) as source,
        made(tiny, 1) as target,
    ):
        moved(prefill, decode, HOST, 0, side=tiny)
        prefill.register(source.cache)
        decode.register(target.cache)
        offer = prefill.offer(source.cache, range(2), 32)
        with gpus.held_device(1):
            # Which waits for the device's default stream, too.
            fetch = decode.fetch(offer.ticket, target.cache, range(2), timeout=LONG)
            assert moved(prefill, decode, HOST, 0, side=tiny).path == "direct"
            until(lambda: "has not finished a chunk within 1 s" in fetch.report.path_why)
        fetch.wait(LONG)
        assert fetch.report.path == "staged"
        assert look(target).same_as(source)
    # What the trial had: a stream, an event and four pieces of memory.
    gpus.given_up += 6


def test_a_trial_does_not_wait_for_what_runs_on_the_device(gpus: Gpus) -> None:
    """As it would if it freed its memory, which keeps others from being registered meanwhile."""
    with (
        pair("verbs", **DIRECT) as (prefill, decode),
        made(SIDE, HOST, seed=1) as source,
        made(SIDE, 1) as target,
        made(SIDE, 1) as other,
        gpus.stream(1) as stream,
    ):
        assert isinstance(other, GpuPaged)
        prefill.register(source.cache)
        decode.register(target.cache)
        with gpus.held(stream):
            other.upload(stream)
            with prefill.offer(source.cache, BLOCKS, TOKENS) as offer:
                fetch = decode.fetch(offer.ticket, target.cache, BLOCKS, timeout=LONG)
                fetch.wait(LONG)
            assert fetch.report.path == "direct"
            decode.unregister(target.cache)
            assert look(target).same_as(source)


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


# What ends


def test_memory_that_was_freed(gpus: Gpus) -> None:
    with pair("verbs", **DIRECT) as (prefill, decode), made(SIDE, 1) as target:
        source, other = GpuPaged(SIDE, 0, seed=1), GpuPaged(SIDE, 0, seed=2)
        keys = None
        decode.register(target.cache)
        for paged in (source, other):
            prefill.register(paged.cache)
            with prefill.offer(paged.cache, BLOCKS, TOKENS) as offer:
                decode.fetch(offer.ticket, target.cache, BLOCKS, timeout=LONG).wait(LONG)
            keys = fake_verbs.remote_keys()
        source.free()
        with pytest.raises(kvxfer.InvalidError, match="was freed"):
            prefill.offer(source.cache, BLOCKS, TOKENS)
        prefill.unregister(source.cache)
        with prefill.offer(other.cache, BLOCKS, TOKENS) as offer:
            fetch = decode.fetch(offer.ticket, target.cache, BLOCKS, timeout=LONG)
            fetch.wait(LONG)
            assert fetch.report.path == "direct"
            assert look(target).same_as(other)
        decode.unregister(target.cache)
        assert fake_verbs.remote_keys() < keys
        other.free()


def test_a_lost_device_leaves_other_caches_alone(gpus: Gpus) -> None:
    with (
        pair("verbs", **DIRECT) as (prefill, decode),
        made(SIDE, 0, seed=1) as source,
        made(SIDE, HOST) as target,
    ):
        prefill.register(source.cache)
        decode.register(target.cache)
        offer = prefill.offer(source.cache, BLOCKS, TOKENS, lease=LONG, consumers=3)
        decode.fetch(offer.ticket, target.cache, BLOCKS, timeout=LONG).wait(LONG)
        with gpus.lost():
            with pytest.raises(kvxfer.TransferError, match="could not write chunk .*failed"):
                decode.fetch(offer.ticket, target.cache, BLOCKS, timeout=LONG).wait(LONG)
            assert moved(prefill, decode, HOST, HOST).path == "direct"
        decode.fetch(offer.ticket, target.cache, BLOCKS, timeout=LONG).wait(LONG)
        assert target.same_as(look(source))
        offer.release()


def test_graphs_are_captured_while_memory_is_registered(gpus: Gpus) -> None:
    with (
        pair("verbs", **DIRECT) as (prefill, decode),
        gpus.stream(1) as captured,
        made(SIDE, HOST, seed=1) as source,
        made(SIDE, 1) as target,
        registered(prefill, source.cache),
        registered(decode, target.cache),
    ):
        with gpus.capture(1, captured), prefill.offer(source.cache, BLOCKS, TOKENS) as offer:
            fetch = decode.fetch(offer.ticket, target.cache, BLOCKS, timeout=LONG)
            fetch.wait(LONG)
            assert fetch.report.path == "direct"
        assert look(target).same_as(source)


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
        offer = prefill.offer(source.cache, range(6), 96)
        fetch = decode.fetch(offer.ticket, target.cache, range(6), timeout=LONG)
        fetch.wait(LONG)
        assert fetch.report.path == "direct", fetch.report
        assert look(target).same_as(source)
        assert gpus.hdp_flushed()
    source.free()
    target.free()
assert fake_verbs.violations() == 0
print("HIP", fetch.report.path_why)
"""


def test_over_hip(gpus: Gpus, tmp_path: Path) -> None:
    """In a process of its own, for there CUDA is not found. Dma-bufs have an offset there."""
    library = os.environ["KVXFER_CUDA_LIBRARY"]
    names = {"CUDA": "libnone.so", "HIP": library, "HSA": library}
    environment = {f"KVXFER_{name}_LIBRARY": value for name, value in names.items()}
    done = subprocess.run(
        [sys.executable, "-c", _OVER_HIP],
        env={**os.environ, **environment, "PYTHONPATH": str(Path(__file__).parents[1])},
        capture_output=True,
        text=True,
        timeout=LONG,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "written into this GPU by peer memory" in done.stdout
