"""Processes that are killed or stopped in the middle of transfers."""

from __future__ import annotations

import random
import threading

import pytest
from kvtest.agents import LONG, consumer, producer, until
from kvtest.caches import Geometry, Paged
from kvtest.child import Child

import kvxfer
from kvxfer import Status

SIDE = Geometry(layers=tuple("abcd"), content=64, num_blocks=32)
TOKENS = 32 * 16
# One layer in many chunks through few slots: a kill meets every stage of a transfer.
BUSY = {"arena_bytes": 32 << 10, "chunk_bytes": 8 << 10}
# For peers of those that give up early: they must not fall silent while they are well.
ALIVE = {"heartbeat_interval": 0.1}


def rest(seconds: float) -> None:
    threading.Event().wait(seconds)


@pytest.mark.parametrize("seed", range(4))
def test_a_killed_consumer_costs_no_blocks(process_transport: str, seed: int) -> None:
    """Killed at a random point of its fetch: the blocks are free by the lease, and not touched."""
    draw = random.Random(seed)
    with producer(process_transport, **BUSY) as prefill:
        source = Paged(SIDE, seed=1)
        prefill.register(source.cache)
        with Child() as child:
            child.call("start", "decode", process_transport, **BUSY)
            child.call("cache", "cache", SIDE)
            ready = bool(seed % 2)
            offer = prefill.offer(source.cache, range(32), TOKENS, lease=0.5, ready=ready)
            child.send("fetch", "f", offer.ticket, "cache", range(32))
            if not ready:
                for layer in draw.sample(range(4), draw.randrange(4)):
                    offer.mark_ready(layer)
            rest(draw.uniform(0, 0.03))
            child.kill()
        assert offer.wait(LONG) in (Status.EXPIRED, Status.OK)
        until(lambda: prefill.stats.peers == 0)
        stats = prefill.stats
        assert (stats.offers, stats.serving) == (0, 0)
        # Nobody reads the blocks, so the engine may have them back, and the next one is served.
        prefill.unregister(source.cache)
        prefill.register(source.cache)
        with consumer(process_transport) as decode:
            target = Paged(SIDE)
            decode.register(target.cache)
            offer = prefill.offer(source.cache, range(32), TOKENS)
            decode.fetch(offer.ticket, target.cache, range(32)).wait(LONG)
            assert target.same_as(source)


@pytest.mark.parametrize("stage", ["connected", "waiting", "half", "idle"])
def test_a_killed_producer_fails_its_consumers_at_once(process_transport: str, stage: str) -> None:
    """By its connection, not by heartbeats: those would take longer than this test may."""
    patient = {"heartbeat_interval": 100.0, "heartbeat_timeout": 1000.0}
    with consumer(process_transport, **BUSY, **patient) as decode, Child() as child:
        address = child.call("start", "prefill", process_transport, listen="", **BUSY, **patient)
        child.call("cache", "cache", SIDE, 1)
        decode.connect("prefill", address)
        target = Paged(SIDE)
        decode.register(target.cache)
        fetches = []
        if stage == "connected":
            reference = kvxfer.AgentRef(name="prefill", address=address)
            ticket = kvxfer.issue_ticket("never", [reference], num_tokens=TOKENS)
            fetches = [decode.fetch(ticket, target.cache, range(32), timeout=1000)]
        elif stage != "idle":
            ticket = child.call("offer", "cache", range(32), TOKENS, ready=False, consumers=9)
            fetches = [
                decode.fetch(ticket, target.cache, range(32), timeout=1000) for _ in range(2)
            ]
            until(lambda: child.call("stats")["serving"] == 2)
            if stage == "half":
                for layer in "ab":
                    child.call("mark_ready", ticket["offer"], layer)
                until(lambda: fetches[0].report.bytes > 0)
        child.kill()
        for fetch in fetches:
            with pytest.raises(kvxfer.TransferError, match="'prefill'") as caught:
                fetch.wait(LONG)
            assert caught.value.status is Status.PEER_LOST
        until(lambda: decode.stats.peers == 0)
        stats = decode.stats
        assert (stats.fetches, stats.quarantined_slots) == (0, 0)
        assert stats.free_slots == stats.slots
        with Child() as again:
            again.call("start", "prefill", process_transport, listen=address)
            again.call("cache", "cache", SIDE, 2)
            ticket = again.call("offer", "cache", range(32), TOKENS)
            decode.fetch(ticket, target.cache, range(32)).wait(LONG)
            assert target.same_as(Paged(SIDE, 2))


def test_other_producers_are_not_concerned(process_transport_kind: str) -> None:
    with (
        producer(process_transport_kind, "prefill-1") as living,
        consumer(process_transport_kind) as decode,
        Child() as child,
    ):
        child.call("start", "prefill-0", process_transport_kind, listen="")
        child.call("cache", "cache", SIDE, 1)
        source = Paged(SIDE, 2)
        living.register(source.cache)
        doomed, target = Paged(SIDE), Paged(SIDE)
        decode.register(doomed.cache)
        decode.register(target.cache)
        ticket = child.call("offer", "cache", range(32), TOKENS, ready=False)
        offer = living.offer(source.cache, range(32), TOKENS, ready=False)
        lost = decode.fetch(ticket, doomed.cache, range(32), timeout=LONG)
        until(lambda: child.call("stats")["serving"] == 1)
        fetch = decode.fetch(offer.ticket, target.cache, range(32), timeout=LONG)
        offer.mark_ready(0)
        child.kill()
        with pytest.raises(kvxfer.TransferError, match="'prefill-0'"):
            lost.wait(LONG)
        assert not fetch.done
        offer.mark_all_ready()
        fetch.wait(LONG)
        assert target.same_as(source)
        assert doomed.poisoned


def test_one_rank_of_several_dies(process_transport_kind: str) -> None:
    """A fetch needs all of its parts; the others are told to stop, and keep their offers."""
    with (
        producer(process_transport_kind, "rank-1") as living,
        consumer(process_transport_kind) as decode,
        Child() as child,
    ):
        address = child.call("start", "rank-0", process_transport_kind, listen="")
        child.call("cache", "cache", SIDE, 1)
        source, target = Paged(SIDE, 2), Paged(SIDE)
        living.register(source.cache)
        decode.register(target.cache)
        ticket = kvxfer.issue_ticket(
            "request",
            [
                kvxfer.AgentRef(name="rank-0", address=address, layers=("a", "b")),
                living.reference(layers=["c", "d"]),
            ],
            num_tokens=TOKENS,
        )
        offer = living.offer(source.cache, range(32), ticket=ticket, ready=False)
        child.call("offer", "cache", range(32), ticket=ticket, ready=False)
        fetch = decode.fetch(ticket, target.cache, range(32), timeout=LONG)
        until(lambda: living.stats.serving == 1 and child.call("stats")["serving"] == 1)
        child.kill()
        with pytest.raises(kvxfer.TransferError, match="'rank-0'") as caught:
            fetch.wait(LONG)
        assert caught.value.status is Status.PEER_LOST
        until(lambda: living.stats.serving == 0)
        assert not offer.released
        until(lambda: decode.stats.free_slots == decode.stats.slots)


def test_a_stopped_producer_is_lost_by_its_silence(process_transport_kind: str) -> None:
    """Its slots come back only when nothing can be written into them any more."""
    beat = {"heartbeat_interval": 0.1, "heartbeat_timeout": 0.5}
    with consumer(process_transport_kind, **BUSY, **beat) as decode, Child() as child:
        child.call("start", "prefill", process_transport_kind, listen="", **BUSY, **ALIVE)
        child.call("cache", "cache", SIDE, 1)
        target = Paged(SIDE)
        decode.register(target.cache)
        ticket = child.call("offer", "cache", range(32), TOKENS, ready=False)
        fetch = decode.fetch(ticket, target.cache, range(32), timeout=LONG)
        child.call("mark_ready", ticket["offer"], "a")
        until(lambda: fetch.report.bytes > 0)
        child.stop()
        with pytest.raises(kvxfer.TransferError, match="'prefill'.*not a word for") as caught:
            fetch.wait(LONG)
        assert caught.value.status is Status.PEER_LOST
        for arrays in target.arrays:  # the caller has its blocks back
            for array in arrays:
                array.view("u1")[...] = 0xEE
        child.resume()
        until(lambda: decode.stats.free_slots == decode.stats.slots)
        assert decode.stats.quarantined_slots == 0
        until(lambda: child.call("stats")["peers"] == 0)
        assert target.poisoned
        # It has lost nothing but the connection.
        ticket = child.call("offer", "cache", range(32), TOKENS)
        decode.fetch(ticket, target.cache, range(32)).wait(LONG)
        assert target.same_as(Paged(SIDE, 1))


def test_slots_stay_in_quarantine_while_a_stopped_producer_could_write() -> None:
    """On shared memory, where its writes ask nobody."""
    with consumer("shm", **BUSY) as decode, Child() as child:
        child.call("start", "prefill", "shm", listen="", **BUSY)
        child.call("cache", "cache", SIDE, 1)
        target = Paged(SIDE)
        decode.register(target.cache)
        ticket = child.call("offer", "cache", range(32), TOKENS, ready=False, consumers=2)
        fetch = decode.fetch(ticket, target.cache, range(32), timeout=LONG)
        child.call("mark_ready", ticket["offer"], "a")
        until(lambda: fetch.report.bytes > 0)
        child.stop()
        # What it had packed before is taken in, then nothing moves any more.
        fetch.cancel()
        held = decode.stats.quarantined_slots
        assert decode.stats.free_slots == decode.stats.slots - held
        rest(0.2)
        assert decode.stats.quarantined_slots == held
        child.resume()
        until(lambda: decode.stats.free_slots == decode.stats.slots)


def test_a_stopped_consumer_is_lost_by_its_silence(process_transport_kind: str) -> None:
    beat = {"heartbeat_interval": 0.1, "heartbeat_timeout": 0.5}
    with producer(process_transport_kind, **BUSY, **beat) as prefill, Child() as child:
        source = Paged(SIDE, 1)
        prefill.register(source.cache)
        child.call("start", "decode", process_transport_kind, **BUSY, **ALIVE)
        child.call("cache", "cache", SIDE)
        offer = prefill.offer(source.cache, range(32), TOKENS, lease=1.0, ready=False)
        child.call("fetch", "f", offer.ticket, "cache", range(32))
        until(lambda: prefill.stats.serving == 1)
        offer.mark_ready(0)
        child.stop()
        assert offer.wait(LONG) is Status.EXPIRED
        until(lambda: prefill.stats.peers == 0)
        assert prefill.stats.serving == 0
        child.resume()
        status, message = child.call("wait_fetch", "f")
        assert status in ("PEER_LOST", "EXPIRED"), message
        # It connects again by itself.
        offer = prefill.offer(source.cache, range(32), TOKENS)
        child.call("fetch", "again", offer.ticket, "cache", range(32))
        assert child.call("wait_fetch", "again") == ("OK", "")
        assert child.call("same", "cache", SIDE, 1)


def test_a_process_that_was_stopped_itself_starts_afresh(process_transport_kind: str) -> None:
    """After SIGCONT the peers' words wait unread: their silence is not to be held against them."""
    beat = {"heartbeat_interval": 0.1, "heartbeat_timeout": 0.5}
    with producer(process_transport_kind, **ALIVE) as prefill, Child() as child:
        source = Paged(SIDE, 1)
        prefill.register(source.cache)
        child.call("start", "decode", process_transport_kind, **beat)
        child.call("cache", "cache", SIDE)
        offer = prefill.offer(source.cache, range(32), TOKENS, ready=False)
        child.call("fetch", "f", offer.ticket, "cache", range(32), timeout=LONG)
        until(lambda: prefill.stats.serving == 1)
        child.stop()
        rest(1.0)
        child.resume()
        child.call("stats")
        offer.mark_all_ready()
        assert child.call("wait_fetch", "f") == ("OK", "")


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_a_thread_that_holds_the_gil_does_not_delay_a_transfer(
    process_transport_kind: str, side: str
) -> None:
    """The other side of the transfer ends while no Python can run in the child."""
    with Child() as child:
        if side == "prefill":
            child.call("start", "prefill", process_transport_kind, listen="")
            child.call("cache", "cache", SIDE, 1)
            ticket = child.call("offer", "cache", range(32), TOKENS)
            with consumer(process_transport_kind) as decode:
                target = Paged(SIDE)
                decode.register(target.cache)
                # The handshake is Python, and has to be over on both sides.
                first = child.call("offer", "cache", [0], 16)
                decode.fetch(first, target.cache, [0], timeout=LONG).wait()
                child.send("hold_gil")
                child.wait_until_gil_is_held()
                decode.fetch(ticket, target.cache, range(32), timeout=LONG).wait()
                assert target.same_as(Paged(SIDE, 1))
                assert child.gil_is_held()
        else:
            with producer(process_transport_kind) as prefill:
                source = Paged(SIDE, 1)
                prefill.register(source.cache)
                child.call("start", "decode", process_transport_kind)
                child.call("cache", "cache", SIDE)
                offer = prefill.offer(source.cache, range(32), TOKENS, ready=False)
                child.call("fetch", "f", offer.ticket, "cache", range(32), timeout=LONG)
                until(lambda: prefill.stats.serving == 1)
                child.send("hold_gil")
                child.wait_until_gil_is_held()
                offer.mark_all_ready()
                assert offer.wait(LONG) is Status.OK
                assert child.gil_is_held()
        child.let_gil_go()
