"""Cancel at each stage: nothing is written into the blocks after it has returned."""

from __future__ import annotations

import itertools
import random
import threading

import pytest
from kvtest import wire
from kvtest.agents import LONG, consumer, pair, until
from kvtest.caches import Geometry, Paged

import kvxfer
from kvxfer import Status

SIDE = Geometry(layers=tuple("abcd"), content=64, num_blocks=32)
TOKENS = 32 * 16
BUSY = {"arena_bytes": 32 << 10, "chunk_bytes": 8 << 10}


def cancelled(fetch: kvxfer.Fetch) -> None:
    fetch.cancel()
    assert fetch.done
    assert fetch.status is Status.CANCELLED
    with pytest.raises(kvxfer.TransferError, match="was cancelled"):
        fetch.wait()


def at_rest(*agents: kvxfer.Agent) -> None:
    for agent in agents:
        until(
            lambda agent=agent: (
                agent.stats.serving == 0 and agent.stats.free_slots == agent.stats.slots
            )
        )
        assert agent.stats.quarantined_slots == 0


def test_before_it_is_connected() -> None:
    """The listener does not answer; the cancelled fetch does not wait for that."""
    with wire.FakeProducer() as fake, consumer("tcp") as decode:
        target = Paged(SIDE)
        decode.register(target.cache)
        ticket = kvxfer.issue_ticket("r", [fake.reference()], num_tokens=TOKENS)
        cancelled(decode.fetch(ticket, target.cache, range(32), timeout=LONG))
        decode.unregister(target.cache)
        assert target.poisoned
        assert decode.stats.fetches == 0


def test_before_the_offer_is_made(transport: str) -> None:
    with pair(transport, **BUSY) as (prefill, decode):
        source, target = Paged(SIDE, 1), Paged(SIDE)
        prefill.register(source.cache)
        decode.register(target.cache)
        ticket = kvxfer.issue_ticket("r", [prefill.reference()], num_tokens=TOKENS)
        fetch = decode.fetch(ticket, target.cache, range(32), timeout=LONG)
        until(lambda: prefill.stats.serving == 1)
        cancelled(fetch)
        offer = prefill.offer(source.cache, range(32), ticket=ticket)
        at_rest(prefill, decode)
        assert target.poisoned
        # The next one finds the offer as if nobody had asked before.
        decode.fetch(ticket, target.cache, range(32)).wait(LONG)
        assert target.same_as(source)
        assert offer.wait(LONG) is Status.OK


def test_before_a_layer_is_ready(transport: str) -> None:
    with pair(transport, **BUSY) as (prefill, decode):
        source, target = Paged(SIDE, 1), Paged(SIDE)
        prefill.register(source.cache)
        decode.register(target.cache)
        offer = prefill.offer(source.cache, range(32), TOKENS, ready=False)
        fetch = decode.fetch(offer.ticket, target.cache, range(32), timeout=LONG)
        until(lambda: prefill.stats.serving == 1)
        cancelled(fetch)
        offer.mark_all_ready()
        at_rest(prefill, decode)
        assert target.poisoned


@pytest.mark.parametrize("seed", range(6))
def test_in_the_middle(transport: str, seed: int) -> None:
    """Again and again, at random points: the blocks are poisoned right after and stay so."""
    draw = random.Random(seed)
    with pair(transport, **BUSY) as (prefill, decode):
        source = Paged(SIDE, 1)
        targets = [Paged(SIDE) for _ in range(8)]
        prefill.register(source.cache)
        offer = prefill.offer(source.cache, range(32), TOKENS, consumers=1000)
        for target in targets:
            decode.register(target.cache)
            fetch = decode.fetch(offer.ticket, target.cache, range(32), timeout=LONG)
            share = draw.random() * TOKENS * 4 * 64 * 2 * 2 * 4
            while fetch.report.bytes < share and not fetch.done:
                pass
            fetch.cancel()
            target.poison()
            # Its memory may go now, and the next fetch gets the slots.
            decode.unregister(target.cache)
        last = Paged(SIDE)
        decode.register(last.cache)
        decode.fetch(offer.ticket, last.cache, range(32), timeout=LONG).wait()
        assert last.same_as(source)
        at_rest(prefill, decode)
        assert all(target.poisoned for target in targets)


def test_many_at_once(transport: str) -> None:
    """Some cancelled, some not, from several threads: those that are not deliver."""
    with pair(transport, **BUSY) as (prefill, decode):
        source = Paged(SIDE, 1)
        prefill.register(source.cache)
        offer = prefill.offer(source.cache, range(32), TOKENS, consumers=1000)
        failures: list[BaseException] = []

        def work(number: int) -> None:
            try:
                target = Paged(SIDE)
                decode.register(target.cache)
                for attempt in itertools.count():
                    fetch = decode.fetch(offer.ticket, target.cache, range(32), timeout=LONG)
                    if attempt == 3:
                        break
                    while not fetch.done and fetch.report.bytes < number * 100_000:
                        pass
                    fetch.cancel()
                    target.poison()
                fetch.wait()
                assert target.same_as(source)
            except BaseException as error:  # noqa: BLE001 - shown by the test's own thread
                failures.append(error)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(LONG)
        assert failures == []
        at_rest(prefill, decode)


def test_after_the_end(transport: str) -> None:
    with pair(transport) as (prefill, decode):
        source, target = Paged(SIDE, 1), Paged(SIDE)
        prefill.register(source.cache)
        decode.register(target.cache)
        offer = prefill.offer(source.cache, range(32), TOKENS)
        fetch = decode.fetch(offer.ticket, target.cache, range(32), timeout=LONG)
        fetch.wait()
        fetch.cancel()
        assert fetch.status is Status.OK
        assert offer.wait(LONG) is Status.OK
        assert target.same_as(source)


@pytest.mark.parametrize("share", [0.0, 0.3])
def test_the_producers_own_withdrawal(transport: str, share: float) -> None:
    """release() in the middle: the consumer is told, the producer's blocks are its own again."""
    with pair(transport, **BUSY) as (prefill, decode):
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
        source.fill(2)  # other requests' KV: none of it may be seen
        with pytest.raises(kvxfer.TransferError, match="released by its owner") as caught:
            fetch.wait()
        assert caught.value.status is Status.CANCELLED
        before = Paged(SIDE, 1)
        for layer in SIDE.layers:
            got, old = target.view(layer, "k"), before.view(layer, "k")
            assert ((got == old) | (got == 0xEEEE)).all()
        at_rest(prefill, decode)


def test_a_close_in_the_middle_is_a_cancel(transport: str) -> None:
    """On return of close() no memory is written any more."""
    for share in (0.0, 0.2, 0.7):
        with pair(transport, **BUSY) as (prefill, decode):
            source, target = Paged(SIDE, 1), Paged(SIDE)
            prefill.register(source.cache)
            decode.register(target.cache)
            offer = prefill.offer(source.cache, range(32), TOKENS)
            fetch = decode.fetch(offer.ticket, target.cache, range(32), timeout=LONG)
            until(lambda: fetch.report.bytes >= share * TOKENS * 4 * 64 * 2 * 2 * 4)  # noqa: B023
            decode.close()
            target.poison()
            assert fetch.status in (Status.CLOSED, Status.OK)
            until(lambda: prefill.stats.serving == 0)  # noqa: B023 - called at once
            assert target.poisoned
