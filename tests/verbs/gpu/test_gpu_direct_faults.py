"""The direct path of caches on GPUs: what is damaged, and what ends."""

from __future__ import annotations

import pytest
from kvtest import fake_verbs
from kvtest.agents import LONG, pair, registered, until
from kvtest.direct import BUSY, DIRECT, needs_fake_adapters
from kvtest.fake_gpu import HOST, GpuPaged, Gpus, look, made
from kvtest.gpu_direct import BLOCKS, SIDE, TOKENS, moved

import kvxfer
from kvxfer import Status

pytestmark = needs_fake_adapters


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


def test_a_registration_that_leads_nowhere_is_not_used_again(gpus: Gpus) -> None:
    """The trial had passed before; afterwards each fetch over that link would be damaged."""
    with (
        pair("verbs", **DIRECT) as (prefill, decode),
        made(SIDE, HOST, seed=1) as source,
        made(SIDE, 1) as target,
    ):
        moved(prefill, decode, HOST, 1)
        prefill.register(source.cache)
        decode.register(target.cache)
        offer = prefill.offer(source.cache, BLOCKS, TOKENS, consumers=2)
        fake_verbs.lose_gpu_writes(True)
        with pytest.raises(kvxfer.TransferError, match="does not match its digest"):
            decode.fetch(offer.ticket, target.cache, BLOCKS, timeout=LONG).wait()
        fake_verbs.lose_gpu_writes(False)
        fetch = decode.fetch(offer.ticket, target.cache, BLOCKS, timeout=LONG)
        fetch.wait()
        assert look(target).same_as(source)
        assert fetch.report.path == "staged"
        assert "was damaged, until it is connected anew" in fetch.report.path_why
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
