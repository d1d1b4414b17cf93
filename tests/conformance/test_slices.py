"""Tickets that name several agents, several consumers of one offer, layers that follow later."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import random

import pytest
from kvtest.agents import LONG, consumer, producer
from kvtest.caches import Geometry, Paged

import kvxfer

SIDE = Geometry(layers=tuple(f"layer.{index}" for index in range(4)), heads=(0, 4), num_blocks=12)
BLOCKS = [7, 2, 9, 0]
TOKENS = 55  # the last block is partly filled
OTHER = dataclasses.replace(SIDE, axes="BNHC", block_size=8, num_blocks=24)
OTHER_BLOCKS = [20, 3, 5, 17, 0, 9, 8]


def expected(target: Geometry, *sources: Paged) -> Paged:
    made = Paged(target)
    made.deliver(sources, BLOCKS, OTHER_BLOCKS, (0, TOKENS))
    return made


def slice_of(side: Geometry, **changes: object) -> Geometry:
    return dataclasses.replace(side, **changes)


def test_several_consumers_of_one_offer(agents: tuple[kvxfer.Agent, kvxfer.Agent]) -> None:
    prefill, decode = agents
    source = Paged(SIDE, seed=1)
    targets = [Paged(OTHER) for _ in range(3)]
    prefill.register(source.cache)
    offer = prefill.offer(source.cache, BLOCKS, TOKENS, consumers=3)
    for index, target in enumerate(targets):
        assert not offer.released
        decode.register(target.cache)
        decode.fetch(offer.ticket, target.cache, OTHER_BLOCKS).wait(LONG)
        assert target.same_as(expected(OTHER, source)), f"consumer {index}"
    assert offer.wait(LONG) is kvxfer.Status.OK


def test_each_rank_of_the_consumer_takes_its_heads(
    agents: tuple[kvxfer.Agent, kvxfer.Agent],
) -> None:
    prefill, decode = agents
    source = Paged(SIDE, seed=2)
    targets = [Paged(slice_of(OTHER, heads=heads)) for heads in [(0, 2), (2, 4)]]
    prefill.register(source.cache)
    offer = prefill.offer(source.cache, BLOCKS, TOKENS, consumers=len(targets))
    fetches = []
    for target in targets:
        decode.register(target.cache)
        fetches.append(decode.fetch(offer.ticket, target.cache, OTHER_BLOCKS))
    for fetch, target in zip(fetches, targets, strict=True):
        fetch.wait(LONG)
        assert target.same_as(expected(target.geometry, source))
    assert offer.wait(LONG) is kvxfer.Status.OK


@pytest.mark.parametrize("early", [False, True], ids=["offers-first", "fetch-first"])
@pytest.mark.parametrize(
    "cuts",
    [
        [((0, 1), (0, 4)), ((2, 3), (0, 4))],
        [((0, 1, 2, 3), (0, 2)), ((0, 1, 2, 3), (2, 4))],
        [((0, 1), (0, 1)), ((0, 1), (1, 4)), ((2, 3), (0, 3)), ((2, 3), (3, 4))],
        [((0, 1, 2, 3), (0, 2)), ((0, 1, 2, 3), (0, 2)), ((0, 1, 2, 3), (2, 4))],
    ],
    ids=["pipeline-stages", "tensor-parallel", "both", "replicated-heads"],
)
def test_a_ticket_that_names_several_agents(
    transport: str, cuts: list[tuple[tuple[int, ...], tuple[int, int]]], early: bool
) -> None:
    with contextlib.ExitStack() as stack:
        sources, ranks = [], []
        for number, (layers, heads) in enumerate(cuts):
            held = slice_of(SIDE, layers=tuple(SIDE.layers[i] for i in layers), heads=heads)
            # Seeded by what it holds, so that replicas hold the same.
            sources.append(Paged(held, seed=heads[0]))
            ranks.append(stack.enter_context(producer(transport, f"rank-{number}")))
        ticket = kvxfer.issue_ticket(
            "request",
            [
                rank.reference(layers=source.geometry.layers, heads=source.geometry.heads)
                for rank, source in zip(ranks, sources, strict=True)
            ],
            num_tokens=TOKENS,
        )
        target = Paged(OTHER)
        decode = stack.enter_context(consumer(transport))
        decode.register(target.cache)

        def offer_all() -> list[kvxfer.Offer]:
            offers = []
            for rank, source in zip(ranks, sources, strict=True):
                rank.register(source.cache)
                offers.append(rank.offer(source.cache, BLOCKS, ticket=ticket))
            return offers

        offers = [] if early else offer_all()
        fetch = decode.fetch(json.loads(json.dumps(ticket)), target.cache, OTHER_BLOCKS)
        offers = offers or offer_all()
        fetch.wait(LONG)
        assert target.same_as(expected(OTHER, *sources))
        # All agents but the replicas that were not asked have done their duty.
        asked = set(fetch.report.peers)
        for rank, offer in zip(ranks, offers, strict=True):
            if rank.name in asked:
                assert offer.wait(LONG) is kvxfer.Status.OK
        assert len(asked) == len({(s.geometry.layers, s.geometry.heads) for s in sources})


def test_consumers_of_replicated_heads_spread_over_the_ranks(transport: str) -> None:
    """Names that hash differently ask different replicas."""
    with contextlib.ExitStack() as stack:
        ranks = [stack.enter_context(producer(transport, f"rank-{i}")) for i in range(2)]
        source = Paged(SIDE, seed=3)
        ticket = kvxfer.issue_ticket(
            "request", [rank.reference() for rank in ranks], num_tokens=TOKENS
        )
        for rank in ranks:
            rank.register(source.cache)
            rank.offer(source.cache, BLOCKS, ticket=ticket, consumers=8)
        asked = set()
        for number in range(4):
            decode = stack.enter_context(consumer(transport, f"decode-{number}"))
            target = Paged(OTHER)
            decode.register(target.cache)
            fetch = decode.fetch(ticket, target.cache, OTHER_BLOCKS)
            fetch.wait(LONG)
            asked.update(fetch.report.peers)
            assert target.same_as(expected(OTHER, source))
        assert asked == {"rank-0", "rank-1"}


@pytest.mark.parametrize("before", range(5))
def test_layers_become_ready_in_any_order(
    agents: tuple[kvxfer.Agent, kvxfer.Agent], before: int
) -> None:
    """The fetch starts when `before` of the layers are ready."""
    prefill, decode = agents
    complete, source, target = Paged(SIDE, seed=4), Paged(SIDE), Paged(OTHER)
    prefill.register(source.cache)
    decode.register(target.cache)
    offer = prefill.offer(source.cache, BLOCKS, TOKENS, ready=False)
    order = random.Random(before).sample(range(4), 4)
    fetch = None
    for step, index in enumerate([*order, None]):
        if step == before:
            fetch = decode.fetch(offer.ticket, target.cache, OTHER_BLOCKS, timeout=LONG)
        if index is None:
            break
        assert fetch is None or not fetch.done
        for array, data in zip(source.arrays[index], complete.arrays[index], strict=True):
            array[...] = data
        offer.mark_ready(index if index % 2 else f"layer.{index}")
        offer.mark_ready(index)  # saying it again changes nothing
    assert fetch is not None
    fetch.wait(LONG)
    assert target.same_as(expected(OTHER, complete))
    assert offer.wait(LONG) is kvxfer.Status.OK


def test_a_layer_arrives_before_the_next_is_ready(
    agents: tuple[kvxfer.Agent, kvxfer.Agent],
) -> None:
    prefill, decode = agents
    complete, source, target = Paged(SIDE, seed=5), Paged(SIDE), Paged(OTHER)
    prefill.register(source.cache)
    decode.register(target.cache)
    offer = prefill.offer(source.cache, BLOCKS, TOKENS, ready=False)
    fetch = decode.fetch(offer.ticket, target.cache, OTHER_BLOCKS, timeout=LONG)
    layer_bytes = 2 * TOKENS * 4 * SIDE.content * 2
    for arrived, index in enumerate([2, 0, 3, 1], start=1):
        for array, data in zip(source.arrays[index], complete.arrays[index], strict=True):
            array[...] = data
        offer.mark_ready(index)
        # Only this layer's own arrival lets the loop go on.
        while fetch.report.bytes < arrived * layer_bytes:
            assert not fetch.done or arrived == 4, fetch.error
            fetch._wait(0.01)
        assert fetch.report.bytes == arrived * layer_bytes
    fetch.wait(LONG)
    assert target.same_as(expected(OTHER, complete))


def test_mark_all_ready(agents: tuple[kvxfer.Agent, kvxfer.Agent]) -> None:
    prefill, decode = agents
    source, target = Paged(SIDE, seed=6), Paged(OTHER)
    prefill.register(source.cache)
    decode.register(target.cache)
    offer = prefill.offer(source.cache, BLOCKS, TOKENS, ready=False)
    fetch = decode.fetch(offer.ticket, target.cache, OTHER_BLOCKS, timeout=LONG)
    offer.mark_ready(1)
    offer.mark_all_ready()
    fetch.wait(LONG)
    assert target.same_as(expected(OTHER, source))


def test_pieces_of_a_request_fetched_one_after_the_other(
    agents: tuple[kvxfer.Agent, kvxfer.Agent],
) -> None:
    """A prefix that is here already is not fetched again; pieces may start inside a block."""
    prefill, decode = agents
    source, target = Paged(SIDE, seed=7), Paged(OTHER)
    prefill.register(source.cache)
    decode.register(target.cache)
    cuts = [0, 8, 21, 40, TOKENS]
    offer = prefill.offer(source.cache, BLOCKS, TOKENS, consumers=len(cuts) - 1)
    for begin, end in itertools.pairwise(cuts):
        blocks = OTHER_BLOCKS[begin // OTHER.block_size :]
        decode.fetch(offer.ticket, target.cache, blocks, tokens=slice(begin, end)).wait(LONG)
    assert offer.wait(LONG) is kvxfer.Status.OK
    assert target.same_as(expected(OTHER, source))


def test_one_agent_that_answers_two_parts(transport: str) -> None:
    """Where ranks overlap unevenly, one of them serves two slices: its offer counts them as one."""
    cuts = [(("a", "b"), (1, 4)), (("a",), (0, 1)), (("b",), (0, 2))]
    with contextlib.ExitStack() as stack:
        target = Paged(slice_of(OTHER, layers=("a", "b")))
        decode = stack.enter_context(consumer(transport))
        decode.register(target.cache)
        held = [slice_of(SIDE, layers=layers, heads=heads) for layers, heads in cuts]
        sources = [Paged(geometry, seed=9) for geometry in held]
        ranks = [stack.enter_context(producer(transport, f"rank-{i}")) for i in range(3)]
        ticket = kvxfer.issue_ticket(
            "request",
            [
                rank.reference(layers=layers, heads=heads)
                for rank, (layers, heads) in zip(ranks, cuts, strict=True)
            ],
            num_tokens=TOKENS,
        )
        offers = []
        for rank, source in zip(ranks, sources, strict=True):
            rank.register(source.cache)
            offers.append(rank.offer(source.cache, BLOCKS, ticket=ticket, consumers=2))
        fetch = decode.fetch(ticket, target.cache, OTHER_BLOCKS)
        fetch.wait(LONG)
        assert set(fetch.report.peers) == {"rank-0", "rank-1", "rank-2"}
        # Rank 1 holds head 0 of layer a, rank 2 heads 0 and 1 of layer b, rank 0 the rest.
        want = Paged(target.geometry)
        for source, layers, heads in [
            (sources[1], ("a",), (0, 1)),
            (sources[0], ("a",), (1, 4)),
            (sources[2], ("b",), (0, 2)),
            (sources[0], ("b",), (2, 4)),
        ]:
            part = Paged(slice_of(OTHER, layers=layers, heads=heads))
            part.deliver([source], BLOCKS, OTHER_BLOCKS, (0, TOKENS))
            for layer, plane, head in itertools.product(layers, SIDE.planes, range(*heads)):
                want.head(layer, plane, head)[...] = part.head(layer, plane, head)
        assert target.same_as(want)
        assert not any(offer.released for offer in offers)
        decode.fetch(ticket, target.cache, OTHER_BLOCKS).wait(LONG)
        assert [offer.wait(LONG) for offer in offers] == [kvxfer.Status.OK] * 3
