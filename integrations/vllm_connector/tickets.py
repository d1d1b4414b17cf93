"""Tickets of an engine: which ranks hold which cache, and how a request's blocks map to tokens."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from kvxfer.ticket import AgentRef, issue_ticket, parse_ticket

from .messages import CacheInfo, Handshake, Part, Ticket

TEMPLATE = "template"  # the offer id of tickets that only say where the agents are


@dataclass
class Holders:
    """All ranks' description of one cache."""

    info: CacheInfo
    replicas: dict[tuple[int, tuple[int, int]], list[AgentRef]] = field(default_factory=dict)
    """By pipeline stage and heads: the agents that hold the same."""

    @property
    def unit(self) -> int:
        return self.info.unit

    def choose(self, seed: str) -> list[AgentRef]:
        """Return one agent for each slice; `seed` spreads requests over equal ones."""
        number = zlib.crc32(seed.encode())
        return [agents[number % len(agents)] for agents in self.replicas.values()]


def collect(handshakes: Mapping[tuple[int, int], Handshake]) -> dict[str, Holders]:
    """Merge what the workers, by (pp rank, tp rank), said about their caches."""
    stages = len({stage for stage, _ in handshakes})
    found: dict[str, Holders] = {}
    for (stage, _), handshake in sorted(handshakes.items()):
        for info in handshake.caches:
            holders = found.setdefault(info.key, Holders(info))
            if handshake.address is None:
                continue
            agent = AgentRef(
                name=handshake.name,
                address=handshake.address,
                incarnation=handshake.incarnation,
                layers=info.layers if stages > 1 else None,
                heads=info.heads,
            )
            holders.replicas.setdefault((stage, info.heads), []).append(agent)
    return found


def offered(
    holders: Holders, blocks: Sequence[int], block_size: int, num_tokens: int
) -> tuple[int, int, list[int]]:
    """Return first unit, end unit and blocks that hold tokens up to `num_tokens`.

    Blocks that fell out of a sliding window are 0 at the start of the list.
    """
    blocks = blocks[: -(-num_tokens // block_size)]
    skipped = next((at for at, block in enumerate(blocks) if block), len(blocks))
    if holders.unit == 1:
        return skipped * block_size, num_tokens, list(blocks[skipped:])
    return skipped, len(blocks), list(blocks[skipped:])


def send_part(
    key: str,
    holders: Holders,
    offer: str,
    span: tuple[int, int, list[int]],
    model: str,
    secret: str | None,
    generation: bytes | None = None,
) -> Part:
    """Issue the ticket of one cache for the units ``span`` says."""
    first, end, blocks = span
    ticket = issue_ticket(
        f"{offer}/{key}",
        holders.choose(offer),
        num_tokens=end - first,
        first_token=first,
        generation=generation,
        model=model,
        secret=secret,
    )
    return Part(key, ticket, blocks, first, end)


def templates(holders: Mapping[str, Holders], model: str, secret: str | None) -> dict[str, Ticket]:
    """Return signed tickets that name the agents of each cache, for the concurrent flow."""
    return {
        key: issue_ticket(
            f"{TEMPLATE}/{key}", held.choose(key), num_tokens=1, model=model, secret=secret
        )
        for key, held in holders.items()
        if held.replicas
    }


def from_template(
    template: Ticket, offer: str, generation: bytes, end: int, model: str, secret: str | None
) -> Ticket:
    """Make the ticket that the prefill side makes too, for a transfer that the proxy named."""
    return issue_ticket(
        offer,
        parse_ticket(template, secret).agents,
        num_tokens=end,
        generation=generation,
        model=model,
        secret=secret,
    )
