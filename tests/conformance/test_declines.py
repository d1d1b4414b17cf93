"""Offers that end without a fetch, and offers that several ranks share, over every transport."""

from __future__ import annotations

import pytest
from kvtest.agents import LONG, consumer, pair, producer, until
from kvtest.caches import Geometry, Paged

import kvxfer
from kvxfer import Ranks, Status

SIDE = Geometry(layers=("a", "b"), content=64, num_blocks=16)
OTHER = Geometry(layers=("c",), heads=(0, 2), content=8, num_blocks=4, dtype="float8_e4m3fn")


def at_rest(prefill: kvxfer.Agent, *decodes: kvxfer.Agent) -> bool:
    held = prefill.stats.offers + prefill.stats.serving
    for decode in decodes:
        held += decode.stats.fetches + decode.stats.quarantined_slots
        held += decode.stats.slots - decode.stats.free_slots
    return held == 0


@pytest.mark.parametrize("ready", [True, False])
def test_a_decline_ends_the_offer_and_touches_nothing(transport: str, ready: bool) -> None:
    with pair(transport) as (prefill, decode):
        source, target, untouched = Paged(SIDE, seed=1), Paged(SIDE, seed=2), Paged(SIDE, seed=2)
        prefill.register(source.cache)
        decode.register(target.cache)
        offer = prefill.offer(source.cache, range(4), 50, ready=ready)
        decline = decode.decline(offer.ticket, target.cache, timeout=LONG)
        decline.wait()
        assert offer.wait(LONG) is Status.OK
        assert "1 of 1 consumers did not fetch it" in offer.message
        assert prefill.stats.bytes_sent == decode.stats.bytes_received == 0
        assert decline.report.bytes == 0
        assert decline.report.peers == ("prefill",)
        assert target.same_as(untouched)
        decode.unregister(target.cache)  # a decline holds no cache
        until(lambda: at_rest(prefill, decode))


def test_a_decline_needs_no_fitting_cache(transport: str) -> None:
    with pair(transport) as (prefill, decode):
        source, target = Paged(SIDE, seed=1), Paged(OTHER)
        prefill.register(source.cache)
        decode.register(target.cache)
        ticket = kvxfer.issue_ticket("odd", [prefill.reference()], num_tokens=16)
        offer = prefill.offer(source.cache, [1], ticket=ticket)
        fetch = decode.fetch(ticket, target.cache, [1], timeout=LONG)
        with pytest.raises(kvxfer.TransferError, match="MISMATCH"):
            fetch.wait()
        assert not offer.released
        decode.decline(ticket, target.cache).wait()
        assert offer.wait(LONG) is Status.OK


def test_a_decline_before_the_offer(transport: str) -> None:
    with pair(transport) as (prefill, decode):
        source, target = Paged(SIDE, seed=1), Paged(SIDE)
        prefill.register(source.cache)
        decode.register(target.cache)
        ticket = kvxfer.issue_ticket("later", [prefill.reference()], num_tokens=16)
        decode.fileno()
        decline = decode.decline(ticket, target.cache, timeout=LONG)
        until(lambda: prefill.stats.serving == 1)
        assert not decline.done
        offer = prefill.offer(source.cache, [3], ticket=ticket, ready=False)
        assert offer.wait(LONG) is Status.OK
        decline.wait()
        assert decode.poll() == [decline]


def test_ranks_tell_how_many_fetch(transport: str) -> None:
    """Decode TP 4 of prefill TP 2: each prefill rank is fetched from by two."""
    halves = [
        Geometry(layers=("a", "b"), heads=(4 * i, 4 * i + 4), content=16, num_blocks=8)
        for i in (0, 1)
    ]
    quarters = [
        Geometry(layers=("a", "b"), heads=(2 * i, 2 * i + 2), content=16, num_blocks=8)
        for i in range(4)
    ]
    heads = [side.heads for side in quarters]
    with (
        producer(transport, "p0") as p0,
        producer(transport, "p1") as p1,
        consumer(transport) as decode,
    ):
        sources = [Paged(side, seed=number) for number, side in enumerate(halves)]
        targets = [Paged(side) for side in quarters]
        references = []
        for agent, source in zip((p0, p1), sources, strict=True):
            agent.register(source.cache)
            references.append(agent.reference(heads=source.geometry.heads))
        for target in targets:
            decode.register(target.cache)
        ticket = kvxfer.issue_ticket("tp", references, num_tokens=40)
        offers = [
            agent.offer(source.cache, [5, 1, 2], ticket=ticket)
            for agent, source in zip((p0, p1), sources, strict=True)
        ]
        for own, target in enumerate(targets):
            released = [offer.released for offer in offers]
            assert released == [own >= 2, False], own
            ranks = Ranks(own, heads)
            if own == 1:
                decode.decline(ticket, target.cache, ranks=ranks).wait()
            else:
                fetch = decode.fetch(ticket, target.cache, [0, 4, 3], ranks=ranks, timeout=LONG)
                fetch.wait()
                expected = Paged(target.geometry)
                expected.deliver(sources, [5, 1, 2], [0, 4, 3], (0, 40))
                assert target.same_as(expected)
            if own % 2:
                assert offers[own // 2].wait(LONG) is Status.OK


@pytest.mark.parametrize("replicas", [2, 3])
@pytest.mark.parametrize("degree", [1, 2, 4])
def test_ranks_count_the_choice_among_replicas(transport: str, replicas: int, degree: int) -> None:
    with consumer(transport) as decode:
        prefills = [producer(transport, f"p{i}") for i in range(replicas)]
        source = Paged(SIDE, seed=1)
        targets = [Paged(SIDE) for _ in range(degree)]
        for prefill in prefills:
            prefill.register(source.cache)
        for target in targets:
            decode.register(target.cache)
        heads = [(0, 4)] * degree
        references = [prefill.reference(heads=(0, 4)) for prefill in prefills]
        for number in range(4):
            ticket = kvxfer.issue_ticket(f"r{number}", references, num_tokens=16)
            offers = [prefill.offer(source.cache, [2], ticket=ticket) for prefill in prefills]
            for own, target in enumerate(targets):
                fetch = decode.fetch(ticket, target.cache, [3], ranks=Ranks(own, heads))
                fetch.wait()
            until(
                lambda offers=offers: (
                    sum(offer.released for offer in offers) == min(degree, replicas)
                )
            )
            for offer in offers:
                offer.release()
        for prefill in prefills:
            prefill.close()


def test_a_reject_ends_who_waits_and_who_comes_later(transport: str) -> None:
    with pair(transport) as (prefill, decode):
        source, target = Paged(SIDE, seed=1), Paged(SIDE)
        prefill.register(source.cache)
        decode.register(target.cache)
        ticket = kvxfer.issue_ticket("aborted", [prefill.reference()], num_tokens=16)
        fetch = decode.fetch(ticket, target.cache, [1], timeout=LONG)
        decline = decode.decline(ticket, target.cache, timeout=LONG)
        until(lambda: prefill.stats.serving == 2)
        prefill.reject(ticket, "the client has gone")
        with pytest.raises(kvxfer.TransferError, match="the client has gone") as caught:
            fetch.wait()
        assert caught.value.status is Status.WITHDRAWN
        decline.wait()
        late = decode.fetch(ticket, target.cache, [1], timeout=LONG)
        with pytest.raises(kvxfer.TransferError, match="WITHDRAWN"):
            late.wait()
        prefill.reject(ticket)
        with pytest.raises(kvxfer.InvalidError, match="generation was used"):
            prefill.offer(source.cache, [1], ticket=ticket)
        until(lambda: at_rest(prefill, decode))


def test_a_reject_of_an_open_offer(transport: str) -> None:
    with pair(transport) as (prefill, decode):
        source, target = Paged(SIDE, seed=1), Paged(SIDE)
        prefill.register(source.cache)
        decode.register(target.cache)
        offer = prefill.offer(source.cache, [1], 16, ready=False)
        fetch = decode.fetch(offer.ticket, target.cache, [1], timeout=LONG)
        prefill.reject(offer.ticket, "preempted")
        assert offer.wait(LONG) is Status.WITHDRAWN
        with pytest.raises(kvxfer.TransferError, match="WITHDRAWN"):
            fetch.wait()


@pytest.mark.parametrize("when", ["waiting", "serving", "failed"])
def test_a_cancel_that_counts_ends_the_offer(transport: str, when: str) -> None:
    with pair(transport) as (prefill, decode):
        source, target = Paged(SIDE, seed=1), Paged(SIDE)
        prefill.register(source.cache)
        decode.register(target.cache)
        ticket = kvxfer.issue_ticket("r", [prefill.reference()], num_tokens=64)
        offers = []
        if when != "waiting":
            offers.append(prefill.offer(source.cache, range(4), ticket=ticket, ready=False))
        decode.connect("prefill", prefill.address)  # what never got there cannot count there
        timeout = 0.5 if when == "failed" else LONG
        fetch = decode.fetch(ticket, target.cache, range(4), timeout=timeout)
        until(lambda: prefill.stats.serving == 1 or fetch.done)
        if when == "failed":
            with pytest.raises(kvxfer.TransferError, match="TIMEOUT"):
                fetch.wait()
            assert not offers[0].released
        fetch.cancel(done=True)
        fetch.cancel(done=True)
        if when == "waiting":
            offers.append(prefill.offer(source.cache, range(4), ticket=ticket))
        assert offers[0].wait(LONG) is Status.OK
        until(lambda: at_rest(prefill, decode))


def test_a_plain_cancel_keeps_the_offer(transport: str) -> None:
    with pair(transport) as (prefill, decode):
        source, target = Paged(SIDE, seed=1), Paged(SIDE)
        prefill.register(source.cache)
        decode.register(target.cache)
        offer = prefill.offer(source.cache, range(4), 64, ready=False)
        fetch = decode.fetch(offer.ticket, target.cache, range(4), timeout=LONG)
        fetch.cancel()
        again = decode.fetch(offer.ticket, target.cache, range(4), timeout=LONG)
        offer.mark_all_ready()
        again.wait()
        assert offer.wait(LONG) is Status.OK


def test_a_decline_of_one_that_cannot_be_reached_still_tells_the_others(transport: str) -> None:
    with pair(transport) as (prefill, decode):
        two = Geometry(layers=("a", "b"), heads=(0, 8), content=64, num_blocks=16)
        source, target = Paged(SIDE, seed=1), Paged(two)
        prefill.register(source.cache)
        decode.register(target.cache)
        address = "loopback:nobody" if transport == "loopback" else "127.0.0.1:1"
        nobody = kvxfer.AgentRef(name="nobody", address=address, heads=(4, 8))
        ticket = kvxfer.issue_ticket("r", [nobody, prefill.reference(heads=(0, 4))], num_tokens=16)
        offer = prefill.offer(source.cache, [1], ticket=ticket)
        decline = decode.decline(ticket, target.cache, timeout=LONG)
        assert offer.wait(LONG) is Status.OK
        with pytest.raises(kvxfer.TransferError, match="nobody"):
            decline.wait()
