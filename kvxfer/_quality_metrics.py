"""What ``kvxfer quality`` measures, in NumPy: errors of K, V and attention, and of the logits."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.floating[Any]]

# Rows of logits that are widened to float64 at a time: a vocabulary of 262,144 makes 32 MiB of 16.
_ROWS = 16


@dataclass
class RelativeError:
    """The L2 norm of an error relative to that of what it is an error of, over all that is added.

    Parameters
    ----------
    error, reference
        Sums of squares.
    """

    error: float = 0.0
    reference: float = 0.0

    def add(self, degraded: Floats, original: Floats) -> None:
        """Count two arrays of one shape in."""
        if degraded.shape != original.shape:
            raise ValueError(f"shapes differ: {degraded.shape} and {original.shape}")
        exact = original.astype(np.float64)
        self.error += float(np.square(degraded - exact).sum())
        self.reference += float(np.square(exact).sum())

    @property
    def value(self) -> float:
        """Infinite where there is an error of nothing, NaN where there is neither."""
        if self.reference == 0:
            return math.inf if self.error > 0 else math.nan
        return math.sqrt(self.error / self.reference)


@dataclass(frozen=True)
class LogitDifference:
    """How a model's answers differ at each of some tokens.

    Parameters
    ----------
    kl
        Kullback-Leibler divergence in nats of the degraded distribution from the original one.
    agrees
        Whether both think the same token the likeliest.
    max_delta
        The largest difference of a logit.
    """

    kl: NDArray[np.float64]
    agrees: NDArray[np.bool_]
    max_delta: NDArray[np.float64]


def _log_softmax(logits: Floats) -> NDArray[np.float64]:
    wide = logits.astype(np.float64)
    wide -= wide.max(axis=-1, keepdims=True)
    wide -= np.log(np.exp(wide).sum(axis=-1, keepdims=True))
    return wide


def compare_logits(degraded: Floats, original: Floats) -> LogitDifference:
    """Compare logits ``[tokens, vocabulary]``, both after the same tokens."""
    if degraded.shape != original.shape or original.ndim != 2:
        raise ValueError(f"no logits to compare: {degraded.shape} and {original.shape}")
    tokens = original.shape[0]
    kl = np.empty(tokens)
    max_delta = np.empty(tokens)
    for begin in range(0, tokens, _ROWS):
        rows = slice(begin, begin + _ROWS)
        expected = _log_softmax(original[rows])
        divergence = np.exp(expected) * (expected - _log_softmax(degraded[rows]))
        # Never negative but for rounding.
        kl[rows] = np.maximum(divergence.sum(axis=-1), 0)
        delta = degraded[rows].astype(np.float64) - original[rows]
        max_delta[rows] = np.abs(delta).max(axis=-1)
    agrees = degraded.argmax(axis=-1) == original.argmax(axis=-1)
    return LogitDifference(kl, agrees, max_delta)


@dataclass
class LayerResult:
    """What a codec did to one layer, over all passages."""

    index: int
    memory_bytes: int = 0
    wire_bytes: int = 0
    raw_rows: int = 0
    planes: dict[str, RelativeError] = field(default_factory=dict)
    attention: RelativeError = field(default_factory=RelativeError)

    def add_plane(self, plane: str, degraded: Floats, original: Floats) -> None:
        """Count the values of K or V in."""
        self.planes.setdefault(plane, RelativeError()).add(degraded, original)

    def record(self) -> dict[str, Any]:
        """Return what --json prints."""
        return {
            "layer": self.index,
            "wire_ratio": self.memory_bytes / self.wire_bytes,
            "rel_l2": {plane: error.value for plane, error in self.planes.items()},
            "attention_rel_l2": _finite(self.attention.value),
            "raw_rows": self.raw_rows,
        }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


@dataclass
class CodecResult:
    """What a codec did, over all passages."""

    codec: str
    layers: list[LayerResult]
    logits: list[LogitDifference] = field(default_factory=list)  # a passage each

    def record(self) -> dict[str, Any]:
        """Return what --json prints, but for the layers."""
        kl = np.concatenate([passage.kl for passage in self.logits])
        agrees = np.concatenate([passage.agrees for passage in self.logits])
        memory = sum(layer.memory_bytes for layer in self.layers)
        wire = sum(layer.wire_bytes for layer in self.layers)
        attention = [
            layer.attention.value for layer in self.layers if math.isfinite(layer.attention.value)
        ]
        return {
            "codec": self.codec,
            "wire_ratio": memory / wire,
            "rel_l2": {plane: self._plane(plane) for plane in self.layers[0].planes},
            "attention_rel_l2": float(np.mean(attention)) if attention else None,
            "attention_rel_l2_worst_layer": max(attention) if attention else None,
            "kl_nats": float(kl.mean()),
            "kl_nats_standard_error": self._standard_error(),
            "kl_nats_p99": float(np.quantile(kl, 0.99)),
            "kl_nats_max": float(kl.max()),
            "top1_agreement": float(agrees.mean()),
            "max_delta_logit": max(float(passage.max_delta.max()) for passage in self.logits),
            "tokens": len(kl),
            "raw_rows": sum(layer.raw_rows for layer in self.layers),
        }

    def _plane(self, plane: str) -> float:
        errors = [layer.planes[plane] for layer in self.layers]
        return RelativeError(
            sum(error.error for error in errors), sum(error.reference for error in errors)
        ).value

    def _standard_error(self) -> float | None:
        """Of the mean KL, over passages: tokens of one passage are not independent."""
        means = [float(passage.kl.mean()) for passage in self.logits]
        if len(means) < 2:
            return None
        return float(np.std(means, ddof=1) / math.sqrt(len(means)))
