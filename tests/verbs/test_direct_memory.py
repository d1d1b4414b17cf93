"""The direct path: memory that is registered, its keys, and who may speak of them."""

from __future__ import annotations

import errno
import struct
import threading
from collections.abc import Iterator

import pytest
from kvtest import fake_verbs, wire
from kvtest.agents import LONG, consumer, pair, producer, until
from kvtest.caches import Paged
from kvtest.direct import DIRECT, SIDE, TOKENS, fetched, needs_fake_adapters

import kvxfer
from kvxfer import Status

pytestmark = needs_fake_adapters


@pytest.fixture(autouse=True)
def adapters() -> Iterator[None]:
    fake_verbs.use()
    with fake_verbs.no_faults_left():
        yield


@pytest.mark.parametrize(("skip", "who"), [(0, "the cache cannot"), (16, "'prefill' cannot")])
def test_memory_that_cannot_be_registered_is_staged(skip: int, who: str) -> None:
    """First the consumer registers 8 arrays with 2 adapters, then the producer."""
    with pair("verbs", **DIRECT) as (prefill, decode):
        decode.connect("prefill", prefill.address)
        fake_verbs.fail_calls("reg_mr", errno.ENOMEM, skip)
        report = fetched(prefill, decode)
        assert report.path == "staged"
        assert who in report.path_why
        assert "limit of locked memory" in report.path_why
        assert fetched(prefill, decode).path == "direct"


def test_several_fetches_wait_for_one_registration() -> None:
    with pair("verbs", **DIRECT) as (prefill, decode):
        decode.connect("prefill", prefill.address)
        arena = fake_verbs.remote_keys()
        source, target = Paged(SIDE, seed=1), Paged(SIDE)
        prefill.register(source.cache)
        decode.register(target.cache)
        offer = prefill.offer(source.cache, range(32), TOKENS, consumers=3)
        before = fake_verbs.registrations()
        with fake_verbs.held_registrations():
            fetches = [
                decode.fetch(
                    offer.ticket, target.cache, range(n, n + 8), tokens=slice(128), timeout=LONG
                )
                for n in (0, 8, 16)
            ]
        for fetch in fetches:
            fetch.wait(LONG)
            assert fetch.report.path == "direct"
        assert len(fake_verbs.remote_keys() - arena) == 16  # arrays, on two adapters
        assert fake_verbs.registrations() - before == 32  # those, and the producer's


@pytest.mark.parametrize("who", ["consumer", "producer"])
def test_leases_are_kept_up_while_memory_is_registered(who: str) -> None:
    with pair("verbs", **DIRECT, heartbeat_interval=0.05) as (prefill, decode):
        sources, target = [Paged(SIDE, seed) for seed in (1, 2)], Paged(SIDE)
        decode.register(target.cache)
        for source in sources:
            prefill.register(source.cache)
        if who == "producer":  # then the consumer has registered
            offer = prefill.offer(sources[0].cache, range(32), TOKENS)
            decode.fetch(offer.ticket, target.cache, range(32), timeout=LONG).wait(LONG)
        else:
            decode.connect("prefill", prefill.address)
        target.poison()
        with fake_verbs.held_registrations():
            offer = prefill.offer(sources[1].cache, range(32), TOKENS, lease=0.5)
            fetch = decode.fetch(offer.ticket, target.cache, range(32), timeout=LONG)
            threading.Event().wait(1.5)
            assert not offer.released
        fetch.wait(LONG)
        assert fetch.report.path == "direct"
        assert target.same_as(sources[1])


def test_unregistering_waits_for_the_registration_and_ends_do_not() -> None:
    """The cache's memory may be freed as soon as it is unregistered."""
    with pair("verbs", **DIRECT) as (prefill, decode):
        decode.connect("prefill", prefill.address)
        arena = fake_verbs.remote_keys()
        source, target = Paged(SIDE, seed=1), Paged(SIDE)
        prefill.register(source.cache)
        decode.register(target.cache)
        offer = prefill.offer(source.cache, range(32), TOKENS)
        with fake_verbs.held_registrations():
            late = decode.fetch(offer.ticket, target.cache, range(32), timeout=0.1)
            fetch = decode.fetch(offer.ticket, target.cache, range(32), timeout=LONG)
            until(lambda: late.done)
            fetch.cancel()
            assert (late.status, fetch.status) == (Status.TIMEOUT, Status.CANCELLED)
            thread = threading.Thread(target=decode.unregister, args=(target.cache,))
            thread.start()
            thread.join(0.1)
            assert thread.is_alive()
        thread.join(LONG)
        assert not thread.is_alive()
        assert fake_verbs.remote_keys() == arena
        assert target.poisoned


def test_auto_opens_no_cache_where_runs_are_too_short() -> None:
    """The consumer knows how long they can be at most, whatever the producer's cache is like."""
    with pair("verbs", path="auto") as (prefill, decode):
        decode.connect("prefill", prefill.address)
        keys, made = fake_verbs.remote_keys(), fake_verbs.registrations()
        report = fetched(prefill, decode)
        assert report.path == "staged"
        assert "runs of less than 310 KiB on average" in report.path_why
        assert (fake_verbs.remote_keys(), fake_verbs.registrations()) == (keys, made)


@pytest.mark.parametrize("kind", [17, 18])
def test_a_consumer_that_says_what_was_not_agreed_on(kind: int) -> None:
    """Sockets have no direct path, whatever both sides would allow."""
    with producer("tcp", **DIRECT) as prefill:
        source = Paged(SIDE, seed=1)
        prefill.register(source.cache)
        with (
            prefill.offer(source.cache, range(32), TOKENS) as offer,
            wire.consumer(prefill.address) as fake,
        ):
            fake.say(wire.layout())
            if kind == 17:
                fake.say(struct.pack("<BIII", 17, 1, 4, 0))
            else:
                asked = bytearray(wire.fetch(offer.ticket, slots=()))
                asked[0] = 18
                fake.say(bytes(asked) + b"\2" + wire.listed(0))
            fake.last_words()
            until(lambda: prefill.stats.peers == 0)


def test_a_producer_that_answers_what_was_not_asked() -> None:
    with wire.FakeProducer() as fake, consumer("tcp", **DIRECT) as decode:
        target = Paged(SIDE)
        decode.register(target.cache)
        ticket = kvxfer.issue_ticket("r", [fake.reference()], num_tokens=TOKENS)
        fetch = decode.fetch(ticket, target.cache, range(32), timeout=LONG)
        with fake.accept() as peer:
            asked = peer.hear_a(wire.FETCH)
            answer = bytearray(wire.accept(*struct.unpack("<Q", asked[1:9]), wire_bytes=1))
            answer[0] = 19
            peer.say(bytes(answer) + b"\1" + wire.text("because"))
            with pytest.raises(kvxfer.TransferError, match="no answer to what was asked") as caught:
                fetch.wait(LONG)
            assert caught.value.status is Status.PROTOCOL
        assert target.poisoned


# Keys


def test_keys_come_with_the_first_fetch_and_go_with_the_cache() -> None:
    """A cache at the same address later has others: no registration outlives what it is of."""
    objects = fake_verbs.objects()  # of agents that other tests share
    with pair("verbs", **DIRECT) as (prefill, decode):
        decode.connect("prefill", prefill.address)
        arena = fake_verbs.remote_keys()
        source, target = Paged(SIDE, seed=1), Paged(SIDE)
        prefill.register(source.cache)
        decode.register(target.cache)
        assert fake_verbs.remote_keys() == arena
        seen = set(arena)
        for _ in range(2):
            target.poison()
            offer = prefill.offer(source.cache, range(32), TOKENS)
            fetch = decode.fetch(offer.ticket, target.cache, range(32), timeout=LONG)
            fetch.wait(LONG)
            offer.wait(LONG)  # the producer hears of the end a little later
            assert fetch.report.path == "direct"
            assert target.same_as(source)
            keys = fake_verbs.remote_keys() - arena
            assert len(keys) == 16  # arrays, on two adapters
            assert not keys & seen
            seen |= keys
            decode.unregister(target.cache)
            assert fake_verbs.remote_keys() == arena
            decode.register(target.cache)
        decode.unregister(target.cache)
        prefill.unregister(source.cache)
        with pair("verbs") as (other, third):
            before = fake_verbs.remote_keys()
            assert fetched(other, third).path == "staged"
            assert len(fake_verbs.remote_keys() - before) <= 2  # an arena
    assert fake_verbs.objects() == objects


def test_keys_end_with_the_peer() -> None:
    before = fake_verbs.remote_keys()
    with consumer("verbs", **DIRECT) as decode:
        target = Paged(SIDE)
        decode.register(target.cache)
        with producer("verbs", **DIRECT) as prefill:
            source = Paged(SIDE, seed=1)
            prefill.register(source.cache)
            offer = prefill.offer(source.cache, range(32), TOKENS)
            fetch = decode.fetch(offer.ticket, target.cache, range(32), timeout=LONG)
            fetch.wait(LONG)
            assert len(fake_verbs.remote_keys() - before) == 18
        until(lambda: fake_verbs.remote_keys() == before)
        decode.unregister(target.cache)
