"""What scheduler and workers of one engine tell each other."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
)

Ticket = dict[str, Any]
Refusal = tuple[str, str]
"""Why a load fails before it begins: a reason for the metrics and a message."""


@dataclass(frozen=True)
class CacheInfo:
    """One cache of one worker, as its scheduler needs to know it."""

    key: str
    """Names the cache within the engine, equally on all ranks."""
    group: int
    layers: tuple[str, ...]
    heads: tuple[int, int]
    """Global kv heads, half-open."""
    unit: int
    """Tokens of a block that travel as one: 1, or the block size where a backend packs blocks."""
    window: int | None
    fields: dict[str, str]
    """What has to fit on both sides, by name."""


@dataclass
class Handshake(KVConnectorHandshakeMetadata):  # type: ignore[misc]
    """From each worker to its scheduler, once."""

    name: str
    address: str | None
    incarnation: int
    caches: list[CacheInfo]


@dataclass(frozen=True)
class Rank:
    """A worker of this engine and the slice of one cache that it holds."""

    name: str
    heads: tuple[int, int]
    layers: tuple[str, ...] | None
    """None where all ranks hold the same."""


@dataclass(frozen=True)
class Part:
    """A range of one request in one cache, in the cache's units: tokens, or blocks."""

    key: str
    ticket: Ticket
    blocks: list[int]
    """The first unit lies in the first of them."""
    first: int
    end: int


@dataclass(frozen=True)
class SendOrder:
    """Prefill side: offer these blocks."""

    request: str
    parts: list[Part]
    ready: bool
    """False: layers become ready in this step's forward."""


@dataclass(frozen=True)
class LoadOrder:
    """Decode side: fetch into these blocks, or say why that cannot be."""

    request: str
    peer: str
    parts: list[Part]
    tokens: int
    refused: Refusal | None = None


@dataclass
class StepOrders(KVConnectorMetadata):  # type: ignore[misc]
    """From the scheduler to all workers, each step."""

    idle: bool = False
    """Whether the step computes nothing."""
    send: list[SendOrder] = field(default_factory=list)
    hold: list[str] = field(default_factory=list)
    """Requests that have finished and wait for their offers' ends."""
    withdraw: list[tuple[str, list[Ticket], str]] = field(default_factory=list)
    """Requests that will not be served, with their tickets and the reason. Their blocks are about
    to be reused, so what was offered of them must end first."""
    load: list[LoadOrder] = field(default_factory=list)
    cancel: list[str] = field(default_factory=list)
    """Loads that nobody wants any more; they are still reported."""
    decline: list[tuple[str, Ticket]] = field(default_factory=list)
    """Offers, with their caches, that nobody will fetch: the prefill side may free the blocks."""
    renew: list[Ticket] = field(default_factory=list)
    ranks: dict[str, list[Rank]] = field(default_factory=dict)
    """Who fetches a cache, where there is something to load or decline."""
