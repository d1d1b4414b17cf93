"""How an attention backend lays out a block, found by asking its own write operation."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass

import torch

Write = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None]
"""(key, value, key cache, value cache, slot mapping): what a backend calls for new tokens."""


@dataclass(frozen=True)
class Plane:
    """Where K or V lies in the elements of one block and kv head: affine in token and content."""

    start: int
    token_stride: int
    content_stride: int


@dataclass(frozen=True)
class Packing:
    """Which element of a block and kv head holds what."""

    fingerprint: str
    planes: tuple[Plane, Plane] | None
    """K and V; None where tokens are interleaved in a way that strides cannot describe."""


def probe(
    write: Write, block_size: int, head_size: int, dtype: torch.dtype, stored: torch.dtype
) -> Packing:
    """Write numbered elements into a block of our own and look where each has gone.

    The number is written bit by bit, as zeros and ones, which every element type can hold.

    Parameters
    ----------
    write
        The backend's operation.
    block_size, head_size
        Tokens of a block; elements of K, and of V, for one token and head.
    dtype, stored
        Of the model, and of the cache.

    Raises
    ------
    ValueError
        The operation does not give each element a place of its own.
    """
    count = 2 * block_size * head_size
    numbers = torch.arange(count).view(2, block_size, 1, head_size)
    slots = torch.arange(block_size)
    source = torch.zeros(count, dtype=torch.int64)
    for bit in range((count - 1).bit_length()):
        block = torch.zeros((1, 1, 2 * block_size, head_size), dtype=stored)
        key_cache, value_cache = block.chunk(2, dim=2)
        key, value = ((numbers >> bit) & 1).to(dtype).unbind(0)
        write(key.contiguous(), value.contiguous(), key_cache, value_cache, slots)
        source |= (block.view(torch.uint8).view(count, -1) != 0).any(dim=1).to(torch.int64) << bit
    place = torch.argsort(source)
    if not torch.equal(source[place], torch.arange(count)):
        raise ValueError("the backend does not write each element of K and V to its own place")
    keys, values = place.view(2, block_size, head_size).unbind(0)
    planes = _affine(keys), _affine(values)
    digest = hashlib.sha256(b"".join(int(at).to_bytes(4, "little") for at in place)).hexdigest()
    return Packing(
        digest[:16], None if planes[0] is None or planes[1] is None else (planes[0], planes[1])
    )


def _affine(places: torch.Tensor) -> Plane | None:
    """Return the strides of ``places[token, content]``, None where there are none."""
    start = int(places[0, 0])
    token = int(places[1, 0]) - start if places.shape[0] > 1 else 1
    content = int(places[0, 1]) - start
    tokens = torch.arange(places.shape[0]).unsqueeze(1)
    contents = torch.arange(places.shape[1]).unsqueeze(0)
    if not torch.equal(places, start + tokens * token + contents * content):
        return None
    return Plane(start, token, content)
