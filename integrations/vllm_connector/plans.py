"""What the decode side makes of the kv_transfer_params of a new request."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvxfer.errors import InvalidError
from kvxfer.ticket import parse_ticket

from . import params as wire
from .compat import difference
from .messages import CacheInfo, Part, Refusal, Ticket
from .waits import Wait


@dataclass
class Plan:
    """What the decode side intends with one request's remote prefill."""

    end: int
    """Load up to this token. The last of the prompt is computed here, to sample the next."""
    peer: str = "an unknown engine"
    name: str | None = None
    """Of the transfer; None where nothing may be fetched or declined."""
    tickets: Mapping[str, Ticket] = field(default_factory=dict)
    """By cache, checked: what can be fetched, renewed and declined."""
    lease: float = 0.0
    """Seconds."""
    refused: Refusal | None = None
    local: int = 0
    """Tokens that the local prefix cache has."""
    wait: Wait = field(default_factory=Wait)
    """To be scheduled."""


@dataclass(frozen=True, kw_only=True)
class Planner:
    """Judges kv_transfer_params by what this engine is."""

    fields: Mapping[str, str]
    ignored: Sequence[str]
    caches: Mapping[str, CacheInfo]
    sizes: Sequence[int]
    """Tokens of a block, by group."""
    prefix_caching: bool
    secret: str | None
    anywhere: bool
    """Whether agents beyond loopback may be asked although there is no secret."""

    def plan(self, request: Any, params: wire.Params) -> Plan:
        """Never raises, whatever the params hold."""
        plan = Plan(end=request.num_prompt_tokens - 1)
        try:
            remote = wire.parse(params, request, self.secret)
            plan.peer, plan.lease = remote.engine, remote.lease
            plan.end = min(plan.end, remote.tokens)
            self._check_prompt(remote, request)
            plan.tickets = self._tickets(remote)
            plan.name = remote.name
            self._check_engine(remote)
        except InvalidError as error:
            plan.refused = getattr(error, "reason", "ticket"), str(error)
        return plan

    def parts(self, plan: Plan, blocks: Any, end: int) -> list[Part]:
        """Return what to fetch into the blocks that were allocated, up to token `end`.

        Nothing of a cache whose windows need nothing of it; and nothing at all, and the plan says
        why, if what is needed is not on offer.
        """
        parts = []
        for key, info in self.caches.items() if plan.refused is None else ():
            size, ticket = self.sizes[info.group], plan.tickets[key]
            ids = [0 if block.is_null else block.block_id for block in blocks[info.group]]
            begin = plan.local
            while begin < end and not ids[begin // size]:
                begin = (begin // size + 1) * size  # out of the window
            last = -(-end // size)
            first, stop = (begin, end) if info.unit == 1 else (begin // size, last)
            there = parse_ticket(ticket, self.secret).first_token
            if there > first:
                needed = max(0, end - info.window + 1) if info.window else 0
                if self.prefix_caching:
                    needed -= needed % size  # that block is kept, and given as whole
                if there > needed // info.unit:
                    plan.refused = (
                        "mismatch",
                        f"cache {key} is on offer from {there} (units of {info.unit} tokens), "
                        f"needed from token {needed}, where a block of the prefix cache begins: "
                        "use equal block sizes",
                    )
                    return []
                first = there
            if first < stop:
                held = ids[first // (size // info.unit) : last]
                parts.append(Part(key, ticket, held, first, stop))
        return parts

    def _check_prompt(self, remote: wire.Remote, request: Any) -> None:
        if remote.digest is None or (
            remote.tokens <= request.num_prompt_tokens
            and wire.prompt_digest(request, remote.tokens) == remote.digest
        ):
            return
        raise wire.RefusedError(
            "mismatch",
            f"the {remote.tokens} tokens that prefill engine {remote.engine} computed for "
            f"{remote.name} are not the first of this prompt of {request.num_prompt_tokens}: the "
            "proxy mixed up two requests, or the engines tokenize differently",
        )

    def _tickets(self, remote: wire.Remote) -> dict[str, Ticket]:
        tickets = {}
        for key, info in self.caches.items():
            if key in remote.agents:
                first, end = remote.first.get(key, 0), -(-remote.tokens // info.unit)
                agents = remote.agents[key]
                ticket = wire.ticket_of(agents, remote.name, key, first, end, self.secret)
                self._check_addresses(ticket)
                tickets[key] = ticket
        return tickets

    def _check_addresses(self, ticket: Ticket) -> None:
        if self.secret is not None or self.anywhere:
            return
        for agent in parse_ticket(ticket, self.secret).agents:
            if not _is_loopback(agent.address):
                raise wire.RefusedError(
                    "ticket",
                    f"agent {agent.name!r} is said to be at {agent.address!r}: without a shared "
                    "secret anybody can write that, so only loopback addresses are asked; set "
                    "KVXFER_SECRET on both sides",
                )

    def _check_engine(self, remote: wire.Remote) -> None:
        differs = difference(self.fields, remote.fields, self.ignored)
        if missing := ", ".join(self.caches.keys() - remote.agents.keys()):
            differs = f"it offers no cache {missing}" if differs is None else differs
        if differs is not None:
            raise wire.RefusedError(
                "mismatch",
                f"prefill engine {remote.engine} does not match this one: {differs}",
            )


def _is_loopback(address: str) -> bool:
    """Judge "host:port", and "loopback:...", which never leaves this process."""
    if address.startswith("loopback:"):
        return True
    host = address.rpartition(":")[0].strip("[]")
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
