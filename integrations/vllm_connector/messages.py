"""What scheduler and workers of one engine tell each other."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
)

Ticket = dict[str, Any]


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
    fields: dict[str, str]
    """What has to be equal on both sides, by name."""
    scales: dict[str, tuple[float, float]]
    """Of K and V by layer, where the cache is quantized."""


@dataclass
class Handshake(KVConnectorHandshakeMetadata):  # type: ignore[misc]
    """From each worker to its scheduler, once."""

    name: str
    address: str | None
    incarnation: int
    caches: list[CacheInfo]


@dataclass(frozen=True)
class Part:
    """A range of tokens of one request in one cache."""

    key: str
    ticket: Ticket
    blocks: list[int]
    first: int
    """First token (or block, by the cache's unit) that is fetched; it lies in ``blocks[0]``."""
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
    parts: list[Part]
    peer: str
    refused: tuple[str, str] | None = None
    """Reason and message, where the load fails before it begins."""


@dataclass
class StepOrders(KVConnectorMetadata):  # type: ignore[misc]
    """From the scheduler to all workers, each step."""

    send: list[SendOrder] = field(default_factory=list)
    hold: list[str] = field(default_factory=list)
    """Requests that have finished and wait for their offers' ends."""
    withdraw: list[str] = field(default_factory=list)
    """Requests whose blocks are about to be reused: their offers must end first."""
    load: list[LoadOrder] = field(default_factory=list)
    cancel: list[str] = field(default_factory=list)
    """Loads that nobody wants any more; they are still reported."""
    decline: list[tuple[str, Ticket]] = field(default_factory=list)
    """Offers, with their caches, that nobody will fetch: the prefill side may free the blocks."""
    renew: list[Ticket] = field(default_factory=list)
