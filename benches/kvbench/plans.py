"""kvxfer's copy plans and its pack and unpack, for measuring them by themselves."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from baselines.host import CheckError

from kvbench.shapes import ELEMENT_BYTES, PagedPlane

Wire = npt.NDArray[np.uint8]

SEED = 1
# Wire orders as kvxfer spells them, by the axes of a block on the wire: layer, plane, tile, then
# token and head, the outer one first.
ORDERS = {"BNHC": "LPTNH", "BHNC": "LPTHN"}


class Packer:
    """Packs or unpacks one plane's blocks, maybe with other axes on the wire than in memory."""

    def __init__(self, plane: PagedPlane, wire_axes: str) -> None:
        from kvxfer import _core

        self._core: Any = _core
        self._plane = plane
        self._wire_axes = wire_axes
        shape = plane.shape
        strides = {
            "BNHC": (shape.content, shape.heads * shape.content),
            "BHNC": (shape.tokens * shape.content, shape.content),
        }[plane.axes]
        head, token = (s * ELEMENT_BYTES for s in strides)
        layout = _core.CacheLayout(
            num_blocks=plane.pool.nbytes // shape.block_bytes,
            block_size=shape.tokens,
            num_heads=shape.heads,
            layers=["layer"],
            planes=[("k", shape.content)],
            views=[(plane.pool.address, shape.block_bytes, head, token, ELEMENT_BYTES)],
        )
        tokens = len(plane.blocks) * shape.tokens
        self._plan = _core.CopyPlan(
            layout,
            _core.BlockTable(plane.blocks.tolist()),
            _core.Slice([0], 0, shape.heads, 0, tokens),
            _core.tile_ends(0, tokens, shape.tokens, 0, shape.tokens, 0),
            ORDERS[wire_axes],
            [0],
        )
        self.nbytes: int = self._plan.wire_bytes()

    def pack(self, wire: Wire, with_digest: bool = True) -> object:
        """Gather everything into `wire`; the digest."""
        # Streamed, as the engine packs into memory that another process reads.
        digest: object = self._core.pack(self._plan, 0, self.nbytes, wire, SEED, with_digest, True)
        return digest

    def unpack(self, wire: Wire, with_digest: bool = True) -> object:
        """Scatter `wire` into the plane; the digest."""
        digest: object = self._core.unpack(self._plan, 0, self.nbytes, wire, SEED, with_digest)
        return digest

    def check(self, wire: Wire) -> None:
        """Compare `wire` with what numpy says the plane's blocks are."""
        if not np.array_equal(wire.view(np.uint16), self._plane.wire(self._wire_axes)):
            raise CheckError(
                f"pack or unpack, {self._plane.axes} in memory, {self._wire_axes} on the wire: "
                "the bytes differ"
            )


def digest(data: Wire) -> object:
    """kvxfer's digest of a contiguous buffer."""
    from kvxfer import _core

    value: object = _core.digest(data, SEED)
    return value
