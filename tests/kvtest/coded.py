"""What a fetch with a codec should leave in the consumer's cache, by the NumPy model of codecs."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from kvtest import codec_model as model
from kvtest.caches import Paged

NEVER = (1 << 32) - 1


@dataclasses.dataclass(frozen=True)
class Coding:
    """A codec, resolved: docs/wire_protocol.md says how."""

    codec: str = "raw"
    panel_tokens: int = 64
    group: int = 0
    scale: str = "bfloat16"
    raw_until: int = 0
    raw_from: int = NEVER

    def encoding(self, plane: str, content: int) -> model.Encoding:
        if self.codec == "raw":
            return model.Encoding("raw")
        if self.codec == "int8" and plane == "k":
            return model.Encoding("int8_channel", self.scale)
        group = self.group or (128 if content > 256 else 0)
        return model.Encoding(self.codec, self.scale, 0 if group >= content else group)

    def panels(self, begin: int, end: int) -> list[tuple[int, int, bool]]:
        """Runs of tokens, and whether they are coded."""
        until = min(max(self.raw_until, begin), end)
        start = min(max(self.raw_from, until), end)
        stretches = [(begin, until, False), (until, start, True), (start, end, False)]
        return [
            (at, min(at + self.panel_tokens, last), coded and self.codec != "raw")
            for first, last, coded in stretches
            for at in range(first, last, self.panel_tokens)
        ]


@dataclasses.dataclass
class Delivered:
    exceptions: int = 0
    clamped: int = 0
    inexact: int = 0


def deliver_coded(
    target: Paged,
    producers: Sequence[Paged],
    producer_blocks: Sequence[int],
    blocks: Sequence[int],
    tokens: tuple[int, int],
    coding: Coding,
    *,
    offered_from: int = 0,
    first_slot: int = 0,
) -> Delivered:
    """Do what such a fetch should do, as `Paged.deliver` does for raw ones."""
    g = target.geometry
    begin, end = tokens
    done = Delivered()
    at = first_slot + np.arange(end - begin)
    used = np.asarray(blocks)[at // g.block_size]
    for layer in g.layers:
        for plane in g.planes:
            for head in range(*g.heads):
                source = next(
                    p
                    for p in producers
                    if layer in p.geometry.layers
                    and p.geometry.heads[0] <= head < p.geometry.heads[1]
                )
                rows = source.rows(
                    layer, plane, head, producer_blocks, end - begin, begin - offered_from
                )
                into = target.head(layer, plane, head)
                for first, last, coded in coding.panels(begin, end):
                    part = slice(first - begin, last - begin)
                    into[used[part], at[part] % g.block_size] = _panel(
                        _Side.of(source, layer, plane),
                        _Side.of(target, layer, plane),
                        rows[part],
                        (coding if coded else Coding()).encoding(plane, g.content),
                        done,
                    )
                into[used[-1], at[-1] % g.block_size + 1 :] = 0
    return done


@dataclasses.dataclass(frozen=True)
class _Side:
    """What the elements of a plane mean."""

    dtype: str
    scale: float

    @classmethod
    def of(cls, side: Paged, layer: str, plane: str) -> _Side:
        return cls(side.geometry.dtype, side.geometry.scale(layer, plane))


def _panel(
    of: _Side, to: _Side, rows: np.ndarray, encoding: model.Encoding, done: Delivered
) -> np.ndarray:
    count, content = rows.shape
    converted, clamped, inexact = model.convert(rows, of.dtype, to.dtype, of.scale, to.scale)
    if encoding.scheme == "raw":
        done.clamped += clamped
        done.inexact += inexact
        return converted
    coded, marked = model.encode_panel(rows, of.dtype, encoding)
    values = model.decode_panel(coded, of.dtype, encoding, count, content)
    stored, clamped = model.into_cache(values[~marked], to.dtype, to.scale)
    found = converted.copy()
    found[~marked] = stored
    done.clamped += clamped
    if marked.any():
        _, clamped, _ = model.convert(rows[marked], of.dtype, to.dtype, 1.0, to.scale)
        done.clamped += clamped
        done.exceptions += int(marked.sum())
    return found


def fill_like_a_model(side: Paged, seed: int) -> None:
    """Numbers as in a KV cache: channels of different offset and spread, no NaN."""
    rng = np.random.default_rng(seed)
    dtype = side.geometry.dtype
    for layer in side.geometry.layers:
        for plane in side.geometry.planes:
            view = side.view(layer, plane)
            content = view.shape[-1]
            offset, spread = rng.normal(0, 2, content), rng.uniform(0.1, 3, content)
            values = (offset + spread * rng.normal(0, 1, view.shape)).astype(np.float32)
            stored, _ = model.into_cache(
                values.reshape(-1), dtype, side.geometry.scale(layer, plane)
            )
            view[...] = stored.reshape(view.shape)
