"""Encoding and decoding, by codec and SIMD variant: `pytest benches/micro --benchmark-only`."""

from __future__ import annotations

from typing import Any

import pytest
from baselines.host import DST_SEED, SRC_SEED
from kvbench.codecs import DATA_SEED, ENCODINGS, MOST_OFF, Coder
from kvbench.kv import KvPool
from kvbench.measure import MIB

from kvxfer import _core

SIZES = [1 * MIB, 64 * MIB]


@pytest.fixture(params=_core.simd_variants())
def variant(request: Any) -> Any:
    before = _core.simd_variant()
    _core.set_simd_variant(request.param)
    yield request.param
    _core.set_simd_variant(before)


@pytest.mark.parametrize("nbytes", SIZES, ids=lambda nbytes: f"{nbytes // MIB}MiB")
@pytest.mark.parametrize("direction", ["encode", "decode"])
@pytest.mark.parametrize("codec", ENCODINGS)
def test_codec(benchmark: Any, variant: str, codec: str, direction: str, nbytes: int) -> None:
    source = KvPool(nbytes, "thp", SRC_SEED, DATA_SEED)
    target = KvPool(nbytes, "thp", DST_SEED, None)
    coder, decoder = Coder(source, codec), Coder(target, codec)
    target.poison()
    coder.encode()
    work = coder.encode if direction == "encode" else lambda: decoder.decode(coder)
    rounds = 3 if variant == "scalar" else 5 if nbytes > MIB else 15
    benchmark.pedantic(work, rounds=rounds, warmup_rounds=1)
    if benchmark.stats is not None:  # it is with --benchmark-disable
        benchmark.extra_info["GBps"] = round(nbytes / benchmark.stats.stats.median / 1e9, 3)
    decoder.decode(coder)
    target.check_against(source, MOST_OFF[codec])
