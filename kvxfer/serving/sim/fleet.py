"""What a fleet consists of."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from kvxfer.errors import InvalidError
from kvxfer.serving.checks import at_least, positive
from kvxfer.serving.cost_model import DecodeCost, Link, PrefillCost


class Role(str, enum.Enum):
    """What an engine is for."""

    PREFILL = "prefill"
    DECODE = "decode"
    """Decodes, and prefills what is placed on it locally."""

    BOTH = "both"
    """An aggregated engine. It differs from DECODE in its chunk size and in where it is counted."""


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """One kind of engine: a model on so many GPUs of one type, with its settings."""

    role: Role
    prefill: PrefillCost
    decode: DecodeCost
    kv_tokens: int
    """Capacity of its KV memory."""

    max_sequences: int = 256
    batch_tokens: int = 8192
    """Most tokens that it takes into one step."""

    chunk_tokens: int | None = None
    """Most tokens of prefill in a step that also decodes; None takes what `batch_tokens` leaves."""

    block_tokens: int = 16
    prefix_cache: bool = True
    gpus: int = 1
    price_per_hour: float = 0.0
    """Of the engine, all its GPUs together."""

    watts: float = 0.0
    link_bytes_per_second: float | None = None
    """Its own connection, where it differs from the fleet's."""

    def __post_init__(self) -> None:
        at_least("kv_tokens", self.kv_tokens, self.block_tokens)
        at_least("max_sequences", self.max_sequences, 1)
        at_least("block_tokens", self.block_tokens, 1)
        at_least("gpus", self.gpus, 1)
        at_least("price_per_hour", self.price_per_hour)
        at_least("watts", self.watts)
        if self.chunk_tokens is not None:
            at_least("chunk_tokens", self.chunk_tokens, 1)
        if self.link_bytes_per_second is not None:
            positive("link_bytes_per_second", self.link_bytes_per_second)
        if self.batch_tokens <= self.max_sequences and self.role is not Role.PREFILL:
            raise InvalidError(
                f"batch_tokens is {self.batch_tokens} with {self.max_sequences} sequences: "
                "decoding alone could fill every step, and nothing would be prefilled"
            )
        at_least("batch_tokens", self.batch_tokens, 1)


@dataclass(frozen=True, slots=True)
class Fleet:
    """Engines, by kind and number, and the network between them."""

    engines: tuple[tuple[EngineSpec, int], ...]
    link: Link | None = None
    """None where nothing is ever moved."""

    first_token_at_prefill: bool = False
    """Whether the prefill engine's token is sent to the client. vLLM's is not."""

    def __post_init__(self) -> None:
        for _, count in self.engines:
            at_least("count", count)
        if not self.count(Role.DECODE) + self.count(Role.BOTH):
            raise InvalidError("a fleet without an engine that decodes")
        if self.count(Role.PREFILL) and self.link is None:
            raise InvalidError("a fleet with prefill engines needs a link to its decode engines")

    def count(self, role: Role) -> int:
        """Return how many engines have this role."""
        return sum(count for spec, count in self.engines if spec.role is role)

    @property
    def gpus(self) -> int:
        """All of them."""
        return sum(spec.gpus * count for spec, count in self.engines)

    @property
    def price_per_hour(self) -> float:
        """Of all engines."""
        return sum(spec.price_per_hour * count for spec, count in self.engines)

    @property
    def watts(self) -> float:
        """Of all engines."""
        return sum(spec.watts * count for spec, count in self.engines)

    @property
    def name(self) -> str:
        """4P1D, 2P1D+1A: prefill, decode and aggregated engines."""
        prefill, decode, both = (self.count(role) for role in Role)
        parts = [f"{prefill}P{decode}D"] if prefill or decode else []
        return "+".join(parts + ([f"{both}A"] if both else []))
