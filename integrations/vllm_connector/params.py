"""kv_transfer_params: what the two engines tell each other through the proxy.

The keys of vLLM's NIXL connector, so that proxies need not know the difference, and one of ours,
``"kvxfer"``: what holds for all requests of a prefill engine, and in it ``"offer"``, what holds for
one. A *transfer* is one request's KV on its way. Its name makes the tickets of all its caches, on
both sides alike; it is drawn by the prefill side, or follows from what the proxy calls it.
"""

from __future__ import annotations

import array
import hashlib
import hmac
import json
import math
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvxfer.errors import TicketError
from kvxfer.ticket import AgentRef, issue_ticket, parse_ticket

from .messages import Ticket

VERSION = 2
Params = dict[str, Any]


class RefusedError(TicketError):
    """Nothing can be fetched with these kv_transfer_params; the reason is for the metrics."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True, kw_only=True)
class Remote:
    """The prefill side of one request, as the decode side was told."""

    engine: str
    lease: float
    """Seconds."""
    fields: Mapping[str, str]
    agents: Mapping[str, Ticket]
    """By cache: a ticket that says which agents hold it. Not checked yet."""
    name: str
    """Of the transfer."""
    tokens: int
    """How many there are of the prompt."""
    digest: str | None
    """Of these tokens; None in the concurrent flow, where the name says it."""
    first: Mapping[str, int]
    """First unit on offer, by cache, where it is not 0."""


def prompt_digest(request: Any, num_tokens: int) -> str:
    """Identify what the first tokens' KV depends on: tokens, images, adapter."""
    tokens = array.array("q", request.prompt_token_ids[:num_tokens])
    state = hashlib.sha256(tokens.tobytes())
    for feature in getattr(request, "mm_features", None) or ():
        state.update(f"|{feature.identifier}@{feature.mm_position.offset}".encode())
    if request.lora_request is not None:
        state.update(f"|lora {request.lora_request.lora_name}".encode())
    return state.hexdigest()[:32]


def transfer_name(transfer: object, request: Any, num_tokens: int) -> str:
    """Name a transfer for both sides alike, by what the proxy calls it and by the prompt.

    Prompts that share the proxy's name, as those of one API request do, get names of their own.
    """
    digest = prompt_digest(request, num_tokens)
    return hashlib.sha256(f"{digest}/{transfer}".encode(errors="backslashreplace")).hexdigest()[:32]


def seal(offer: Mapping[str, Any], secret: str | None) -> str:
    """Sign what is on offer: who may change it could have one prompt's KV cached as another's."""
    text = json.dumps(offer, sort_keys=True)
    return hmac.digest((secret or "").encode(), f"offer {text}".encode(), "sha256").hex()


def ticket_of(
    agents: Ticket, name: str, key: str, first: int, end: int, secret: str | None
) -> Ticket:
    """Make the ticket of one cache of a transfer, for its units from `first` to `end`.

    Raises
    ------
    TicketError
        `agents` is damaged, or was signed with another secret.
    """
    known = parse_ticket(agents, secret)
    if not all(isinstance(layer, str) for agent in known.agents for layer in agent.layers or ()):
        raise TicketError(f"ticket for offer {known.offer_id!r} has layers that are no names")
    slices: dict[tuple[Any, Any], list[AgentRef]] = {}
    for agent in known.agents:
        slices.setdefault((agent.layers, agent.heads), []).append(agent)
    number = zlib.crc32(name.encode())  # spreads transfers over ranks that hold the same
    return issue_ticket(
        f"{name}/{key}",
        [equal[number % len(equal)] for equal in slices.values()],
        num_tokens=end - first,
        first_token=first,
        generation=hmac.digest((secret or "").encode(), f"{name}/{key}".encode(), "sha256")[:16],
        model=known.model,
        secret=secret,
    )


def parse(params: Mapping[str, Any], request: Any, secret: str | None) -> Remote:
    """Read what came with a request for the decode side, from an engine with the same secret.

    Raises
    ------
    RefusedError
        Nothing can be fetched with it.
    """
    ours = params.get("kvxfer")
    if not isinstance(ours, Mapping):
        raise RefusedError(
            "params",
            "kv_transfer_params asks for a remote prefill, but has no 'kvxfer': the proxy must "
            "hand on what the prefill engine answered, and that must run KvxferConnector too",
        )
    if ours.get("v") != VERSION:
        raise RefusedError(
            "params",
            f"kv_transfer_params is of version {ours.get('v')!r}, this engine reads {VERSION}: "
            "run the same kvxfer release on both sides",
        )
    offer, transfer = ours.get("offer"), params.get("transfer_id")
    if not offer and not transfer:
        raise RefusedError("params", "kv_transfer_params has neither an offer nor a transfer_id")
    if request.prompt_token_ids is None:
        why = "prompts of embeddings cannot be told apart, so none is loaded"
        raise RefusedError("mismatch", why)
    try:
        lease = float(ours["lease"])
        if not (math.isfinite(lease) and lease > 0):
            raise ValueError(f"lease is {lease}")
        if offer:
            name, digest, first = str(offer["name"]), str(offer["digest"]), dict(offer["first"])
            tokens, sealed = int(offer["tokens"]), str(ours.get("seal")).encode()
        else:
            name = transfer_name(transfer, request, request.num_prompt_tokens - 1)
            tokens, digest, first = request.num_prompt_tokens, None, {}
        name.encode()  # half a surrogate pair is no text
        if tokens < 1:
            raise ValueError(f"{tokens} tokens are on offer")
        if offer and not hmac.compare_digest(sealed, seal(offer, secret).encode()):
            raise RefusedError(
                "ticket",
                "the offer in kv_transfer_params is not as a prefill engine with our secret made "
                "it: give both sides the same KVXFER_SECRET, and have the proxy change nothing",
            )
        return Remote(
            engine=str(params.get("remote_engine_id")),
            lease=lease,
            fields={str(field): str(value) for field, value in dict(ours["fields"]).items()},
            agents=dict(ours["agents"]),
            name=name,
            tokens=tokens,
            digest=digest,
            first={str(key): int(unit) for key, unit in first.items()},
        )
    except RefusedError:
        raise
    except (LookupError, TypeError, ValueError, OverflowError) as error:
        raise RefusedError("params", f"kv_transfer_params is malformed: {error!r}") from error
