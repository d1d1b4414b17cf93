"""The demo's caches: their shapes, their contents, and what a fetch must have made of them.

The contents are a function of layer and plane alone, so that the consumer's process can compute by
itself, with NumPy and nothing of kvxfer, what the producer's process holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from numpy import random  # loaded now: numpy would on first use, and lose a Ctrl-C meanwhile

Array = npt.NDArray[np.uint16]

PRODUCER_BLOCK_SIZE = 16
CONSUMER_BLOCK_SIZE = 32
_POISON = 0xA5A5  # what the consumer's cache holds before a fetch


@dataclass(frozen=True, kw_only=True)
class Model:
    """The KV cache of a model, or of one tensor-parallel rank of it; all elements are bfloat16."""

    name: str
    layers: int
    heads: int | None
    """kv heads; None where the cache has no such axis, as in MLA."""
    content: int
    planes: tuple[str, ...] = ("k", "v")
    first_head: int = 0
    producer_axes: str = "BHNC"
    consumer_axes: str = "BNHC"

    @property
    def token_bytes(self) -> int:
        return self.layers * len(self.planes) * (self.heads or 1) * self.content * 2

    def layer_name(self, layer: int) -> str:
        return f"model.layers.{layer}"


MODELS = {
    "llama-3-8b": Model(name="Llama-3-8B", layers=32, heads=8, content=128),
    "llama-3-70b-tp8": Model(
        name="Llama-3-70B, TP8", layers=80, heads=1, content=128, first_head=3
    ),
    "deepseek-r1": Model(
        name="DeepSeek-R1 (MLA)",
        layers=61,
        heads=None,
        content=576,
        planes=("latent",),
        producer_axes="BNC",
        consumer_axes="BNC",
    ),
}


def blocks_for(tokens: int, block_size: int) -> int:
    return -(-tokens // block_size)


def shape(model: Model, axes: str, num_blocks: int, block_size: int) -> tuple[int, ...]:
    extent = {"B": num_blocks, "H": model.heads or 1, "N": block_size, "C": model.content}
    return tuple(extent[axis] for axis in axes)


def allocate(model: Model, axes: str, num_blocks: int, block_size: int) -> dict[str, list[Array]]:
    """Return the tensors of a cache, one for each plane of a layer."""
    extents = shape(model, axes, num_blocks, block_size)
    return {
        model.layer_name(layer): [np.empty(extents, np.uint16) for _ in model.planes]
        for layer in range(model.layers)
    }


def contents(layer: int, plane: int, extents: tuple[int, ...]) -> Array:
    """Return what the producer's tensor of a layer and plane holds: every bit pattern occurs."""
    size = int(np.prod(extents))
    words = random.SFC64([layer, plane]).random_raw(-(-size // 4))
    return words.view(np.uint16)[:size].reshape(extents)


def poison(tensors: dict[str, list[Array]]) -> None:
    for planes in tensors.values():
        for tensor in planes:
            tensor.fill(_POISON)


def token_rows(tensor: Array, axes: str, blocks: Sequence[int]) -> Array:
    """Return the slots of some blocks one behind the other: [slots, kv heads, content]."""
    picked = tensor[list(blocks)]
    if "H" not in axes:
        picked = picked[:, :, np.newaxis, :]
    elif axes == "BHNC":
        picked = picked.transpose(0, 2, 1, 3)
    return picked.reshape(-1, *picked.shape[2:])


@dataclass(frozen=True)
class Request:
    """A request's tokens: in which blocks they lie on each side."""

    tokens: int
    producer_blocks: list[int]
    consumer_blocks: list[int]


@dataclass(frozen=True)
class Difference:
    """Elements of one tensor that are not what they should be."""

    where: str
    elements: int

    def __str__(self) -> str:
        return f"{self.where}: {self.elements} elements differ"


def compare(
    model: Model, layer: int, plane: int, got: Array, source: Array, requests: Sequence[Request]
) -> list[Difference]:
    """Compare a tensor of the consumer with what the requests must have made of it.

    Parameters
    ----------
    got
        The consumer's tensor; it was poisoned before the fetches.
    source
        The producer's tensor of that layer and plane.
    requests
        What was fetched since.

    Returns
    -------
    list of Difference
        For each request in its tokens and in the rest of its last block, which must be zero, and
        in the blocks that nobody asked for, which must be as they were. Empty when all is right.
    """
    where = f"{model.name}, {model.layer_name(layer)}, plane {model.planes[plane]}"
    found = []
    untouched = np.ones(len(got), dtype=bool)
    for request in requests:
        rows = token_rows(got, model.consumer_axes, request.consumer_blocks)
        expected = token_rows(source, model.producer_axes, request.producer_blocks)
        tokens = request.tokens
        if count := int(np.count_nonzero(rows[:tokens] != expected[:tokens])):
            found.append(Difference(f"{where}, a fetch of {tokens} tokens", count))
        if count := int(np.count_nonzero(rows[tokens:])):
            found.append(Difference(f"{where}, the rest of the last block", count))
        untouched[request.consumer_blocks] = False
    if count := int(np.count_nonzero(got[untouched] != _POISON)):
        found.append(Difference(f"{where}, blocks that were not asked for", count))
    return found
