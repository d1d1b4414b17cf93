"""A producer that ends and comes back under the same name and address."""

from __future__ import annotations

import pytest
from kvtest.agents import BETWEEN_PROCESSES, LONG, consumer, listen_address, producer
from kvtest.caches import Geometry, Paged
from kvtest.child import Child

import kvxfer

SIDE = Geometry(layers=("a",), num_blocks=4)


@pytest.fixture(params=BETWEEN_PROCESSES)
def transport(request: pytest.FixtureRequest) -> str:
    return request.param


def offer_of(child: Child, seed: int) -> kvxfer.Ticket:
    child.call("cache", "cache", SIDE, seed)
    return child.call("offer", "cache", [0, 1, 2, 3], 64)


def port_of(transport: str, address: str) -> str:
    return listen_address(transport).replace(":0", ":" + address.rpartition(":")[2])


def status_of(fetch: kvxfer.Fetch) -> kvxfer.Status:
    with pytest.raises(kvxfer.TransferError) as caught:
        fetch.wait(LONG)
    assert caught.value.status is fetch.status
    return caught.value.status


def test_old_tickets_are_stale_and_new_ones_work(transport: str) -> None:
    with consumer(transport) as decode:
        target = Paged(SIDE)
        decode.register(target.cache)
        with Child() as first:
            address = first.call("start", "prefill", transport, listen="")
            old = offer_of(first, 1)
            # Connected, so that the consumer has to notice the end.
            decode.connect("prefill", address)
            first.kill()
        with Child() as second:
            again = second.call("start", "prefill", transport, listen=port_of(transport, address))
            assert again == address
            new = offer_of(second, 2)
            assert status_of(decode.fetch(old, target.cache, range(4))) is kvxfer.Status.STALE
            assert target.poisoned
            decode.fetch(new, target.cache, range(4)).wait(LONG)
            assert target.same_as(Paged(SIDE, 2))
            late = decode.fetch(old, target.cache, range(4))
            assert status_of(late) is kvxfer.Status.STALE
            assert "restarted" in late.error.args[0]
            # An old ticket does no harm to the connection that works.
            assert second.call("wait_offer", new["offer"]) == "OK"


@pytest.mark.parametrize("first", ["old", "new"])
def test_old_and_new_ticket_in_one_breath(transport: str, first: str) -> None:
    """The connection that one ticket begins must not decide about the other."""
    with producer(transport) as prefill:
        address = prefill.address
        prefill.register((source := Paged(SIDE, 1)).cache)
        old = prefill.offer(source.cache, range(4), 64).ticket
    with (
        kvxfer.Agent(
            "prefill",
            listen=port_of(transport, address),
            transport=prefill.config.transport,
        ) as prefill,
        consumer(transport) as decode,
    ):
        assert prefill.address == address
        prefill.register(source.cache)
        new = prefill.offer(source.cache, range(4), 64).ticket
        stale, target = Paged(SIDE), Paged(SIDE)
        decode.register(stale.cache)
        decode.register(target.cache)
        if first == "old":
            failing = decode.fetch(old, stale.cache, range(4))
            working = decode.fetch(new, target.cache, range(4))
        else:
            working = decode.fetch(new, target.cache, range(4))
            failing = decode.fetch(old, stale.cache, range(4))
        working.wait(LONG)
        assert target.same_as(source)
        assert status_of(failing) is kvxfer.Status.STALE
        assert stale.poisoned


def test_a_ticket_without_incarnation_outlives_a_restart_safely(transport: str) -> None:
    """The generation alone keeps it from being served: the restarted agent never offers it."""
    with producer(transport) as prefill:
        address = prefill.address
        reference = kvxfer.AgentRef(name="prefill", address=address)
        ticket = kvxfer.issue_ticket("request", [reference], num_tokens=64)
    with (
        kvxfer.Agent(
            "prefill", listen=port_of(transport, address), transport=prefill.config.transport
        ) as prefill,
        consumer(transport) as decode,
    ):
        source, target = Paged(SIDE, 1), Paged(SIDE)
        prefill.register(source.cache)
        decode.register(target.cache)
        offer = prefill.offer(source.cache, range(4), 64, id="request")
        # Same id, another generation.
        fetch = decode.fetch(ticket, target.cache, range(4))
        assert status_of(fetch) is kvxfer.Status.STALE
        assert "another generation" in str(fetch.error)
        assert target.poisoned
        decode.fetch(offer.ticket, target.cache, range(4)).wait(LONG)
        assert target.same_as(source)


def test_a_consumer_that_comes_back(transport: str) -> None:
    with producer(transport) as prefill:
        source = Paged(SIDE, 3)
        prefill.register(source.cache)
        offer = prefill.offer(source.cache, range(4), 64, consumers=3)
        for _ in range(3):
            with consumer(transport) as decode:
                target = Paged(SIDE)
                decode.register(target.cache)
                decode.fetch(offer.ticket, target.cache, range(4)).wait(LONG)
                assert target.same_as(source)
        assert offer.wait(LONG) is kvxfer.Status.OK
