"""Arenas smaller than what is fetched, and many fetches that share one."""

from __future__ import annotations

import threading

import pytest
from kvtest.agents import LONG, consumer, pair, producer, registered
from kvtest.caches import Geometry, Paged

import kvxfer

SIDE = Geometry(layers=("a", "b"), content=64, num_blocks=64)
OTHER = Geometry(layers=("a", "b"), content=64, axes="BNHC", block_size=32, num_blocks=32)
TINY = {"arena_bytes": 8 << 10, "chunk_bytes": 4 << 10}


def test_a_fetch_larger_than_the_arena_works_in_pieces(transport: str) -> None:
    with pair(transport, **TINY) as (prefill, decode):
        source, target = Paged(SIDE, seed=1), Paged(OTHER)
        prefill.register(source.cache)
        decode.register(target.cache)
        blocks = list(reversed(range(64)))
        offer = prefill.offer(source.cache, blocks, 1000)
        fetch = decode.fetch(offer.ticket, target.cache, list(range(32)), timeout=LONG)
        fetch.wait()
        assert fetch.report.bytes == 1000 * 4 * 64 * 2 * 4 > 50 * TINY["arena_bytes"]
        assert decode.stats.slots == 2
        expected = Paged(OTHER)
        expected.deliver([source], blocks, list(range(32)), (0, 1000))
        assert target.same_as(expected)


@pytest.mark.parametrize("sizes", [(64, 16), (16, 64)], ids=["producer-larger", "consumer-larger"])
def test_chunks_of_different_size_on_the_two_sides(transport: str, sizes: tuple[int, int]) -> None:
    ours, theirs = sizes
    with (
        producer(transport, chunk_bytes=ours << 10) as prefill,
        consumer(transport, chunk_bytes=theirs << 10, arena_bytes=256 << 10) as decode,
    ):
        source, target = Paged(SIDE, seed=2), Paged(OTHER)
        prefill.register(source.cache)
        decode.register(target.cache)
        offer = prefill.offer(source.cache, range(64), 1024)
        decode.fetch(offer.ticket, target.cache, range(32), timeout=LONG).wait()
        expected = Paged(OTHER)
        expected.deliver([source], range(64), range(32), (0, 1024))
        assert target.same_as(expected)


def test_many_fetches_at_once_share_a_tiny_arena(transport: str) -> None:
    with pair(transport, **TINY) as (prefill, decode):
        source, target = Paged(SIDE, seed=3), Paged(SIDE)
        expected = Paged(SIDE)
        prefill.register(source.cache)
        decode.register(target.cache)
        fetches = []
        for number in range(64):
            theirs = [(7 * number + 3) % 64]
            offer = prefill.offer(source.cache, theirs, 13)
            fetches.append(decode.fetch(offer.ticket, target.cache, [number], timeout=LONG))
            expected.deliver([source], theirs, [number], (0, 13))
        for fetch in fetches:
            fetch.wait()
        assert target.same_as(expected)
        assert decode.stats.free_slots == decode.stats.slots


def test_fetches_from_many_threads(transport: str) -> None:
    with pair(transport) as (prefill, decode):
        source, target = Paged(SIDE, seed=4), Paged(SIDE)
        prefill.register(source.cache)
        decode.register(target.cache)
        failures: list[BaseException] = []

        def work(own: range) -> None:
            try:
                for block in own:
                    offer = prefill.offer(source.cache, [block], 16)
                    decode.fetch(offer.ticket, target.cache, [block], timeout=LONG).wait()
                    assert offer.wait(LONG) is kvxfer.Status.OK
            except BaseException as error:  # noqa: BLE001 - shown by the test's own thread
                failures.append(error)

        threads = [threading.Thread(target=work, args=(range(i, 64, 8),)) for i in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(LONG)
        assert failures == []
        assert target.same_as(source)


@pytest.mark.parametrize("why", ["never-offered", "never-ready"])
def test_fetches_that_wait_do_not_starve_others(transport: str, why: str) -> None:
    """Concurrent routing: many fetches wait for their prefill while others could be answered."""
    with pair(transport, **TINY) as (prefill, decode):
        source, target = Paged(SIDE, seed=5), Paged(SIDE)
        prefill.register(source.cache)
        decode.register(target.cache)
        waiting, offers = [], []
        for number in range(8):
            if why == "never-offered":
                ticket = kvxfer.issue_ticket(
                    f"later-{number}", [prefill.reference()], num_tokens=16
                )
            else:
                offer = prefill.offer(source.cache, [number], 16, ready=False)
                offers.append(offer)
                ticket = offer.ticket
            waiting.append(decode.fetch(ticket, target.cache, [number], timeout=LONG))
        offer = prefill.offer(source.cache, [20], 16)
        fetch = decode.fetch(offer.ticket, target.cache, [20], timeout=10.0)
        fetch.wait()
        assert not any(fetch.done for fetch in waiting)
        for fetch in waiting:
            fetch.cancel()


def test_one_agent_offers_and_fetches(transport: str) -> None:
    with producer(transport, "left") as left, producer(transport, "right") as right:
        pages = {agent: (Paged(SIDE, seed=i), Paged(SIDE)) for i, agent in enumerate([left, right])}
        for agent, both in pages.items():
            for paged in both:
                agent.register(paged.cache)
        fetches = []
        for here, there in [(left, right), (right, left), (left, left)]:
            offer = there.offer(pages[there][0].cache, range(8), 128)
            begin = 8 * len(fetches)
            fetches.append(
                here.fetch(
                    offer.ticket, pages[here][1].cache, range(begin, begin + 8), timeout=LONG
                )
            )
        for fetch in fetches:
            fetch.wait()
        for (here, there), begin in {(left, right): 0, (right, left): 8, (left, left): 16}.items():
            expected = Paged(SIDE)
            expected.deliver([pages[there][0]], range(8), range(begin, begin + 8), (0, 128))
            view = pages[here][1].view("b", "v")[begin : begin + 8]
            assert (view == expected.view("b", "v")[begin : begin + 8]).all()


def test_two_producers_under_different_names(transport: str) -> None:
    with (
        producer(transport, "prefill-0") as first,
        producer(transport, "prefill-1") as second,
        consumer(transport) as decode,
    ):
        target = Paged(SIDE)
        with registered(decode, target.cache):
            for agent, seed in [(first, 10), (second, 11)]:
                source = Paged(SIDE, seed)
                agent.register(source.cache)
                offer = agent.offer(source.cache, range(64), 1024)
                decode.fetch(offer.ticket, target.cache, range(64), timeout=LONG).wait()
                assert target.same_as(source)
        assert decode.stats.peers == 2
