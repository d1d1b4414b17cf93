"""What the decode side makes of the kv_transfer_params of a new request."""

from __future__ import annotations

import dataclasses
import ipaddress
from collections.abc import Mapping, Sequence
from typing import Any

from kvxfer.errors import TicketError
from kvxfer.ticket import ParsedTicket, parse_ticket

from . import params as wire
from .compat import difference
from .messages import Ticket
from .tickets import Holders, from_template

Refusal = tuple[str, str]
"""Reason and message."""


@dataclasses.dataclass
class Plan:
    """What the decode side intends with one request's remote prefill."""

    remote: wire.Remote | None
    refused: Refusal | None
    tickets: Mapping[str, Ticket] = dataclasses.field(default_factory=dict)
    """By cache, checked: what can be fetched, renewed and declined. Empty where it is not ours."""
    local: int = 0
    """Tokens that the local prefix cache has."""

    @property
    def offer(self) -> str | None:
        """Names what may be fetched or declined, None if nothing may."""
        return self.remote.offer if self.remote is not None and self.tickets else None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Planner:
    """Judges kv_transfer_params by what this engine is."""

    fields: Mapping[str, str]
    ignored: Sequence[str]
    holders: Mapping[str, Holders]
    block_sizes: Mapping[str, int]
    """By cache."""
    tp_size: int
    pp_size: int
    prefix_caching: bool
    model: str
    secret: str | None
    anywhere: bool
    """Whether agents beyond loopback may be asked although there is no secret."""

    def plan(self, request: Any, params: wire.Params) -> Plan:  # noqa: ANN401 - vllm's Request
        """Never raises, whatever the params hold."""
        try:
            remote = wire.parse(params)
        except wire.ParamsError as error:
            return Plan(None, ("params", str(error)))
        differs = self._difference(remote)
        if request.prompt_token_ids is None:
            why = "prompts of embeddings cannot be told apart, so none is loaded"
            return Plan(remote, differs or ("mismatch", why))
        if remote.transfer is not None:
            name = wire.transfer_name(remote.transfer, request, request.num_prompt_tokens - 1)
            remote = dataclasses.replace(remote, transfer=name, request=name)
        try:
            tickets = dict(remote.tickets or self._tickets_of_transfer(remote, request))
            parsed = [parse_ticket(ticket, self.secret) for ticket in tickets.values()]
        except TicketError as error:
            return Plan(remote, differs or ("ticket", str(error)))
        if refused := self._refusal(request, remote, parsed):
            return Plan(remote, differs or refused)
        return Plan(remote, differs, tickets)

    def _difference(self, remote: wire.Remote) -> Refusal | None:
        """Return why what is on offer does not fit this engine, if it does not."""
        if differs := difference(self.fields, remote.fields, self.ignored):
            return "mismatch", f"prefill engine {remote.engine} does not match this one: {differs}"
        for key, theirs in remote.block_sizes.items():
            ours = self.block_sizes.get(key, theirs)
            windowed = self.fields.get(f"{key} window", "none") != "none"
            if windowed and self.prefix_caching and theirs % ours:
                return "mismatch", (
                    f"prefill engine {remote.engine} offers windows from its blocks of {theirs} "
                    f"tokens on, which cannot fill this engine's first block of {ours}, and the "
                    f"prefix cache needs it whole (cache {key}): use equal block sizes"
                )
        return None

    def _refusal(
        self,
        request: Any,  # noqa: ANN401
        remote: wire.Remote,
        tickets: Sequence[ParsedTicket],
    ) -> Refusal | None:
        """Return why this engine must not even decline what is on offer, if so."""
        if self.pp_size > 1:
            return "mismatch", (
                f"this decode engine has {self.pp_size} pipeline stages: only prefill engines may "
                "have more than one"
            )
        if remote.decode_tp_size != self.tp_size:
            return "mismatch", (
                f"prefill engine {remote.engine} serves decode engines of {remote.decode_tp_size} "
                f"tensor parallel ranks, this one has {self.tp_size}: set decode_tp_size there"
            )
        count = remote.num_tokens
        if count is not None and (
            count > request.num_prompt_tokens or wire.prompt_digest(request, count) != remote.digest
        ):
            return "mismatch", (
                f"the {count} tokens that prefill engine {remote.engine} computed as "
                f"{remote.request} are not the first of this prompt of "
                f"{request.num_prompt_tokens}: the proxy mixed up two requests, or the engines "
                "tokenize differently"
            )
        if self.secret is None and not self.anywhere:
            for agent in (agent for ticket in tickets for agent in ticket.agents):
                if not _is_loopback(agent.address):
                    return "ticket", (
                        f"agent {agent.name!r} is said to be at {agent.address!r}: without a "
                        "shared secret anybody can write that, so only loopback addresses are "
                        "asked; set KVXFER_SECRET on both sides"
                    )
        return None

    def _tickets_of_transfer(
        self,
        remote: wire.Remote,
        request: Any,  # noqa: ANN401
    ) -> dict[str, Ticket]:
        """Make the tickets that the prefill side makes too, for a transfer that the proxy named."""
        assert remote.transfer is not None
        found = {}
        for key, holders in self.holders.items():
            if key in remote.agents:
                size = 1 if holders.unit == 1 else self.block_sizes[key]
                found[key] = from_template(
                    remote.agents[key],
                    f"{remote.transfer}/{key}",
                    wire.transfer_generation(remote.transfer, key, self.secret),
                    -(-request.num_prompt_tokens // size),
                    self.model,
                    self.secret,
                )
        return found


def _is_loopback(address: str) -> bool:
    """Judge "host:port", and "loopback:...", which never leaves this process."""
    if address.startswith("loopback:"):
        return True
    host = address.rpartition(":")[0].strip("[]")
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
