"""Either process of a direct fetch is killed in the middle of it."""

from __future__ import annotations

import threading

import pytest
from kvtest import fake_verbs
from kvtest.agents import LONG, consumer, producer, until
from kvtest.caches import Paged
from kvtest.child import Child
from kvtest.direct import BUSY, DIRECT, SIDE, TOKENS

import kvxfer
from kvxfer import Status

pytestmark = pytest.mark.skipif(
    fake_verbs.real_devices() is None, reason="two processes need real adapters: make test-rdma"
)
# What is noticed is the end of the connection, not silence.
PATIENT = {"heartbeat_interval": 100.0, "heartbeat_timeout": 1000.0}


def test_a_verbs_producer_that_is_killed() -> None:
    with consumer("verbs", **DIRECT, **BUSY, **PATIENT) as decode, Child() as child:
        address = child.call("start", "prefill", "verbs", listen="", **DIRECT, **BUSY, **PATIENT)
        child.call("cache", "cache", SIDE, 1)
        target = Paged(SIDE)
        decode.register(target.cache)
        ticket = child.call("offer", "cache", range(32), TOKENS, ready=False)
        fetch = decode.fetch(ticket, target.cache, range(32), timeout=1000)
        for layer in "ab":
            child.call("mark_ready", ticket["offer"], layer)
        until(lambda: fetch.report.bytes > 0)
        assert fetch.report.path == "direct"
        child.kill()
        with pytest.raises(kvxfer.TransferError, match="'prefill'") as caught:
            fetch.wait(LONG)
        assert caught.value.status is Status.PEER_LOST
        target.poison()  # the blocks are ours again: what was under way lands nowhere
        threading.Event().wait(0.3)
        assert target.poisoned
        until(lambda: decode.stats.peers == 0)
        stats = decode.stats
        assert (stats.fetches, stats.quarantined_slots) == (0, 0)
        assert stats.free_slots == stats.slots
        with Child() as again:
            again.call("start", "prefill", "verbs", listen=address, **DIRECT)
            again.call("cache", "cache", SIDE, 2)
            ticket = again.call("offer", "cache", range(32), TOKENS)
            fetch = decode.fetch(ticket, target.cache, range(32))
            fetch.wait(LONG)
            assert fetch.report.path == "direct"
            assert target.same_as(Paged(SIDE, 2))


def test_a_verbs_consumer_that_is_killed() -> None:
    with producer("verbs", **DIRECT, **BUSY) as prefill:
        source = Paged(SIDE, seed=1)
        prefill.register(source.cache)
        with Child() as child:
            child.call("start", "decode", "verbs", **DIRECT, **BUSY)
            child.call("cache", "cache", SIDE)
            offer = prefill.offer(source.cache, range(32), TOKENS, lease=1.0, ready=False)
            child.call("fetch", "f", offer.ticket, "cache", range(32))
            offer.mark_ready(0)
            until(lambda: child.call("progress", "f")[1] > 0)
            assert child.call("progress", "f")[0] == "direct"
            offer.mark_all_ready()
            child.kill()
        assert offer.wait(LONG) in (Status.EXPIRED, Status.OK)
        until(lambda: prefill.stats.peers == 0)
        stats = prefill.stats
        assert (stats.offers, stats.serving) == (0, 0)
        # Nobody reads the blocks, so the engine may have them back, and the next one is served.
        prefill.unregister(source.cache)
        source.fill(3)
        prefill.register(source.cache)
        with consumer("verbs", **DIRECT) as decode:
            target = Paged(SIDE)
            decode.register(target.cache)
            offer = prefill.offer(source.cache, range(32), TOKENS)
            fetch = decode.fetch(offer.ticket, target.cache, range(32))
            fetch.wait(LONG)
            assert fetch.report.path == "direct"
            assert target.same_as(source)
