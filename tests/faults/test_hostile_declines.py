"""Peers that decline in ways that nobody should, over real sockets."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from kvtest import wire
from kvtest.agents import LONG, consumer, producer, until
from kvtest.caches import Geometry, Paged

import kvxfer
from kvxfer import Status

SIDE = Geometry(layers=("layer.0",))


@pytest.fixture(scope="module")
def prefill() -> Iterator[kvxfer.Agent]:
    with producer("tcp") as agent:
        yield agent
        until(lambda: (agent.stats.serving, agent.stats.offers, agent.stats.peers) == (0, 0, 0))


@pytest.fixture(scope="module")
def source(prefill: kvxfer.Agent) -> Paged:
    paged = Paged(SIDE, seed=1)
    prefill.register(paged.cache)
    return paged


def ticket_of(prefill: kvxfer.Agent, name: str = "later") -> kvxfer.Ticket:
    return kvxfer.issue_ticket(name, [prefill.reference()], num_tokens=16)


def test_a_decline_needs_no_layout_and_is_answered(prefill: kvxfer.Agent, source: Paged) -> None:
    with wire.consumer(prefill.address) as fake:
        offer = prefill.offer(source.cache, [1], 16)
        fake.say(wire.decline(offer.ticket, fetch_id=7, cache_id=12345))
        assert fake.hear_a(wire.DECLINED) == wire.of_fetch(wire.DECLINED, 7)
        assert offer.wait(LONG) is Status.OK


@pytest.mark.parametrize(
    "then",
    [
        lambda ticket: wire.decline(ticket),
        lambda ticket: wire.fetch(ticket),
        lambda ticket: wire.of_fetch(wire.DONE, 1),
        lambda ticket: wire.credit(1, 0),
        lambda ticket: wire.of_fetch(wire.DECLINED, 1),
        lambda ticket: wire.decline(ticket, fetch_id=2) + b"x",
        lambda ticket: wire.decline(ticket, fetch_id=2)[:-1],
    ],
    ids=["again", "fetch", "done", "credit", "declined", "long", "short"],
)
def test_what_may_not_follow_a_decline_that_waits(
    prefill: kvxfer.Agent, source: Paged, then: Callable[[kvxfer.Ticket], bytes]
) -> None:
    ticket = ticket_of(prefill)
    with wire.consumer(prefill.address) as fake:
        fake.say(wire.decline(ticket))
        fake.say(then(ticket))
        assert wire.DECLINED not in [message[0] for message in fake.last_words()]
    until(lambda: prefill.stats.serving == 0)
    with prefill.offer(source.cache, [1], ticket=ticket) as offer:
        assert not offer.released  # the decline has gone with its link


def test_a_cancel_takes_a_decline_back(prefill: kvxfer.Agent, source: Paged) -> None:
    ticket = ticket_of(prefill)
    with wire.consumer(prefill.address) as fake:
        fake.say(wire.decline(ticket), wire.of_fetch(wire.CANCEL, 1))
        assert fake.hear_a(wire.CANCELLED) == wire.of_fetch(wire.CANCELLED, 1)
        with prefill.offer(source.cache, [1], ticket=ticket) as offer:
            fake.say(wire.of_fetch(wire.CANCEL, 1))
            fake.hear_a(wire.CANCELLED)
            assert not offer.released


def test_a_decline_is_counted_once_over_connections(prefill: kvxfer.Agent, source: Paged) -> None:
    offer = prefill.offer(source.cache, [1], 16, consumers=2)
    for fetch_id in (1, 2):
        with wire.consumer(prefill.address) as fake:
            for again in (0, 10):
                fake.say(wire.decline(offer.ticket, fetch_id=fetch_id + again))
                fake.hear_a(wire.DECLINED)
    assert not offer.released
    with wire.consumer(prefill.address, "another") as fake:
        fake.say(wire.decline(offer.ticket))
        fake.hear_a(wire.DECLINED)
    assert offer.wait(LONG) is Status.OK


@pytest.mark.parametrize("told", [0, 1])
def test_a_fetch_without_consumers_is_one(prefill: kvxfer.Agent, source: Paged, told: int) -> None:
    offer = prefill.offer(source.cache, [1], 16)
    with wire.consumer(prefill.address) as fake:
        fake.say(wire.layout(), wire.fetch(offer.ticket, consumers=told))
        fake.hear_a(wire.ACCEPT)
        fake.say(wire.of_fetch(wire.DONE, 1))
        assert offer.wait(LONG) is Status.OK


def test_too_many_declines_are_refused(prefill: kvxfer.Agent) -> None:
    with wire.consumer(prefill.address) as fake:
        for number in range(4096):
            fake.say(wire.decline(ticket_of(prefill, "r"), fetch_id=number))
        fake.say(wire.decline(ticket_of(prefill, "r"), fetch_id=5000))
        refused = fake.hear_a(wire.REFUSED)
        assert refused[:10] == wire.of_fetch(wire.REFUSED, 5000) + b"\x0e"  # BUSY


@pytest.mark.parametrize("answer", ["accept", "want", "commit", "cancelled"])
def test_a_producer_that_answers_a_decline_as_if_it_were_a_fetch(answer: str) -> None:
    with wire.FakeProducer() as fake, consumer("tcp") as decode:
        target = Paged(SIDE)
        decode.register(target.cache)
        ticket = kvxfer.issue_ticket("r", [fake.reference()], num_tokens=16)
        decline = decode.decline(ticket, target.cache, timeout=LONG)
        with fake.accept() as peer:
            heard = peer.hear_a(wire.DECLINE)
            assert heard == wire.decline(ticket)
            said = {
                "accept": wire.accept(1, wire_bytes=64),
                "want": want(1),
                "commit": wire.commit(1, size=64),
                "cancelled": wire.of_fetch(wire.CANCELLED, 1),
            }[answer]
            peer.say(said)
            if answer in ("accept", "commit"):
                with pytest.raises(kvxfer.TransferError, match="PROTOCOL"):
                    decline.wait(LONG)
                return
            assert not decline.done
            peer.say(wire.of_fetch(wire.DECLINED, 1), wire.of_fetch(wire.DECLINED, 1))
            decline.wait(LONG)
            peer.say(wire.of_fetch(wire.DECLINED, 99))  # of which nobody knows
            again = decode.decline(ticket, target.cache, timeout=LONG)
            assert peer.hear_a(wire.DECLINE) == wire.decline(ticket, fetch_id=2)
            peer.say(wire.of_fetch(wire.DECLINED, 2))
            again.wait(LONG)


def want(fetch_id: int) -> bytes:
    return wire.of_fetch(wire.WANT, fetch_id) + wire.numbers(1)


def test_a_fetch_that_is_declined_by_its_producer_ends_the_link() -> None:
    with wire.FakeProducer() as fake, consumer("tcp") as decode:
        target = Paged(SIDE)
        decode.register(target.cache)
        ticket = kvxfer.issue_ticket("r", [fake.reference()], num_tokens=16)
        fetch = decode.fetch(ticket, target.cache, [1], timeout=LONG)
        with fake.accept() as peer:
            peer.hear_a(wire.FETCH)
            peer.say(wire.of_fetch(wire.DECLINED, 1))
            with pytest.raises(kvxfer.TransferError, match="PROTOCOL"):
                fetch.wait(LONG)


def test_giving_up_is_told_as_such_and_once() -> None:
    with wire.FakeProducer() as fake, consumer("tcp") as decode:
        target = Paged(SIDE)
        decode.register(target.cache)
        ticket = kvxfer.issue_ticket("r", [fake.reference()], num_tokens=16)
        fetch = decode.fetch(ticket, target.cache, [1], timeout=LONG)
        with fake.accept() as peer:
            peer.hear_a(wire.FETCH)
            fetch.cancel(done=True)
            fetch.cancel(done=True)
            assert peer.hear_a(wire.CANCEL) == wire.of_fetch(wire.CANCEL, 1)
            assert peer.hear_a(wire.DECLINE) == wire.decline(ticket, fetch_id=2, given_up=1)
            peer.say(wire.of_fetch(wire.CANCELLED, 1), wire.of_fetch(wire.DECLINED, 2))
            until(lambda: decode.stats.fetches == 0)
            another = decode.decline(ticket, target.cache, timeout=LONG)
            # Nothing but this came in between.
            assert peer.hear_a(wire.DECLINE) == wire.decline(ticket, fetch_id=3)
            peer.say(wire.of_fetch(wire.DECLINED, 3))
            another.wait(LONG)
