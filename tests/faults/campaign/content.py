"""What each offer holds, and what a fetch of it must leave behind. Computed, never remembered.

The content follows from the number of the offer alone, so that a consumer in another process can
tell the bytes of this very generation from those of any other.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import numpy as np
from faults.campaign.schedule import OfferPlan
from kvtest import codec_model
from kvtest.caches import POISON, Geometry, Paged
from kvtest.coded import Coding, deliver_coded

# numpy loads it at first use, and memory may be short then.
np.random.default_rng(0)

_GARBAGE = 0x5A  # of blocks that were given back: what another request would have written there


@functools.lru_cache(maxsize=64)
def _values(number: int, tokens: int, layer: int, plane: int, geometry: Geometry) -> np.ndarray:
    """Return [token, head, content], as a cache of this geometry stores it."""
    rng = np.random.default_rng([number, tokens, layer, plane])
    values = rng.normal(0, 3, (tokens, geometry.num_heads, geometry.content)).astype(np.float32)
    stored, _ = codec_model.into_cache(values.reshape(-1), geometry.dtype)
    return stored.reshape(values.shape)


def whole(geometry: Geometry, heads: tuple[int, int]) -> Geometry:
    """Return the geometry of a cache that holds all heads, as the ranks of a group do together."""
    return dataclasses.replace(geometry, heads=heads)


def fill(paged: Paged, blocks: Sequence[int], number: int, plan: OfferPlan) -> None:
    """Write the content of an offer into blocks, for the heads that this cache holds."""
    g = paged.geometry
    at = np.arange(plan.tokens)
    used = np.asarray(blocks)[at // g.block_size]
    all_heads = whole(g, plan.heads)
    begin = g.heads[0] - plan.heads[0]
    for i, layer in enumerate(g.layers):
        for j, plane in enumerate(g.planes):
            values = _values(number, plan.tokens, i, j, all_heads)
            view = paged.view(layer, plane)  # [block, head, token, content]
            view[used, :, at % g.block_size] = values[:, begin : begin + g.num_heads]


def garble(paged: Paged, blocks: Sequence[int]) -> None:
    """Overwrite blocks that were given back, as the next request would."""
    _set(paged, blocks, _GARBAGE)


def poison(paged: Paged, blocks: Sequence[int]) -> None:
    _set(paged, blocks, POISON)


def _set(paged: Paged, blocks: Sequence[int], byte: int) -> None:
    for layer in paged.geometry.layers:
        for plane in paged.geometry.planes:
            view = paged.view(layer, plane)
            word = int.from_bytes(bytes([byte]) * view.dtype.itemsize, "little")
            view[np.asarray(blocks)] = word


def poisoned(paged: Paged, blocks: Sequence[int]) -> bool:
    """Whether nobody has written into these blocks since `poison`."""
    for layer in paged.geometry.layers:
        for plane in paged.geometry.planes:
            view = paged.view(layer, plane)
            word = int.from_bytes(bytes([POISON]) * view.dtype.itemsize, "little")
            if not bool((view[np.asarray(blocks)] == word).all()):
                return False
    return True


@functools.lru_cache(maxsize=32)
def _expected(
    number: int,
    plan: OfferPlan,
    source: Geometry,
    target: Geometry,
    tokens: tuple[int, int],
    first_slot: int,
    codec: str,
) -> Paged:
    """Return a cache with the fetched tokens in blocks 0, 1, ..."""
    needed = source.blocks_for(plan.tokens)
    producer = Paged(dataclasses.replace(source, heads=plan.heads, num_blocks=needed))
    fill(producer, range(needed), number, plan)
    blocks = target.blocks_for(tokens[1] - tokens[0], first_slot)
    wanted = Paged(dataclasses.replace(target, num_blocks=blocks))
    deliver_coded(
        wanted,
        [producer],
        range(needed),
        range(blocks),
        tokens,
        Coding(codec),
        offered_from=plan.first_token,
        first_slot=first_slot,
    )
    return wanted


def wrong_elements(
    paged: Paged,
    blocks: Sequence[int],
    number: int,
    plan: OfferPlan,
    source: Geometry,
    tokens: tuple[int, int],
    first_slot: int,
    codec: str,
) -> int:
    """Count the elements in these blocks that are not what the fetch should have left there."""
    wanted = _expected(number, plan, source, paged.geometry, tokens, first_slot, codec)
    used = np.asarray(blocks)[: wanted.geometry.num_blocks]
    return sum(
        int((paged.view(layer, plane)[used] != wanted.view(layer, plane)).sum())
        for layer in paged.geometry.layers
        for plane in paged.geometry.planes
    )
