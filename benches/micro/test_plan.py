"""Making copy plans, by the number of blocks. Run with `pytest benches/micro --benchmark-only`."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvxfer import _core

BLOCKS = [128, 1_000, 8_000, 34_000, 112_000]
SHAPES = {"llama-8b": (8, 128), "llama-70b-tp8": (1, 128), "deepseek-mla": (1, 576)}
BLOCK_SIZE = 16


@pytest.mark.parametrize("blocks", BLOCKS)
@pytest.mark.parametrize("shape", SHAPES)
def test_plan(benchmark: Any, shape: str, blocks: int) -> None:
    heads, content = SHAPES[shape]
    block_bytes = BLOCK_SIZE * heads * content * 2
    total = 2 * blocks
    # A plan looks at no memory: any address does.
    layout = _core.CacheLayout(
        num_blocks=total,
        block_size=BLOCK_SIZE,
        num_heads=heads,
        layers=["layer"],
        planes=[("kv", content)],
        views=[(1 << 40, block_bytes, content * 2, heads * content * 2, 2)],
        element="float16",
        first_head=0,
        model="",
    )
    table = np.random.default_rng(1).permutation(total)[:blocks].tolist()
    tokens = blocks * BLOCK_SIZE

    def plan() -> Any:
        return _core.CopyPlan(
            layout,
            _core.BlockTable(table),
            _core.Slice([0], 0, heads, 0, tokens),
            _core.tile_ends(0, tokens, BLOCK_SIZE, 0, BLOCK_SIZE, 0),
            "LPTHN",
            [0],
        )

    made = benchmark(plan)
    assert made.wire_bytes() == tokens * heads * content * 2
