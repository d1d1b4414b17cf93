"""Tickets: what identifies an offer to a consumer.

A ticket is a plain dict that survives JSON, so that engines can put it into a request. It names the
offer, its unguessable generation, the tokens, and the agents that hold it with the slice of each.
It is signed: with the shared secret where there is one (HMAC-SHA256), else with a bare SHA-256,
which finds damage but no forgery; the generation is checked again at every fetch.
"""

from __future__ import annotations

import dataclasses
import hashlib
import hmac
import json
import secrets
from collections.abc import Iterable, Sequence
from operator import index
from typing import Any

from kvxfer.errors import TicketError

Ticket = dict[str, Any]

VERSION = 1
_MAX_TOKEN = (1 << 32) - 1
_GENERATION_BYTES = 16


@dataclasses.dataclass(frozen=True, kw_only=True)
class AgentRef:
    """An agent that holds (a slice of) an offer.

    Parameters
    ----------
    name, address
        As in `Agent.name` and `Agent.address`.
    incarnation
        `Agent.incarnation`; None where whoever issues the ticket cannot know it. The generation
        still keeps stale tickets from being served.
    layers
        Names of the layers it holds (a pipeline stage); None for all.
    heads
        Global kv heads ``(begin, end)`` it holds (a tensor-parallel rank); None for all.
    """

    name: str
    address: str
    incarnation: int | None = None
    layers: tuple[str, ...] | None = None
    heads: tuple[int, int] | None = None


@dataclasses.dataclass(frozen=True)
class ParsedTicket:
    """A ticket that was checked."""

    offer_id: str
    generation: bytes
    first_token: int
    num_tokens: int
    model: str
    agents: tuple[AgentRef, ...]


def new_generation() -> bytes:
    """Return 16 unguessable bytes."""
    return secrets.token_bytes(_GENERATION_BYTES)


def _signature(body: Ticket, secret: str | None) -> str:
    payload = {key: value for key, value in body.items() if key != "signature"}
    raw = json.dumps(payload, sort_keys=True, separators=(",", ":")).encode()
    if secret is None:
        return "sha256:" + hashlib.sha256(raw).hexdigest()
    return "hmac-sha256:" + hmac.new(secret.encode(), raw, "sha256").hexdigest()


def issue_ticket(
    offer_id: str,
    agents: Sequence[AgentRef],
    *,
    num_tokens: int,
    first_token: int = 0,
    generation: bytes | None = None,
    model: str = "",
    secret: str | None = None,
) -> Ticket:
    """Make a ticket, also for offers that other processes will make of it.

    An engine's scheduler issues the ticket and its workers, one for each rank, call
    ``agent.offer(..., ticket=ticket)``. A fetch that comes before the offer waits for it.

    Parameters
    ----------
    offer_id
        Any text, unique among the open offers of each agent; a request id.
    agents
        Who holds the KV.
    num_tokens, first_token
        The offer covers tokens ``[first_token, first_token + num_tokens)`` of the request.
    generation
        16 unguessable bytes; drawn when left out.
    model
        Checked against the consumer's cache where both name one.
    secret
        The agents' shared secret, if they have one.
    """
    # NumPy's integers are as good as others, but JSON cannot carry them; 1.5 is none.
    num_tokens, first_token = index(num_tokens), index(first_token)
    if not offer_id or num_tokens < 1 or first_token < 0 or not agents:
        raise TicketError("a ticket needs an offer id, at least one token and at least one agent")
    if first_token + num_tokens > _MAX_TOKEN:
        raise TicketError(f"tokens [{first_token}, {first_token + num_tokens}) go beyond 2^32")
    for agent in agents:
        if isinstance(agent.layers, str):
            raise TicketError(f"layers={agent.layers!r:.80} is a name, not names")
        _names((offer_id, model, agent.name, agent.address, *(agent.layers or ())))
    if generation is not None and len(generation) != _GENERATION_BYTES:
        raise TicketError(f"a generation has 16 bytes, not {len(generation)}")
    body: Ticket = {
        "kvxfer": VERSION,
        "offer": offer_id,
        "generation": (generation or new_generation()).hex(),
        "tokens": [first_token, num_tokens],
        "model": model,
        "agents": [
            {
                "name": agent.name,
                "address": agent.address,
                "incarnation": None if agent.incarnation is None else f"{agent.incarnation:016x}",
                "layers": None if agent.layers is None else list(agent.layers),
                "heads": None if agent.heads is None else [index(head) for head in agent.heads],
            }
            for agent in agents
        ],
    }
    body["signature"] = _signature(body, secret)
    return body


def parse_ticket(ticket: object, secret: str | None) -> ParsedTicket:
    """Check a ticket and take it apart.

    Raises
    ------
    TicketError
        Not a ticket, of another version, damaged, or not signed with our secret.
    """
    if not isinstance(ticket, dict) or "kvxfer" not in ticket:
        raise TicketError(f"not a kvxfer ticket: {ticket!r:.80}")
    if ticket["kvxfer"] != VERSION:
        raise TicketError(
            f"ticket has version {ticket['kvxfer']!r}, this side reads {VERSION}: "
            "install the same kvxfer release on both sides"
        )
    signature = ticket.get("signature")
    try:
        expected = _signature(ticket, secret)
    except (TypeError, ValueError, RecursionError):
        raise TicketError("ticket holds values that JSON cannot carry") from None
    if not isinstance(signature, str) or not hmac.compare_digest(
        signature.encode(errors="replace"), expected.encode()
    ):
        scheme = signature.split(":")[0] if isinstance(signature, str) else "none"
        raise TicketError(
            f"ticket for offer {ticket.get('offer')!r} has a signature ({scheme}) that does not "
            f"fit (expected {expected.split(':')[0]}): it was changed on its way, or the two sides "
            "have different secrets (KVXFER_SECRET)"
        )
    try:
        return _take_apart(ticket)
    except (LookupError, TypeError, ValueError, OverflowError) as error:
        raise TicketError(f"ticket is signed but malformed: {error!r}") from error


def _names(values: Iterable[object]) -> None:
    for value in values:
        if not isinstance(value, str):
            raise TicketError(f"{value!r:.80} is no text, as names in a ticket are")


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r:.80} is no text")
    return value


def _layers(value: object) -> tuple[str, ...] | None:
    if value is None:
        return None
    if not isinstance(value, list):
        raise TypeError(f"{value!r:.80} is no list of layers")
    return tuple(_text(layer) for layer in value)


def _incarnation(value: object) -> int | None:
    if value is None:
        return None
    number = int(_text(value), 16)
    if not 0 <= number < 1 << 64:
        raise ValueError(f"incarnation {value!r:.80} is no number of 64 bits")
    return number


def _take_apart(ticket: Ticket) -> ParsedTicket:
    json.dumps(ticket, ensure_ascii=False).encode()  # half a surrogate pair is no text
    first_token, num_tokens = (index(value) for value in ticket["tokens"])
    generation = bytes.fromhex(ticket["generation"])
    agents = tuple(
        AgentRef(
            name=_text(agent["name"]),
            address=_text(agent["address"]),
            incarnation=_incarnation(agent["incarnation"]),
            layers=_layers(agent["layers"]),
            heads=None
            if agent["heads"] is None
            else (index(agent["heads"][0]), index(agent["heads"][1])),
        )
        for agent in ticket["agents"]
    )
    tokens_fit = num_tokens >= 1 and first_token >= 0 and first_token + num_tokens <= _MAX_TOKEN
    if len(generation) != _GENERATION_BYTES or not tokens_fit or not agents:
        raise ValueError("generation, tokens or agents out of range")
    return ParsedTicket(
        _text(ticket["offer"]), generation, first_token, num_tokens, _text(ticket["model"]), agents
    )
