"""What steps of an engine and transfers of KV cost.

Steps cost what is linear in tokens, sequences and context, which is enough to predict published
measurements within a few per cent. Rates are measured or fitted, never taken from a data sheet.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvxfer.serving.checks import at_least, positive


@dataclass(frozen=True, slots=True)
class PrefillCost:
    """Seconds of a step that prefills: `base`, and what each token adds."""

    base: float
    per_token: float
    per_square: float = 0.0
    """Attention: what a prompt of L tokens costs per L**2."""

    def __post_init__(self) -> None:
        at_least("base", self.base)
        positive("per_token", self.per_token)
        at_least("per_square", self.per_square)

    def chunk(self, start: int, tokens: int) -> float:
        """Return what prefilling `tokens` behind the first `start` of a prompt adds to a step."""
        end = start + tokens
        return self.per_token * tokens + self.per_square * (end * end - start * start)

    def prompt(self, tokens: int, start: int = 0) -> float:
        """Return the seconds of a step of its own for one prompt."""
        return self.base + self.chunk(start, tokens)

    @property
    def tokens_per_second(self) -> float:
        """Rate that long batches approach, attention left out."""
        return 1.0 / self.per_token


@dataclass(frozen=True, slots=True)
class DecodeCost:
    """Seconds of a step that decodes one token for each running sequence."""

    base: float
    per_sequence: float
    per_context: float = 0.0
    """What each token of context adds, summed over the batch."""

    def __post_init__(self) -> None:
        positive("base", self.base)
        at_least("per_sequence", self.per_sequence)
        at_least("per_context", self.per_context)

    def step(self, sequences: float, context: float) -> float:
        """Return the seconds of one step. `context` is the sum over the batch."""
        return self.base + self.per_sequence * sequences + self.per_context * context


@dataclass(frozen=True, slots=True)
class Link:
    """The way from prefill to decode engines, as measured (`kvxfer bench`), not its nameplate."""

    bytes_per_second: float
    kv_bytes_per_token: float
    """On the wire: a codec that halves the bytes halves this."""

    latency: float = 0.0
    """Fixed cost of a transfer: routing, handshake, first byte."""

    layers: int = 1
    """Pieces in which a transfer overlaps with the prefill; 1 does not overlap."""

    def __post_init__(self) -> None:
        positive("bytes_per_second", self.bytes_per_second)
        at_least("kv_bytes_per_token", self.kv_bytes_per_token)
        at_least("latency", self.latency)
        at_least("layers", self.layers, 1)

    @property
    def tokens_per_second(self) -> float:
        """Prefill rate whose KV it can just carry: a faster one cannot be hidden."""
        if self.kv_bytes_per_token == 0:
            return float("inf")
        return self.bytes_per_second / self.kv_bytes_per_token

    def exposed(self, tokens: int, prefill_seconds: float) -> float:
        """Return how much longer the first token takes because `tokens` have to be moved."""
        transfer = tokens / self.tokens_per_second
        return self.latency + exposed_seconds(transfer, prefill_seconds, self.layers)


def exposed_seconds(transfer: float, prefill: float, layers: int) -> float:
    """Return what of a transfer is left when the prefill that it overlaps with ends.

    Layers become ready one after the other, evenly spread over `prefill`, and are sent in order.
    Either the link keeps up and the last layer remains, or it never idles after the first layer.
    """
    return max(transfer / layers, transfer - prefill * (layers - 1) / layers)


def kv_bytes_per_token(
    layers: int, kv_heads: int, head_size: int, element_bytes: float, planes: int = 2
) -> float:
    """Return the bytes of KV that a token has over all layers.

    For MLA: one plane, one head, and the latent and rope sizes together as `head_size`.
    """
    return planes * layers * kv_heads * head_size * element_bytes
