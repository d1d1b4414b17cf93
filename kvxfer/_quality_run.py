"""The measurement of ``kvxfer quality``, apart from the model and from the codecs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from kvxfer._quality_metrics import CodecResult, LayerResult, compare_logits

Array = NDArray[Any]
Planes = Mapping[str, Array]  # "k" and "v", [heads, tokens, size], elements as a cache holds them


@dataclass(frozen=True)
class LayerKv:
    """What a layer's cache holds after a prompt.

    Parameters
    ----------
    index
        Of the layer in the cache and the model.
    first_token
        Position of the first token that it holds: not 0 where a sliding window has moved on.
    planes
        ``k`` and ``v``.
    """

    index: int
    first_token: int
    planes: Planes


@dataclass(frozen=True)
class Prefilled:
    """The cache after a prompt, and what it holds. Continuing works on a copy of it."""

    cache: Any
    tokens: int
    layers: Sequence[LayerKv]


@dataclass(frozen=True)
class AttentionSample:
    """What one layer's attention gave for the same queries: with each of the caches asked for."""

    layer: int
    original: Array
    degraded: Sequence[Array]


class Model(Protocol):
    """What is measured: `kvxfer._quality_model.Model`."""

    def prefill(self, tokens: Sequence[int]) -> Prefilled:
        """Run a prompt."""
        ...

    def continue_(
        self,
        prefilled: Prefilled,
        tokens: Sequence[int],
        replaced: Mapping[int, Planes] | None = None,
        probed: Sequence[Mapping[int, Planes]] = (),
    ) -> tuple[NDArray[np.float32], list[AttentionSample]]:
        """Run the tokens that follow it, with its cache or with another one."""
        ...

    def values(self, stored: Array) -> NDArray[np.float32]:
        """Return stored elements as numbers."""
        ...


@dataclass(frozen=True)
class Passage:
    """A prompt and the tokens that follow it in the text."""

    text: str
    first_token: int
    prompt: Sequence[int]
    following: Sequence[int]


@dataclass(frozen=True)
class Coded:
    """What arrives of a layer's K and V, and what went over the wire for it."""

    planes: Planes
    memory_bytes: int
    wire_bytes: int
    raw_rows: int


class RoundTrip(Protocol):
    """Takes a layer to the wire and back: `kvxfer._quality_codec.RoundTrip`."""

    def __call__(self, codec: str, layer: LayerKv, prompt_tokens: int) -> Coded:
        """Encode and decode the K and V of a request of that many tokens."""
        ...


def measure(
    model: Model,
    passages: Sequence[Passage],
    codecs: Sequence[str],
    round_trip: RoundTrip,
    progress: Callable[[str], None] = lambda text: None,
) -> list[CodecResult]:
    """Measure each codec on each passage.

    The tokens that follow a passage's prompt are run once with the cache as it was and once with
    each codec's; all else is the same, so that what differs is the codec's doing.
    """
    results = [CodecResult(codec, []) for codec in codecs]
    for number, passage in enumerate(passages, 1):
        where = f"passage {number} of {len(passages)}, {passage.text}"
        progress(f"{where}: prompt")
        prefilled = model.prefill(passage.prompt)
        arrived = [_degrade(model, result, round_trip, prefilled) for result in results]
        progress(f"{where}: as it is")
        original, samples = model.continue_(prefilled, passage.following, probed=arrived)
        for sample in samples:
            for result, degraded in zip(results, sample.degraded, strict=True):
                _layer(result, sample.layer).attention.add(degraded, sample.original)
        for result, planes in zip(results, arrived, strict=True):
            progress(f"{where}: {result.codec}")
            logits, _ = model.continue_(prefilled, passage.following, replaced=planes)
            result.logits.append(compare_logits(logits, original))
    return results


def _degrade(
    model: Model, result: CodecResult, round_trip: RoundTrip, prefilled: Prefilled
) -> dict[int, Planes]:
    arrived: dict[int, Planes] = {}
    for layer in prefilled.layers:
        coded = round_trip(result.codec, layer, prefilled.tokens)
        counted = _layer(result, layer.index)
        counted.memory_bytes += coded.memory_bytes
        counted.wire_bytes += coded.wire_bytes
        counted.raw_rows += coded.raw_rows
        for name, stored in layer.planes.items():
            counted.add_plane(name, model.values(coded.planes[name]), model.values(stored))
        arrived[layer.index] = coded.planes
    return arrived


def _layer(result: CodecResult, index: int) -> LayerResult:
    for layer in result.layers:
        if layer.index == index:
            return layer
    result.layers.append(LayerResult(index))
    return result.layers[-1]
