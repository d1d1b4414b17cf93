"""Which agent of a ticket answers which part of a fetch."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvxfer
from kvxfer.cover import Ranks, cover
from kvxfer.ticket import ParsedTicket

LAYERS = ("a", "b", "c", "d")


def agent(
    name: str, layers: tuple[str, ...] | None = None, heads: tuple[int, int] | None = None
) -> kvxfer.AgentRef:
    return kvxfer.AgentRef(name=name, address="h:1", layers=layers, heads=heads)


def test_one_agent_that_holds_all() -> None:
    assert cover([agent("p")], LAYERS, (2, 6)) == [(0, [0, 1, 2, 3], 2, 6)]


def test_pipeline_stages() -> None:
    stages = [agent("p0", ("a", "b")), agent("p1", ("c", "d"))]
    assert cover(stages, LAYERS, (0, 8)) == [(0, [0, 1], 0, 8), (1, [2, 3], 0, 8)]


def test_ranks_of_another_degree() -> None:
    ranks = [agent(f"p{rank}", heads=(2 * rank, 2 * rank + 2)) for rank in range(4)]
    assert cover(ranks, ("a",), (2, 6)) == [(1, [0], 2, 4), (2, [0], 4, 6)]
    assert cover(ranks, ("a",), (3, 5)) == [(1, [0], 3, 4), (2, [0], 4, 5)]


@pytest.mark.parametrize("spread", range(4))
def test_replicas_share_the_work(spread: int) -> None:
    ranks = [agent("p0", heads=(0, 4)), agent("p1", heads=(0, 4)), agent("p2", heads=(4, 8))]
    parts = cover(ranks, ("a",), (0, 8), spread)
    assert parts == [(spread % 2, [0], 0, 4), (2, [0], 4, 8)]


def test_what_nobody_holds() -> None:
    ranks = [agent("p0", heads=(0, 4)), agent("p1", heads=(5, 8))]
    with pytest.raises(kvxfer.TicketError, match=r"head 4 of layer 'a'.*p0: heads \(0, 4\)"):
        cover(ranks, ("a",), (0, 8))
    with pytest.raises(kvxfer.TicketError, match="head 0 of layer 'd'.*p0: heads all"):
        cover([agent("p0", ("a", "b", "c"))], LAYERS, (0, 2))


@st.composite
def tickets(draw: st.DrawFn) -> list[kvxfer.AgentRef]:
    drawn = []
    for index in range(draw(st.integers(1, 5))):
        layers = draw(st.none() | st.sets(st.sampled_from(LAYERS)).map(tuple))
        begin = draw(st.integers(0, 6))
        heads = draw(st.none() | st.integers(begin, 8).map(lambda end, b=begin: (b, end)))
        drawn.append(agent(f"p{index}", layers, heads))
    return drawn


@given(tickets(), st.integers(0, 5), st.integers(1, 4), st.integers(0, 10))
def test_every_head_of_every_layer_comes_from_one_that_holds_it(
    agents: list[kvxfer.AgentRef], begin: int, count: int, spread: int
) -> None:
    wanted = {(layer, head) for layer in LAYERS for head in range(begin, begin + count)}

    def holds(ref: kvxfer.AgentRef, layer: str, head: int) -> bool:
        in_heads = ref.heads is None or ref.heads[0] <= head < ref.heads[1]
        return in_heads and (ref.layers is None or layer in ref.layers)

    reachable = all(any(holds(ref, *place) for ref in agents) for place in wanted)
    try:
        parts = cover(agents, LAYERS, (begin, begin + count), spread)
    except kvxfer.TicketError:
        assert not reachable
        return
    assert reachable
    covered = [
        (index, LAYERS[layer], head)
        for index, layers, low, high in parts
        for layer in layers
        for head in range(low, high)
    ]
    assert all(holds(agents[index], layer, head) for index, layer, head in covered)
    assert sorted((layer, head) for _, layer, head in covered) == sorted(wanted)


def parsed(*agents: kvxfer.AgentRef, generation: bytes = bytes(16)) -> ParsedTicket:
    return ParsedTicket("r", generation, 0, 1, "", agents)


def shares(
    ticket: ParsedTicket, heads: list[tuple[int, int]], layers: tuple[str, ...] = ("a",)
) -> list[tuple[list[int], dict[int, int]]]:
    """By rank: the agents that it fetches from, and what it tells each."""
    found = []
    for own in range(len(heads)):
        parts, count = Ranks(own, heads).share(ticket, layers, heads[own])
        mine = sorted({index for index, *_ in parts})
        found.append((mine, {index: count[index] for index in mine}))
    return found


def test_ranks_of_a_higher_degree_share_agents() -> None:
    ticket = parsed(agent("p0", heads=(0, 4)), agent("p1", heads=(4, 8)))
    heads = [(0, 2), (2, 4), (4, 6), (6, 8)]
    assert shares(ticket, heads) == [([0], {0: 2}), ([0], {0: 2}), ([1], {1: 2}), ([1], {1: 2})]


def test_ranks_of_a_lower_degree_are_alone() -> None:
    ticket = parsed(*(agent(f"p{i}", heads=(2 * i, 2 * i + 2)) for i in range(4)))
    assert shares(ticket, [(0, 4), (4, 8)]) == [([0, 1], {0: 1, 1: 1}), ([2, 3], {2: 1, 3: 1})]


def test_ranks_of_pipeline_stages() -> None:
    ticket = parsed(agent("p0", ("a", "b")), agent("p1", ("c", "d")))
    ranks = [Ranks(own, [(0, 4)] * 2, [("a", "b", "c"), ("d",)]) for own in range(2)]
    assert ranks[0].share(ticket, ("a", "b", "c"), (0, 4))[1] == {0: 1, 1: 2}
    assert ranks[1].share(ticket, ("d",), (0, 4))[0] == [(1, [0], 0, 4)]


@given(
    degree=st.integers(1, 6),
    replicas=st.integers(1, 5),
    holders=st.sampled_from([1, 2, 4]),
    copies=st.integers(1, 3),
    generation=st.binary(min_size=16, max_size=16),
)
def test_ranks_agree_on_who_fetches_from_whom(
    degree: int, replicas: int, holders: int, copies: int, generation: bytes
) -> None:
    each = 12 // holders
    agents = [
        agent(f"p{i}.{copy}", heads=(i * each, (i + 1) * each))
        for i in range(holders)
        for copy in range(replicas)
    ]
    ticket = parsed(*agents, generation=generation)
    heads = [
        (i * 12 // degree, (i + 1) * 12 // degree) for i in range(degree) for _ in range(copies)
    ]
    found = shares(ticket, heads, LAYERS)
    for index in range(len(agents)):
        asked = sum(index in mine for mine, _ in found)
        assert {told[index] for mine, told in found if index in mine} <= {asked}


def test_an_agent_that_a_ticket_names_twice_is_one() -> None:
    ticket = parsed(agent("p", ("a",)), agent("p", ("b",)))
    ranks = [Ranks(own, [(0, 4)] * 2, [("a",), ("b",)]) for own in range(2)]
    for own, layers in enumerate([("a",), ("b",)]):
        parts, count = ranks[own].share(ticket, layers, (0, 4))
        assert [count[index] for index, *_ in parts] == [2]


def test_ranks_spread_tickets_over_replicas() -> None:
    agents = [agent(f"p{i}") for i in range(4)]
    chosen = set()
    for number in range(8):
        ticket = parsed(*agents, generation=number.to_bytes(8, "big") + bytes(8))
        ((mine, _),) = shares(ticket, [(0, 4)])
        chosen.update(mine)
    assert chosen == {0, 1, 2, 3}


def test_senseless_ranks() -> None:
    for own in (-1, 2):
        with pytest.raises(kvxfer.InvalidError, match="heads of 2 ranks"):
            Ranks(own, [(0, 2), (2, 4)])
    with pytest.raises(kvxfer.InvalidError, match="layers of 1 ranks"):
        Ranks(0, [(0, 2), (2, 4)], [("a",)])
    ticket = parsed(agent("p"))
    with pytest.raises(kvxfer.InvalidError, match="rank 0"):
        Ranks(0, [(0, 2), (2, 4)]).share(ticket, ("a",), (2, 4))
    with pytest.raises(kvxfer.InvalidError, match="rank 1"):
        Ranks(1, [(0, 2), (2, 4)], [("a",), ("b",)]).share(ticket, ("a",), (2, 4))
