"""The direct path of caches on GPUs: bytes and order."""

from __future__ import annotations

import threading

import pytest
from hypothesis import given, settings
from kvtest import fake_verbs
from kvtest.agents import LONG, pair, registered, until
from kvtest.caches import Paged
from kvtest.direct import BUSY, DIRECT, needs_fake_adapters
from kvtest.fake_gpu import HOST, GpuPaged, Gpus, look, made
from kvtest.gpu_direct import BLOCKS, PLACES, SIDE, TOKENS, moved
from kvtest.strategies import Case, cases, examples

import kvxfer
from kvxfer import Status

pytestmark = needs_fake_adapters


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
