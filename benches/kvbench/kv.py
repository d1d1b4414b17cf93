"""Paged KV of a plausible kind: bfloat16, keys with outlying channels, blocks at random places."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from baselines.host import CheckError

from kvbench.memory import POISON, Pages, Pool, scattered_slots

TOKENS, HEADS, CONTENT = 16, 8, 128  # of a block: Llama 3's, without tensor parallelism
BLOCK_BYTES = TOKENS * HEADS * CONTENT * 2
PLANES = ("k", "v")

Halves = npt.NDArray[np.uint16]  # bfloat16 bits


class KvPool:
    """K and V of one layer, [block, token, kv head, content] each, in twice the memory needed.

    Parameters
    ----------
    nbytes
        Of the K and V that transfers move, together.
    table_seed
        Which blocks those are.
    data_seed
        Of the values; None leaves poison.
    """

    def __init__(self, nbytes: int, pages: Pages, table_seed: int, data_seed: int | None) -> None:
        self.nbytes = nbytes
        self.pool = Pool(2 * nbytes, pages)
        self.blocks = scattered_slots(BLOCK_BYTES, nbytes // 2 // BLOCK_BYTES, nbytes, table_seed)
        self.num_tokens = len(self.blocks) * TOKENS
        halves: Halves = self.pool.bytes.view(np.uint16)
        self.planes = halves.reshape(2, -1, TOKENS, HEADS, CONTENT)
        if data_seed is None:
            self.poison()
        else:
            for index, plane in enumerate(self.planes):
                _fill(plane, data_seed + index, outliers=index == 0)

    def poison(self) -> None:
        """Overwrite everything."""
        self.pool.fill(POISON)

    def tokens(self, plane: int, begin: int, count: int) -> npt.NDArray[np.float32]:
        """Values of some of the blocks, [block, token, kv head, content]."""
        return widened(self.planes[plane][self.blocks[begin : begin + count]])

    def check_against(self, other: KvPool, most: dict[str, float]) -> dict[str, float]:
        """Compare with what `other` holds: relative L2 by plane, at most `most`; return it.

        Raises
        ------
        CheckError
            A plane is further off, or a block that nobody asked for was written.
        """
        found = {}
        for index, name in enumerate(PLANES):
            difference = total = 0.0
            for begin in range(0, len(self.blocks), 256):
                ours = self.tokens(index, begin, 256)
                theirs = other.tokens(index, begin, 256)
                difference += float(np.square(ours - theirs).sum())
                total += float(np.square(theirs).sum())
            found[name] = (difference / total) ** 0.5
            if not found[name] <= most[name]:
                raise CheckError(
                    f"plane {name} is off by {found[name]:.2%}, at most {most[name]:.2%}"
                )
        rest = np.setdiff1d(np.arange(self.planes.shape[1]), self.blocks)
        poison = POISON << 8 | POISON
        for plane in self.planes:
            for begin in range(0, len(rest), 256):
                if (plane[rest[begin : begin + 256]] != poison).any():
                    raise CheckError("a block that nobody asked for was written")
        return {name: round(value, 5) for name, value in found.items()}

    def cache(self) -> Any:
        """This pool as kvxfer describes it."""
        import kvxfer

        k, v = self.planes
        return kvxfer.Cache({"layer": (k, v)}, axes="BNHC", dtype="bfloat16")


def widened(halves: Halves) -> npt.NDArray[np.float32]:
    """Bfloat16 bits as float32."""
    return (halves.astype(np.uint32) << 16).view(np.float32)


def _fill(plane: Halves, seed: int, *, outliers: bool) -> None:
    rng = np.random.default_rng(seed)
    # A pattern of a prime number of rows, over and over: no two blocks are alike.
    pattern = rng.standard_normal((8191, CONTENT), dtype=np.float32)
    if outliers:
        pattern[:, rng.permutation(CONTENT)[:4]] *= 10.0
        pattern += rng.standard_normal(CONTENT, dtype=np.float32)
    bits = pattern.view(np.uint32)
    rounded = ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)
    rows = plane.reshape(-1, CONTENT)
    for begin in range(0, len(rows), len(rounded)):
        part = rows[begin : begin + len(rounded)]
        part[:] = rounded[: len(part)]
