"""Which agent of a ticket answers which part of a fetch."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence

from kvxfer.errors import InvalidError, TicketError
from kvxfer.ticket import AgentRef, ParsedTicket

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


@dataclasses.dataclass(frozen=True)
class Ranks:
    """All ranks of a consumer: so many agents that share out each offer among them.

    With them a producer learns how many fetches to expect. All ranks pass the same, but for `own`.
    Agents of a ticket that no rank needs, as where more agents hold the same heads than there are
    ranks to fetch them, hear of nobody: name in tickets only as many as are to be asked.

    Parameters
    ----------
    own
        Which of them the agent is that fetches, from 0.
    heads
        Global kv heads ``(begin, end)`` of each rank's cache: ``[(0, 4), (4, 8)]`` of two, the same
        range several times where heads are replicated.
    layers
        Names of the layers of each rank's cache, for pipeline stages. Left out, all have those of
        the cache that is fetched into.

    Raises
    ------
    InvalidError
        `own` is none of them, or the two lists differ in length.
    """

    own: int
    heads: Sequence[tuple[int, int]]
    layers: Sequence[Sequence[str]] | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.own < len(self.heads):
            raise InvalidError(f"own is {self.own}, there are heads of {len(self.heads)} ranks")
        if self.layers is not None and len(self.layers) != len(self.heads):
            raise InvalidError(
                f"there are layers of {len(self.layers)} ranks and heads of {len(self.heads)}"
            )

    def share(
        self, ticket: ParsedTicket, layers: Sequence[str], heads: tuple[int, int]
    ) -> tuple[list[Part], Counter[int]]:
        """Return the own rank's parts, and how many ranks have parts of each agent.

        Ranks that hold the same heads take turns among agents that do, from a start that differs
        from ticket to ticket.

        Raises
        ------
        InvalidError
            `layers` and `heads`, of the own cache, are others than the own rank's.
        TicketError
            A rank's layers and heads that nobody holds.
        """
        own_layers = layers if self.layers is None else self.layers[self.own]
        if tuple(self.heads[self.own]) != heads or set(own_layers) != set(layers):
            raise InvalidError(
                f"the cache has {len(layers)} layers and heads {heads}, rank {self.own} of `ranks` "
                f"{len(own_layers)} and {self.heads[self.own]}: name the cache's own"
            )
        start = int.from_bytes(ticket.generation[:8], "big")
        own: list[Part] = []
        names = [(agent.name, agent.address) for agent in ticket.agents]  # of which some may repeat
        count: Counter[tuple[str, str]] = Counter()
        for rank, (begin, end) in enumerate(self.heads):
            its_layers = layers if self.layers is None else self.layers[rank]
            parts = cover(ticket.agents, its_layers, (begin, end), start + rank)
            count.update({names[agent] for agent, *_ in parts})
            if rank == self.own:
                own = parts
        return own, Counter({agent: count[name] for agent, name in enumerate(names)})
