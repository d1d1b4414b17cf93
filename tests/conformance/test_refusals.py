"""What cannot be served is refused with a reason, over every transport, and harms nobody."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator

import numpy as np
import pytest
from kvtest.agents import LONG, consumer, producer
from kvtest.caches import Geometry, Paged

import kvxfer
from kvxfer import Status

SIDE = Geometry(layers=("layer.0", "layer.1"), num_blocks=8, model="llama")


class Sides:
    """A producer with a cache, and a consumer that fetches into whatever cache."""

    def __init__(self, prefill: kvxfer.Agent, decode: kvxfer.Agent) -> None:
        self.prefill, self.decode = prefill, decode
        self.source = Paged(SIDE, seed=1)
        prefill.register(self.source.cache)

    def offer(self, **options: object) -> kvxfer.Offer:
        return self.prefill.offer(self.source.cache, range(4), 64, **options)

    def target(self, **changes: object) -> Paged:
        made = Paged(dataclasses.replace(SIDE, **changes))
        self.decode.register(made.cache)
        return made

    def refused(
        self, ticket: kvxfer.Ticket, target: Paged, status: Status, *words: str, **options: object
    ) -> None:
        """The fetch fails with this status and these words, and writes nothing."""
        fetch = self.decode.fetch(ticket, target.cache, range(4), **{"timeout": LONG, **options})
        with pytest.raises(kvxfer.TransferError) as caught:
            fetch.wait()
        assert caught.value.status is fetch.status is status
        for word in words:
            assert word in str(caught.value)
        assert target.poisoned


@pytest.fixture
def sides(agents: tuple[kvxfer.Agent, kvxfer.Agent]) -> Iterator[Sides]:
    made = Sides(*agents)
    yield made
    # Whatever was refused, the next fetch works and nothing is left behind.
    target = made.target()
    offer = made.offer()
    made.decode.fetch(offer.ticket, target.cache, range(4), timeout=LONG).wait()
    assert offer.wait(LONG) is Status.OK
    assert (target.view("layer.1", "v")[:4] == made.source.view("layer.1", "v")[:4]).all()
    stats = made.decode.stats
    assert (stats.fetches, stats.quarantined_slots, stats.free_slots) == (0, 0, stats.slots)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"dtype": "uint8"}, ["element types", "bfloat16", "uint8"]),
        ({"content": 32}, ["head sizes", "k of 16", "k of 32"]),
        ({"planes": ("a", "b")}, ["planes", "k of 16, v of 16", "a of 16, b of 16"]),
        ({"planes": ("k",)}, ["planes", "k of 16, v of 16"]),
        ({"layers": ("layer.1", "layer.7")}, ["no layer 'layer.7'", "2 layers", "'layer.0'"]),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_caches_that_do_not_fit(sides: Sides, changes: dict, words: list[str]) -> None:
    offer = sides.offer()
    sides.refused(offer.ticket, sides.target(**changes), Status.MISMATCH, "'prefill'", *words)
    # Nobody was served, so the blocks are still on offer.
    assert not offer.released
    offer.release()


def test_another_model_is_seen_before_anything_is_sent(sides: Sides) -> None:
    offer = sides.offer()
    other = sides.target(model="qwen")
    with pytest.raises(kvxfer.TicketError, match="'llama'.*'qwen'"):
        sides.decode.fetch(offer.ticket, other.cache, range(4))
    offer.release()


def test_another_model_that_the_ticket_did_not_name(sides: Sides) -> None:
    agents = [sides.prefill.reference()]
    ticket = kvxfer.issue_ticket("request", agents, num_tokens=64)
    offer = sides.prefill.offer(sides.source.cache, range(4), ticket=ticket)
    sides.refused(ticket, sides.target(model="qwen"), Status.MISMATCH, "'llama'", "'qwen'")
    offer.release()


def test_heads_that_the_producer_does_not_hold(sides: Sides) -> None:
    offer = sides.offer()
    wider = sides.target(heads=(0, 8))
    with pytest.raises(
        kvxfer.TicketError, match=r"holds head 4 of layer 'layer.0'; wanted are heads \[0, 8\)"
    ):
        sides.decode.fetch(offer.ticket, wider.cache, range(4))
    # The same with a ticket that claims more than there is.
    boast = kvxfer.issue_ticket("boast", [sides.prefill.reference()], num_tokens=64)
    boasted = sides.prefill.offer(sides.source.cache, range(4), ticket=boast)
    sides.refused(boast, wider, Status.MISMATCH, "kv heads", "[0, 4)", "[0, 8)")
    boasted.release()
    offer.release()


def test_a_finished_offer(sides: Sides) -> None:
    offer = sides.offer(id="finished")
    first, second = sides.target(), sides.target()
    sides.decode.fetch(offer.ticket, first.cache, range(4), timeout=LONG).wait()
    assert offer.wait(LONG) is Status.OK
    sides.refused(offer.ticket, second, Status.STALE, "'finished'", "all its consumers")


def test_a_released_offer(sides: Sides) -> None:
    offer = sides.offer(id="withdrawn")
    offer.release()
    words = ("'withdrawn'", "released by its owner")
    sides.refused(offer.ticket, sides.target(), Status.CANCELLED, *words)


def test_an_expired_offer(sides: Sides) -> None:
    offer = sides.offer(id="late", lease=0.01)
    assert offer.wait(LONG) is Status.EXPIRED
    assert "lease" in offer.message
    sides.refused(offer.ticket, sides.target(), Status.EXPIRED, "'late'", "lease of 0.01")


def test_an_offer_that_never_comes(sides: Sides) -> None:
    ticket = kvxfer.issue_ticket("never", [sides.prefill.reference()], num_tokens=64)
    words = ("'never'", "0.05 s", "its offer was not made in time")
    sides.refused(ticket, sides.target(), Status.TIMEOUT, *words, timeout=0.05)


def test_a_layer_that_never_becomes_ready(sides: Sides) -> None:
    offer = sides.offer(ready=False)
    offer.mark_ready(0)
    target = sides.target()
    fetch = sides.decode.fetch(offer.ticket, target.cache, range(4), timeout=0.5)
    with pytest.raises(kvxfer.TransferError, match="chunks arrived from 'prefill'") as caught:
        fetch.wait()
    assert caught.value.status is Status.TIMEOUT
    offer.release()


def test_a_ticket_for_another_generation_of_the_same_id(sides: Sides) -> None:
    agents = [sides.prefill.reference()]
    old = kvxfer.issue_ticket("request", agents, num_tokens=64, model="llama")
    offer = sides.offer(id="request")
    sides.refused(
        old, sides.target(), Status.STALE, "'request'", "another generation", "new ticket"
    )
    offer.release()


def test_blocks_that_a_consumer_must_not_name(sides: Sides) -> None:
    offer = sides.offer()
    target = sides.target()
    for blocks, words in [
        ([0, 1, 2, 8], "8.*8 blocks"),
        ([0, 1, 2, -1], "-1"),
        ([0, 1, 2, 1 << 40], str(1 << 40)),
        ([0, 1, 2, 1], "1.*(twice|repeat|more than once)"),
        ([0, 1, 2], "64 need 4 blocks of 16 tokens.*has 3"),
        ([], "need 4 blocks.*has 0"),
    ]:
        with pytest.raises(kvxfer.InvalidError) as caught:
            sides.decode.fetch(offer.ticket, target.cache, blocks)
        assert re.search(words, str(caught.value)), f"{blocks}: {caught.value}"
    with pytest.raises(kvxfer.InvalidError, match="blocks|slots|tokens"):
        sides.decode.fetch(offer.ticket, target.cache, range(4), first_slot=1)
    with pytest.raises(kvxfer.InvalidError, match="first_slot|slot"):
        sides.decode.fetch(offer.ticket, target.cache, range(5), first_slot=16)
    with pytest.raises(kvxfer.InvalidError, match="slot"):
        sides.decode.fetch(offer.ticket, target.cache, range(5), first_slot=-1)
    assert target.poisoned
    offer.release()


@pytest.mark.parametrize("tokens", [(0, 65), (64, 65), (-1, 4), (5, 5), (9, 3)], ids=str)
def test_tokens_that_are_not_on_offer(sides: Sides, tokens: tuple[int, int]) -> None:
    offer = sides.offer()
    target = sides.target()
    with pytest.raises(kvxfer.InvalidError, match=r"asked for, on offer are \[0, 64\)"):
        sides.decode.fetch(offer.ticket, target.cache, range(5), tokens=slice(*tokens))
    with pytest.raises(kvxfer.InvalidError, match="step"):
        sides.decode.fetch(offer.ticket, target.cache, range(4), tokens=slice(0, 8, 2))
    with pytest.raises(TypeError, match="integer"):
        sides.decode.fetch(offer.ticket, target.cache, range(4), tokens=slice(0, 8.5))
    offer.release()


def test_tokens_that_the_ticket_promised_and_the_offer_has_not(sides: Sides) -> None:
    """A ticket issued apart may lie about what will be offered under its generation."""
    agents = [sides.prefill.reference()]
    generation = b"g" * 8 + id(sides).to_bytes(8, "little")
    more, less = (
        kvxfer.issue_ticket("request", agents, num_tokens=count, generation=generation)
        for count in (64, 32)
    )
    offer = sides.prefill.offer(sides.source.cache, range(4), ticket=less)
    sides.refused(more, sides.target(), Status.MISMATCH, "tokens", "[0, 32)", "[0, 64)")
    offer.release()


def test_bad_arguments_of_an_offer(sides: Sides) -> None:
    offer = sides.offer(id="taken")
    cache = sides.source.cache
    for change, words in [
        ({"id": "taken"}, "'taken' is open already"),
        ({"id": ""}, "id"),
        ({"id": "x" * 2000}, "1024"),
        ({"blocks": [0, 1, 2]}, "64"),
        ({"blocks": [0, 1, 2, 8]}, "8"),
        ({"blocks": [0, 1, 2, -1]}, "-1"),
        ({"num_tokens": 0}, "at least one token"),
        ({"num_tokens": -5}, "at least one token"),
        ({"num_tokens": 1 << 33}, "token"),
        ({"num_tokens": None}, "needs num_tokens"),
        ({"first_token": -1}, "token"),
        ({"first_token": (1 << 32) - 8}, r"2\^32"),
        ({"lease": 0.0}, "lease is 0"),
        ({"lease": float("nan")}, "lease is nan"),
        ({"lease": float("inf")}, "lease is inf"),
        ({"consumers": 0}, "consumers is 0"),
        ({"consumers": 1 << 32}, "consumers is"),
    ]:
        arguments = {"blocks": range(4), "num_tokens": 64, **change}
        with pytest.raises(kvxfer.InvalidError) as caught:
            sides.prefill.offer(cache, **arguments)
        assert re.search(words, str(caught.value)), f"{change}: {caught.value}"
    assert sides.prefill.stats.offers == 1
    offer.release()


def test_a_generation_is_good_for_one_offer(sides: Sides) -> None:
    ticket = kvxfer.issue_ticket("once", [sides.prefill.reference()], num_tokens=64)
    sides.prefill.offer(sides.source.cache, range(4), ticket=ticket).release()
    with pytest.raises(kvxfer.InvalidError, match="'once'.*generation was used before"):
        sides.prefill.offer(sides.source.cache, range(4), ticket=ticket)


@pytest.mark.parametrize("timeout", [0, -1, float("nan"), float("inf")])
def test_timeouts_that_are_none(sides: Sides, timeout: float) -> None:
    offer = sides.offer()
    with pytest.raises(kvxfer.InvalidError, match=f"timeout is {timeout}"):
        sides.decode.fetch(offer.ticket, sides.target().cache, range(4), timeout=timeout)
    offer.release()


def test_unknown_codecs(sides: Sides) -> None:
    offer = sides.offer()
    for codec, words in [
        ("zip", "'zip' is not known; there are raw, fp8_e4m3, fp8_e5m2, int8, auto"),
        ("tiered(recent=10, codec=zip)", "'zip' is not known"),
        ("int8(panel_tokens=257)", "panel_tokens is 257; it is an integer of 1 to 256"),
        (3, "expected a name"),
    ]:
        with pytest.raises(kvxfer.InvalidError, match=re.escape(words)):
            sides.decode.fetch(offer.ticket, sides.target().cache, range(4), codec=codec)
    assert sides.prefill.stats.serving == 0
    offer.release()


@pytest.mark.parametrize("codec", ["int8", "fp8_e4m3", "tiered(recent=10, codec=fp8_e5m2)"])
@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "uint8"])
def test_codecs_of_caches_that_are_8_bit_already(sides: Sides, codec: str, dtype: str) -> None:
    source = Paged(dataclasses.replace(SIDE, dtype=dtype), seed=1)
    sides.prefill.register(source.cache)
    target = sides.target(dtype=dtype if dtype == "uint8" else "bfloat16")
    offer = sides.prefill.offer(source.cache, range(4), 64)
    name = codec if "(" not in codec else "fp8_e5m2"
    words = [f"codec {name}", "'decode'", "'prefill'", dtype, target.geometry.dtype, "codec raw"]
    sides.refused(offer.ticket, target, Status.MISMATCH, *words, codec=codec)
    assert not offer.released
    offer.release()


def test_caches_that_are_not_registered(sides: Sides) -> None:
    offer = sides.offer()
    stranger = Paged(SIDE)
    with pytest.raises(kvxfer.InvalidError, match=r"not registered with agent 'prefill'"):
        sides.prefill.offer(stranger.cache, range(4), 64)
    with pytest.raises(kvxfer.InvalidError, match=r"not registered with agent 'decode'"):
        sides.decode.fetch(offer.ticket, stranger.cache, range(4))
    with pytest.raises(kvxfer.InvalidError, match="not registered"):
        sides.decode.unregister(stranger.cache)
    target = sides.target()
    sides.decode.unregister(target.cache)
    with pytest.raises(kvxfer.InvalidError, match="not registered"):
        sides.decode.fetch(offer.ticket, target.cache, range(4))
    sides.decode.register(target.cache)
    sides.decode.register(target.cache)  # twice is once
    sides.decode.unregister(target.cache)
    with pytest.raises(kvxfer.InvalidError, match="not registered"):
        sides.decode.unregister(target.cache)
    offer.release()


def test_caches_in_use_stay_registered(sides: Sides) -> None:
    offer = sides.offer(ready=False)
    target = sides.target()
    fetch = sides.decode.fetch(offer.ticket, target.cache, range(4))
    for agent, paged in [(sides.prefill, sides.source), (sides.decode, target)]:
        with pytest.raises(kvxfer.InvalidError, match="in use by 1 .*cancel them"):
            agent.unregister(paged.cache)
    fetch.cancel()
    sides.decode.unregister(target.cache)
    offer.release()


def test_tickets_for_an_agent_that_does_not_hold_the_name(transport: str) -> None:
    """Another agent answers at the address: the ticket is from before it."""
    with producer(transport, "prefill-1") as other, consumer(transport) as decode:
        target = Paged(SIDE)
        decode.register(target.cache)
        reference = kvxfer.AgentRef(name="prefill-0", address=other.address)
        ticket = kvxfer.issue_ticket("request", [reference], num_tokens=64)
        fetch = decode.fetch(ticket, target.cache, range(4), timeout=LONG)
        with pytest.raises(kvxfer.TransferError, match="'prefill-0'") as caught:
            fetch.wait()
        assert caught.value.status is Status.STALE
        with pytest.raises(kvxfer.HandshakeError, match="'prefill-0'"):
            decode.connect("prefill-0", other.address)
        decode.connect("prefill-1", other.address)


def test_a_closed_agent_refuses_everything_and_says_so(transport: str) -> None:
    with producer(transport) as prefill, consumer(transport) as decode:
        sides = Sides(prefill, decode)
        target = sides.target()
        offer = sides.offer()
        decode.close()
        decode.close()
        with decode:  # a third time
            pass
        for call in [
            lambda: decode.fetch(offer.ticket, target.cache, range(4)),
            lambda: decode.register(Paged(SIDE).cache),
            lambda: decode.offer(target.cache, range(4), 64, id="x", ticket=offer.ticket),
            lambda: decode.unregister(target.cache),
            lambda: decode.renew(offer.ticket),
            lambda: decode.connect("prefill", prefill.address),
            decode.fileno,
            decode.poll,
        ]:
            with pytest.raises(kvxfer.ClosedError, match="'decode' is closed"):
                call()
        assert "closed" in repr(decode)
        assert decode.stats.fetches == 0
        offer.release()


def test_caches_that_cannot_be_written(sides: Sides) -> None:
    offer = sides.offer()
    made = Paged(SIDE)
    for arrays in made.arrays:
        for array in arrays:
            array.flags.writeable = False
    tensors = dict(zip(SIDE.layers, map(tuple, made.arrays), strict=True))
    cache = sides.decode.register(kvxfer.Cache(tensors, dtype="bfloat16", model="llama"))
    with pytest.raises(kvxfer.InvalidError, match="read-only tensors: nothing can be fetched"):
        sides.decode.fetch(offer.ticket, cache, range(4))
    offer.release()


@pytest.mark.parametrize(
    ("strides", "words"),
    [
        ((0, 2048, 128, 2), "block axis is 0 bytes; strides must be positive"),
        ((4096, 2048, 64, 2), "elements would share memory"),
        ((2048, 2048, 128, 2), "share memory|overlap"),
        ((4096, 2048, -128, 2), "token axis is -128 bytes; strides must be positive"),
    ],
    ids=["zero", "overlapping tokens", "overlapping heads", "negative"],
)
def test_tensors_that_make_no_cache(strides: tuple[int, ...], words: str) -> None:
    memory = np.zeros(1 << 16, np.uint8)
    array = np.ndarray((4, 2, 16, 64), np.float16, memory, offset=4096, strides=strides)
    with pytest.raises(kvxfer.LayoutError, match=f"layer.0.*({words})"):
        kvxfer.Cache({"layer.0": (array, np.zeros((4, 2, 16, 64), np.float16))})


def test_tickets_that_are_none(sides: Sides) -> None:
    """Wherever a ticket is taken; unit/test_ticket.py has all the ways to spoil one."""
    offer = sides.offer()
    target = sides.target()
    tampered = {**offer.ticket, "tokens": [0, 32]}
    foreign = kvxfer.issue_ticket("r", [sides.prefill.reference()], num_tokens=64, secret="theirs")
    for ticket, words in [
        ("garbage", "not a kvxfer ticket"),
        ({**offer.ticket, "kvxfer": 2}, "has version 2"),
        (tampered, "changed on its way"),
        (foreign, "different secrets"),
    ]:
        for call in [
            lambda ticket=ticket: sides.decode.fetch(ticket, target.cache, range(4)),
            lambda ticket=ticket: sides.decode.renew(ticket),
            lambda ticket=ticket: sides.prefill.offer(sides.source.cache, range(4), ticket=ticket),
        ]:
            with pytest.raises(kvxfer.TicketError, match=words):
                call()
    assert sides.prefill.stats.offers == 1
    offer.release()
