"""Paged caches in NumPy, and what a fetch should make of them, computed row by row."""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Sequence

import numpy as np

import kvxfer

STORAGE = {
    "float32": np.uint32,
    "float16": np.uint16,
    "bfloat16": np.uint16,
    "uint8": np.uint8,
    "float8_e4m3fn": np.uint8,
    "float8_e4m3fnuz": np.uint8,
    "float8_e5m2": np.uint8,
}
POISON = 0xEE


@dataclasses.dataclass(frozen=True)
class Geometry:
    """How one side keeps its cache. Arrays hold raw bits, so NaNs compare as what they are."""

    axes: str = "BHNC"  # with P: planes in one tensor; without H: one head
    packed: bool = False  # planes behind each other in the content axis
    layers: tuple[str, ...] = ("layer.0", "layer.1", "layer.2")
    planes: tuple[str, ...] = ("k", "v")
    content: int = 16
    heads: tuple[int, int] = (0, 4)
    block_size: int = 16
    num_blocks: int = 24
    dtype: str = "bfloat16"
    model: str = ""
    # By plane, or for each layer by plane.
    scales: tuple[float, ...] | tuple[tuple[float, ...], ...] | None = None

    @property
    def num_heads(self) -> int:
        return self.heads[1] - self.heads[0]

    def scale(self, layer: str, plane: str) -> float:
        if self.scales is None:
            return 1.0
        each = self.scales[self.layers.index(layer)] if self.scale_per_layer else self.scales
        return each[self.planes.index(plane)]

    @property
    def scale_per_layer(self) -> bool:
        return self.scales is not None and isinstance(self.scales[0], tuple)

    def blocks_for(self, tokens: int, first_slot: int = 0) -> int:
        return -(-(first_slot + tokens) // self.block_size)


class Paged:
    """One side's memory, and its description to kvxfer."""

    def __init__(self, geometry: Geometry, seed: int | None = None) -> None:
        self.geometry = g = geometry
        storage = STORAGE[g.dtype]
        extents = {
            "P": len(g.planes),
            "B": g.num_blocks,
            "H": g.num_heads,
            "N": g.block_size,
            "C": g.content * (len(g.planes) if g.packed else 1),
        }
        shape = tuple(extents[axis] for axis in g.axes)
        per_layer = 1 if "P" in g.axes or g.packed else len(g.planes)
        self.arrays = [
            [np.zeros(shape, storage) for _ in range(per_layer)] for _ in range(len(g.layers))
        ]
        if seed is None:
            self.poison()
        else:
            self.fill(seed)
        self.cache = kvxfer.Cache(
            {
                layer: arrays[0] if per_layer == 1 else tuple(arrays)
                for layer, arrays in zip(g.layers, self.arrays, strict=True)
            },
            axes=g.axes,
            planes=g.planes,
            packed=g.packed,
            model=g.model,
            first_head=g.heads[0],
            dtype=g.dtype,
            scales=g.scales,
        )

    def fill(self, seed: int) -> None:
        """Fill with bytes that depend on the seed, and on nothing else but the shape."""
        for layer, arrays in zip(self.geometry.layers, self.arrays, strict=True):
            for index, array in enumerate(arrays):
                key = [seed, zlib.crc32(layer.encode()), index]
                raw = array.view(np.uint8)
                raw[...] = np.random.default_rng(key).integers(0, 256, raw.shape, np.uint8)

    def poison(self) -> None:
        for arrays in self.arrays:
            for array in arrays:
                array.view(np.uint8)[...] = POISON

    @property
    def poisoned(self) -> bool:
        """Whether not one byte was written since `poison`."""
        return all(
            bool((array.view(np.uint8) == POISON).all())
            for arrays in self.arrays
            for array in arrays
        )

    def view(self, layer: str, plane: str) -> np.ndarray:
        """Return [block, head, token, content] of a plane."""
        g = self.geometry
        arrays = self.arrays[g.layers.index(layer)]
        index = g.planes.index(plane)
        array, axes = arrays[0], g.axes
        if "P" in axes:
            array = array[tuple(index if axis == "P" else slice(None) for axis in axes)]
            axes = axes.replace("P", "")
        elif g.packed:
            array = array[..., index * g.content : (index + 1) * g.content]
        else:
            array = arrays[index]
        if "H" not in axes:
            array, axes = array[:, None], axes[0] + "H" + axes[1:]
        return array.transpose([axes.index(axis) for axis in "BHNC"])

    def head(self, layer: str, plane: str, head: int) -> np.ndarray:
        """Return [block, token, content] of a global head."""
        return self.view(layer, plane)[:, head - self.geometry.heads[0]]

    def rows(
        self,
        layer: str,
        plane: str,
        head: int,
        blocks: Sequence[int],
        num_tokens: int,
        first_slot: int = 0,
    ) -> np.ndarray:
        """Return [token, content] of a request's tokens, gathered through its block table."""
        at = first_slot + np.arange(num_tokens)
        size = self.geometry.block_size
        return self.head(layer, plane, head)[np.asarray(blocks)[at // size], at % size]

    def deliver(
        self,
        producers: Sequence[Paged],
        producer_blocks: Sequence[int],
        blocks: Sequence[int],
        tokens: tuple[int, int],
        *,
        offered_from: int = 0,
        first_slot: int = 0,
    ) -> None:
        """Do by indexing what a fetch should do: the tokens, and zeros behind them.

        The producers together hold all of this side's layers and heads, all in blocks of one size.
        """
        g = self.geometry
        count = tokens[1] - tokens[0]
        at = first_slot + np.arange(count)
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
                        layer, plane, head, producer_blocks, count, tokens[0] - offered_from
                    )
                    target = self.head(layer, plane, head)
                    target[used, at % g.block_size] = rows
                    target[used[-1], at[-1] % g.block_size + 1 :] = 0

    def same_as(self, other: Paged) -> bool:
        """Whether all memory is equal, what no fetch should touch included."""
        return all(
            np.array_equal(ours, theirs)
            for mine, their in zip(self.arrays, other.arrays, strict=True)
            for ours, theirs in zip(mine, their, strict=True)
        )
