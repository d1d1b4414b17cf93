"""Paged caches of a real model's shape, and an independent statement of what packing them gives."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from baselines.host import CheckError

from kvbench.memory import Pages, Pool, other_slots, scattered_slots

ELEMENT_BYTES = 2
Blocks = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Shape:
    """One layer's plane: blocks of `tokens` tokens of `heads` heads of `content` elements."""

    tokens: int = 16
    heads: int = 8
    content: int = 128

    @property
    def block_bytes(self) -> int:
        """Bytes of one block."""
        return self.tokens * self.heads * self.content * ELEMENT_BYTES


class PagedPlane:
    """A plane twice as large as what is packed, whose blocks are taken in random order.

    Parameters
    ----------
    axes
        `BNHC` (token-major) or `BHNC` (head-major).
    seed
        Of the bytes; None leaves zeros.
    """

    def __init__(
        self, shape: Shape, axes: str, nbytes: int, pages: Pages, table_seed: int, seed: int | None
    ) -> None:
        self.shape = shape
        self.axes = axes
        self.blocks: Blocks = scattered_slots(
            shape.block_bytes, nbytes // shape.block_bytes, 2 * nbytes, table_seed
        )
        self.pool = Pool(2 * nbytes, pages)
        if seed is not None:
            self.pool.fill_random(seed)
        sizes = {"N": shape.tokens, "H": shape.heads, "C": shape.content}
        self.array: npt.NDArray[np.float16] = self.pool.bytes.view(np.float16).reshape(
            -1, *(sizes[axis] for axis in axes[1:])
        )

    def wire(self, axes: str) -> npt.NDArray[np.uint16]:
        """The plane's blocks in the order of their table, each with its axes in another order."""
        taken = self.array.view(np.uint16)[self.blocks]
        order = [self.axes.index(axis) for axis in axes]
        return np.ascontiguousarray(taken.transpose(order)).reshape(-1)

    def check_others(self, value: int) -> None:
        """Raise when a block that is not in the table holds another byte than `value`."""
        rest = other_slots(self.blocks, self.shape.block_bytes, self.pool.nbytes)
        rows = self.pool.bytes.reshape(-1, self.shape.block_bytes)
        for block in rest:
            if (rows[block] != value).any():
                raise CheckError(f"block {block}, which is not in the table, was written")
