"""Pack, unpack and digest by layout and size. Run with `pytest benches/micro --benchmark-only`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from baselines.host import DATA_SEED, SRC_SEED
from kvbench.measure import MIB
from kvbench.memory import POISON, Pool
from kvbench.plans import Packer, digest
from kvbench.shapes import PagedPlane, Shape

SIZES = [1 * MIB, 16 * MIB, 256 * MIB]
SHAPES = {
    "llama-8b": Shape(16, 8, 128),
    "llama-70b-tp8": Shape(16, 1, 128),
    "deepseek-mla": Shape(64, 1, 576),
}
LAYOUTS = {"same": "BNHC", "transposed": "BHNC"}


def _size_name(nbytes: int) -> str:
    return f"{nbytes // MIB}MiB"


def _whole_blocks(shape: Shape, nbytes: int) -> int:
    return nbytes - nbytes % shape.block_bytes


def _run(benchmark: Any, nbytes: int, work: Callable[[], object]) -> None:
    benchmark.pedantic(work, rounds=15, warmup_rounds=2)
    if benchmark.stats is not None:  # it is with --benchmark-disable
        benchmark.extra_info["GBps"] = round(nbytes / benchmark.stats.stats.median / 1e9, 3)


@pytest.mark.parametrize("with_digest", [True, False], ids=["digest", "no_digest"])
@pytest.mark.parametrize("nbytes", SIZES, ids=_size_name)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", SHAPES)
def test_pack(benchmark: Any, shape: str, layout: str, nbytes: int, with_digest: bool) -> None:
    nbytes = _whole_blocks(SHAPES[shape], nbytes)
    plane = PagedPlane(SHAPES[shape], "BNHC", nbytes, "thp", SRC_SEED, DATA_SEED)
    packer = Packer(plane, LAYOUTS[layout])
    wire = Pool(nbytes)
    packer.pack(wire.bytes)
    packer.check(wire.bytes)
    _run(benchmark, nbytes, lambda: packer.pack(wire.bytes, with_digest))
    packer.check(wire.bytes)


@pytest.mark.parametrize("with_digest", [True, False], ids=["digest", "no_digest"])
@pytest.mark.parametrize("nbytes", SIZES, ids=_size_name)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", SHAPES)
def test_unpack(benchmark: Any, shape: str, layout: str, nbytes: int, with_digest: bool) -> None:
    nbytes = _whole_blocks(SHAPES[shape], nbytes)
    plane = PagedPlane(SHAPES[shape], "BNHC", nbytes, "thp", SRC_SEED, None)
    plane.pool.fill(POISON)
    unpacker = Packer(plane, LAYOUTS[layout])
    wire = Pool(nbytes)
    wire.fill_random(DATA_SEED)
    _run(benchmark, nbytes, lambda: unpacker.unpack(wire.bytes, with_digest))
    unpacker.check(wire.bytes)
    plane.check_others(POISON)


@pytest.mark.parametrize("nbytes", SIZES, ids=_size_name)
def test_digest(benchmark: Any, nbytes: int) -> None:
    data = Pool(nbytes)
    data.fill_random(DATA_SEED)
    before = digest(data.bytes)
    _run(benchmark, nbytes, lambda: digest(data.bytes))
    assert digest(data.bytes) == before
    data.bytes[nbytes // 2] ^= 1
    assert digest(data.bytes) != before
