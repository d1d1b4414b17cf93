"""Which agent of a ticket answers which part of a fetch."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvxfer
from kvxfer.cover import cover

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
