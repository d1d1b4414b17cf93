"""The direct path: after its fence nothing is written, and damage before it is found."""

from __future__ import annotations

import asyncio
import itertools
import random
import threading
from collections.abc import Iterator

import numpy as np
import pytest
from kvtest import fake_verbs
from kvtest.agents import LONG, consumer, pair, producer, registered, until
from kvtest.caches import Paged
from kvtest.direct import BUSY, BYTES, DIRECT, SIDE, TOKENS, fetched, needs_fake_adapters

import kvxfer
from kvxfer import Status

pytestmark = needs_fake_adapters


@pytest.fixture(autouse=True)
def adapters() -> Iterator[None]:
    fake_verbs.use()
    with fake_verbs.no_faults_left():
        yield


def cut_off(fetch: kvxfer.Fetch, target: Paged) -> None:
    """Give the blocks back: from now on nothing may write into them."""
    fetch.cancel()
    assert fetch.done
    target.poison()


@pytest.mark.parametrize("seed", range(4))
def test_a_cancel_in_the_middle(seed: int) -> None:
    draw = random.Random(seed)
    with pair("verbs", **DIRECT, **BUSY) as (prefill, decode):
        source = Paged(SIDE, 1)
        prefill.register(source.cache)
        offer = prefill.offer(source.cache, range(32), TOKENS, consumers=1000)
        targets = [Paged(SIDE) for _ in range(6)]
        for target in targets:
            decode.register(target.cache)
            fetch = decode.fetch(offer.ticket, target.cache, range(32), timeout=LONG)
            share = draw.random() * BYTES
            while fetch.report.bytes < share and not fetch.done:
                pass
            cut_off(fetch, target)
        until(lambda: prefill.stats.serving == 0)
        until(lambda: decode.stats.free_slots == decode.stats.slots)
        assert all(target.poisoned for target in targets)
        last = decode.fetch(offer.ticket, targets[0].cache, range(32), timeout=LONG)
        last.wait(LONG)
        assert targets[0].same_as(source)


def test_cancel_returns_only_when_no_write_is_under_way() -> None:
    """Writes are held up in the adapter: they land as soon as they may, and not after cancel()."""
    with pair("verbs", **DIRECT, **BUSY, heartbeat_timeout=5 * LONG) as (prefill, decode):
        source, target = Paged(SIDE, seed=1), Paged(SIDE)
        prefill.register(source.cache)
        decode.register(target.cache)
        offer = prefill.offer(source.cache, range(32), TOKENS, consumers=2)
        assert fetched(prefill, decode).path == "direct"
        fake_verbs.hold_sends(True)
        sent = prefill.stats.bytes_sent
        fetch = decode.fetch(offer.ticket, target.cache, range(32), timeout=LONG)
        until(lambda: prefill.stats.bytes_sent > sent)
        assert target.poisoned
        returned = threading.Event()
        thread = threading.Thread(target=lambda: (fetch.cancel(), returned.set()))
        thread.start()
        # The control: what is under way does land in the blocks, while cancel() waits.
        until(lambda: decode.stats.quarantined_slots > 0)
        assert not fetch.done
        assert not returned.is_set()
        fake_verbs.hold_sends(False)
        thread.join(LONG)
        assert returned.is_set()
        assert not target.poisoned
        target.poison()
        until(lambda: prefill.stats.serving == 0)
        assert target.poisoned
        decode.fetch(offer.ticket, target.cache, range(32), timeout=LONG).wait(LONG)
        assert target.same_as(source)


def test_a_producer_that_never_lets_go_loses_its_connection() -> None:
    """Its writes stay in the adapter for good: the queue pairs end, and with them the writes."""
    with pair("verbs", **DIRECT, **BUSY, heartbeat_timeout=2.0) as (prefill, decode):
        source, target = Paged(SIDE, seed=1), Paged(SIDE)
        prefill.register(source.cache)
        decode.register(target.cache)
        offer = prefill.offer(source.cache, range(32), TOKENS, consumers=2)
        assert fetched(prefill, decode).path == "direct"
        fake_verbs.hold_sends(True)
        sent = prefill.stats.bytes_sent
        fetch = decode.fetch(offer.ticket, target.cache, range(32), timeout=LONG)
        until(lambda: prefill.stats.bytes_sent > sent)
        cut_off(fetch, target)
        assert target.poisoned
        fake_verbs.hold_sends(False)
        until(lambda: prefill.stats.serving == 0)
        assert target.poisoned
        decode.fetch(offer.ticket, target.cache, range(32), timeout=LONG).wait(LONG)
        assert target.same_as(source)


def test_a_cancelled_await_does_not_stop_the_event_loop() -> None:
    with pair("verbs", **DIRECT, heartbeat_timeout=4.0) as (prefill, decode):
        source, target = Paged(SIDE, seed=1), Paged(SIDE)
        prefill.register(source.cache)
        decode.register(target.cache)
        offer = prefill.offer(source.cache, range(32), TOKENS, consumers=2)
        decode.fetch(offer.ticket, target.cache, range(32), timeout=LONG).wait(LONG)
        fake_verbs.hold_sends(True)
        sent = prefill.stats.bytes_sent
        fetch = decode.fetch(offer.ticket, target.cache, range(32), timeout=LONG)
        until(lambda: prefill.stats.bytes_sent > sent)

        async def give_up() -> None:
            task = asyncio.ensure_future(fetch)
            await asyncio.sleep(0.1)
            task.cancel()
            # The loop that cancels is the one that lets the writes go on, which cancel() waits for.
            asyncio.get_running_loop().call_later(0.1, fake_verbs.hold_sends, False)
            with pytest.raises(asyncio.CancelledError):
                await task
            assert fetch.status is Status.CANCELLED

        asyncio.run(give_up())
        assert decode.stats.peers == 1  # or it would have been dropped, some seconds later


def test_a_fence_during_a_failover_costs_no_other_fetch() -> None:
    """What went over the rail that died is sent anew before CANCELLED, and that takes its time."""
    heartbeats = {"heartbeat_timeout": 6.0, "heartbeat_interval": 0.1}
    with pair("verbs", **DIRECT, **heartbeats) as (prefill, decode):
        source, target, other = Paged(SIDE, seed=1), Paged(SIDE), Paged(SIDE)
        prefill.register(source.cache)
        decode.register(target.cache)
        decode.register(other.cache)
        offer = prefill.offer(source.cache, range(32), TOKENS, consumers=4)
        for paged in (target, other):
            warm = decode.fetch(offer.ticket, paged.cache, range(32), timeout=LONG)
            warm.wait(LONG)
            assert warm.report.path == "direct"
            paged.poison()
        fake_verbs.hold_sends(True)
        fetches = []
        for paged in (target, other):
            sent = prefill.stats.bytes_sent
            fetches.append(decode.fetch(offer.ticket, paged.cache, range(32), timeout=LONG))
            until(lambda: prefill.stats.bytes_sent > sent)  # noqa: B023 - called at once
        fetch, goes_on = fetches
        fake_verbs.break_queue_pairs(fake_verbs.DEVICES[0])
        thread = threading.Thread(target=fetch.cancel)
        thread.start()
        thread.join(1.5)
        assert thread.is_alive()
        fake_verbs.hold_sends(False)
        thread.join(LONG)
        assert fetch.done
        target.poison()
        goes_on.wait(LONG)
        assert other.same_as(source)
        assert target.poisoned


def test_a_producer_that_is_lost_in_the_middle() -> None:
    with consumer("verbs", **DIRECT, **BUSY) as decode:
        target = Paged(SIDE)
        decode.register(target.cache)
        with producer("verbs", **DIRECT, **BUSY) as prefill:
            source = Paged(SIDE, seed=1)
            prefill.register(source.cache)
            offer = prefill.offer(source.cache, range(32), TOKENS, ready=False)
            fetch = decode.fetch(offer.ticket, target.cache, range(32), timeout=LONG)
            offer.mark_ready(0)
            until(lambda: fetch.report.bytes > 0)
            for device in fake_verbs.DEVICES:
                fake_verbs.break_queue_pairs(device)
            with pytest.raises(kvxfer.TransferError) as caught:
                fetch.wait(LONG)
            assert caught.value.status is Status.PEER_LOST
            target.poison()
            offer.mark_all_ready()
            offer.release()
            assert offer.wait(LONG) is not None
        assert target.poisoned


@pytest.mark.parametrize("share", [0.0, 0.3])
def test_an_offer_that_is_released_in_the_middle(share: float) -> None:
    """The producer's blocks are read by nobody any more when they are released."""
    with pair("verbs", **DIRECT, **BUSY) as (prefill, decode):
        source, target = Paged(SIDE, 1), Paged(SIDE)
        prefill.register(source.cache)
        decode.register(target.cache)
        offer = prefill.offer(source.cache, range(32), TOKENS, ready=False)
        fetch = decode.fetch(offer.ticket, target.cache, range(32), timeout=LONG)
        until(lambda: prefill.stats.serving == 1)
        if share:
            offer.mark_ready(0)
            offer.mark_ready(1)
            until(lambda: fetch.report.bytes > 0)
        offer.release()
        assert offer.wait(LONG) is Status.CANCELLED
        source.fill(2)
        with pytest.raises(kvxfer.TransferError, match="released by its owner"):
            fetch.wait(LONG)
        before = Paged(SIDE, 1)
        for layer in SIDE.layers:
            got, old = target.view(layer, "k"), before.view(layer, "k")
            assert ((got == old) | (got == 0xEEEE)).all()


def test_blocks_are_not_released_while_the_adapter_reads_them() -> None:
    with pair("verbs", **DIRECT, **BUSY) as (prefill, decode):
        source, target = Paged(SIDE, 1), Paged(SIDE)
        prefill.register(source.cache)
        decode.register(target.cache)
        assert fetched(prefill, decode).path == "direct"
        fake_verbs.hold_sends(True)
        sent = prefill.stats.bytes_sent
        offer = prefill.offer(source.cache, range(32), TOKENS)
        fetch = decode.fetch(offer.ticket, target.cache, range(32), timeout=LONG)
        until(lambda: prefill.stats.bytes_sent > sent)
        offer.release()
        assert not offer.released
        fake_verbs.hold_sends(False)
        assert offer.wait(LONG) is Status.CANCELLED
        with pytest.raises(kvxfer.TransferError, match="released by its owner"):
            fetch.wait(LONG)


def test_a_close_in_the_middle() -> None:
    """On return of close() no memory is written any more."""
    for share, held in itertools.product((0.0, 0.2, 0.7), (False, True)):
        with pair("verbs", **DIRECT, **BUSY) as (prefill, decode):
            source, target = Paged(SIDE, 1), Paged(SIDE)
            prefill.register(source.cache)
            decode.register(target.cache)
            offer = prefill.offer(source.cache, range(32), TOKENS)
            fetch = decode.fetch(offer.ticket, target.cache, range(32), timeout=LONG)
            until(lambda: fetch.report.bytes >= share * BYTES)  # noqa: B023
            fake_verbs.hold_sends(held)
            decode.close()
            target.poison()
            assert fetch.status in (Status.CLOSED, Status.OK)
            fake_verbs.hold_sends(False)
            until(lambda: prefill.stats.serving == 0)  # noqa: B023 - called at once
            assert target.poisoned


# What is damaged


def test_bytes_that_change_behind_the_digest_are_found() -> None:
    """The producer digests, then the adapter reads what is no longer the same."""
    with pair("verbs", **DIRECT, **BUSY) as (prefill, decode):
        source, target = Paged(SIDE, seed=1), Paged(SIDE)
        prefill.register(source.cache)
        decode.register(target.cache)
        assert fetched(prefill, decode).path == "direct"
        fake_verbs.hold_sends(True)
        sent = prefill.stats.bytes_sent
        offer = prefill.offer(source.cache, range(32), TOKENS)
        fetch = decode.fetch(offer.ticket, target.cache, range(32), timeout=LONG)
        until(lambda: prefill.stats.bytes_sent > sent)
        for arrays in source.arrays:
            for array in arrays:
                array.view(np.uint8)[...] ^= 0x10
        fake_verbs.hold_sends(False)
        with pytest.raises(kvxfer.TransferError, match="does not match its digest") as caught:
            fetch.wait(LONG)
        assert caught.value.status is Status.CORRUPT
        assert decode.stats.digest_errors > 0
        target.poison()
        until(lambda: prefill.stats.serving == 0)
        assert target.poisoned


# Rails


def test_a_rail_that_dies_in_the_middle() -> None:
    with pair("verbs", **DIRECT, **BUSY) as (prefill, decode):
        for seed in range(4):
            source, target = Paged(SIDE, seed=seed + 1), Paged(SIDE)
            with registered(prefill, source.cache), registered(decode, target.cache):
                offer = prefill.offer(source.cache, range(32), TOKENS, ready=False)
                fetch = decode.fetch(offer.ticket, target.cache, range(32), timeout=LONG)
                offer.mark_ready(0)
                until(lambda: fetch.report.bytes > 0)  # noqa: B023
                dead = fake_verbs.DEVICES[seed % 2]
                if seed < 2:
                    fake_verbs.set_port(dead, False)
                else:
                    fake_verbs.break_queue_pairs(dead)
                offer.mark_all_ready()
                fetch.wait(LONG)
                assert fetch.report.path == "direct"
                assert target.same_as(source)
                fake_verbs.set_port(dead, True)
                assert offer.wait(LONG) is Status.OK
            before = fake_verbs.bytes_sent(dead)
            until(lambda: (fetched(prefill, decode), fake_verbs.bytes_sent(dead))[1] > before)  # noqa: B023
