"""Which agent of a ticket answers which part of a fetch."""

from __future__ import annotations

from collections.abc import Sequence

from kvxfer.errors import TicketError
from kvxfer.ticket import AgentRef

Part = tuple[int, list[int], int, int]
"""Agent (index in the ticket), layers (indices in the cache), heads begin and end (global)."""


def _holders(
    agents: Sequence[AgentRef], layer: str, head: int, head_end: int
) -> list[tuple[int, int]]:
    """Return (agent, end of what it holds) of all that hold `head` of `layer`."""
    held = []
    for index, agent in enumerate(agents):
        if agent.layers is not None and layer not in agent.layers:
            continue
        begin, end = agent.heads if agent.heads is not None else (0, head_end)
        if begin <= head < end:
            held.append((index, min(end, head_end)))
    return held


def cover(
    agents: Sequence[AgentRef], layers: Sequence[str], heads: tuple[int, int], spread: int = 0
) -> list[Part]:
    """Split a cache's layers and heads over the agents of a ticket.

    Where several agents hold the same slice (kv heads replicated over ranks) `spread` picks one, so
    that consumers of different `spread` load different ones.

    Raises
    ------
    TicketError
        A layer or head that nobody holds.
    """
    parts: dict[tuple[int, int, int], list[int]] = {}
    for index, layer in enumerate(layers):
        head = heads[0]
        while head < heads[1]:
            holders = _holders(agents, layer, head, heads[1])
            if not holders:
                raise TicketError(
                    f"no agent of the ticket holds head {head} of layer {layer!r}; wanted are "
                    f"heads [{heads[0]}, {heads[1]}), the ticket names "
                    + "; ".join(f"{a.name}: heads {a.heads or 'all'}" for a in agents)
                )
            furthest = max(end for _, end in holders)
            best = [agent for agent, end in holders if end == furthest]
            agent = best[spread % len(best)]
            parts.setdefault((agent, head, furthest), []).append(index)
            head = furthest
    return [(agent, held, begin, end) for (agent, begin, end), held in parts.items()]
