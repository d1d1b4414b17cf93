"""What adapters wrote into a GPU is there before kernels look, and before blocks are given back."""

from __future__ import annotations

import threading

import pytest
from kvtest import fake_verbs
from kvtest.agents import LONG, pair, until
from kvtest.direct import DIRECT, needs_fake_adapters
from kvtest.fake_gpu import HOST, GpuPaged, Gpus, look, made
from kvtest.gpu_direct import BLOCKS, FLUSH, SIDE, TOKENS, moved

import kvxfer
from kvxfer import Status

pytestmark = needs_fake_adapters


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


def test_without_digests_a_rail_that_is_lost_is_not_relied_on_twice(gpus: Gpus) -> None:
    """Nobody knows whether what it wrote is there. With digests it costs nothing: see above."""
    with (
        pair("verbs", **DIRECT, digest=False) as (prefill, decode),
        made(SIDE, HOST, seed=1) as source,
        made(SIDE, 1) as target,
    ):
        prefill.register(source.cache)
        decode.register(target.cache)
        offer = prefill.offer(source.cache, BLOCKS, TOKENS, consumers=4)

        def fetched() -> kvxfer.Fetch:
            fetch = decode.fetch(offer.ticket, target.cache, BLOCKS, timeout=LONG)
            fetch.wait(LONG)
            assert look(target).same_as(source)
            return fetch

        assert fetched().report.path == "direct"
        fake_verbs.set_port(fake_verbs.DEVICES[0], False)
        with pytest.raises(kvxfer.TransferError, match=fake_verbs.DEVICES[0]):
            fetched()
        report = fetched().report
        assert report.path == "staged"
        assert "could not be settled" in report.path_why


@pytest.mark.parametrize("options", ["1", "2"])  # the driver flushes, or adapters read
def test_kernels_see_what_was_written_when_it_is_settled(
    gpus: Gpus, monkeypatch: pytest.MonkeyPatch, options: str
) -> None:
    """And no sooner: the digest comes behind that."""
    monkeypatch.setenv("FAKE_CUDA_FLUSH_OPTIONS", options)
    with pair("verbs", **DIRECT) as both:
        with fake_verbs.delayed(gpus):
            assert moved(*both).path == "direct"  # the trial, too
        monkeypatch.setenv("FAKE_CUDA_ORDERING", "100")
        with fake_verbs.delayed(gpus):
            # The control: a driver that says that nothing has to be flushed, and is wrong.
            with pytest.raises(kvxfer.TransferError, match="does not match its digest"):
                moved(*both)
            assert fake_verbs.delayed_gpu_writes() == 0  # before the blocks were given back
    monkeypatch.setenv("FAKE_CUDA_ORDERING", "0")
    with pair("verbs", **DIRECT, digest=False) as both:
        moved(*both)
        # Where no digest would find it, it is not relied on.
        monkeypatch.setenv("FAKE_CUDA_ORDERING", "100")
        with fake_verbs.delayed(gpus):
            assert moved(*both).path == "direct"


def test_what_a_failed_fetch_wrote_does_not_land_on_the_next_owner_of_its_blocks(
    gpus: Gpus,
) -> None:
    with (
        pair("verbs", **DIRECT, heartbeat_timeout=5 * LONG) as (prefill, decode),
        made(SIDE, HOST, seed=1) as source,
        made(SIDE, 1) as target,
        gpus.stream(1) as stream,
    ):
        assert isinstance(target, GpuPaged)
        prefill.register(source.cache)
        decode.register(target.cache)
        offer = prefill.offer(source.cache, BLOCKS, TOKENS, consumers=3)
        decode.fetch(offer.ticket, target.cache, BLOCKS, timeout=LONG).wait(LONG)
        with fake_verbs.delayed(gpus):
            fake_verbs.hold_sends(True)
            sent = prefill.stats.bytes_sent
            fetch = decode.fetch(offer.ticket, target.cache, BLOCKS, timeout=LONG)
            until(lambda: prefill.stats.bytes_sent > sent)
            thread = threading.Thread(target=fetch.cancel)
            thread.start()
            until(lambda: decode.stats.quarantined_slots > 0)
            fake_verbs.hold_sends(False)
            thread.join(LONG)
            target.poison()
            target.upload(stream)
            gpus.wait(1, stream)
        assert look(target).poisoned


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
