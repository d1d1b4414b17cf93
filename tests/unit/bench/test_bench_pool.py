"""The benchmark's caches: that a wrong byte would be noticed, wherever it is."""

from __future__ import annotations

import numpy as np
import pytest

from kvxfer._numbers import format_bytes, listed, parse_bytes, parse_count
from kvxfer.bench.case import BenchError, Case, WrongBytesError, plain_case
from kvxfer.bench.pool import TOLERANCE, Pool, block_tables


def make(**settings) -> Case:
    return Case(
        name="small", layers=2, planes=("k", "v"), heads=2, content=8, tokens=75, **settings
    )


def delivered(case: Case) -> tuple[Pool, list[np.ndarray]]:
    """A pool as a right transfer leaves it, made slot by slot from a filled one."""
    served, got = Pool(case), Pool(case)
    served.fill()
    got.poison()
    arrays = []
    kind = np.uint8 if case.dtype.startswith("float8") else np.uint16
    shape = (case.pool_blocks, case.heads, case.block_size, case.content)
    for (_, _, source), (_, _, target) in zip(served._planes(), got._planes(), strict=True):
        source, target = source.view(kind).reshape(shape), target.view(kind).reshape(shape)
        for order, (mine, theirs) in enumerate(zip(*block_tables(case), strict=True)):
            for slot in range(case.block_size):
                token = order * case.block_size + slot
                target[theirs, :, slot] = source[mine, :, slot] if token < case.tokens else 0
        arrays.append(target)
    return got, arrays


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float8_e4m3fn"])
@pytest.mark.parametrize("codec", ["raw", "int8"])
def test_accepts_what_is_right(dtype, codec):
    delivered(make(dtype=dtype))[0].check(codec)


@pytest.mark.parametrize("array", range(4))
@pytest.mark.parametrize(
    ("order", "slot"), [(0, 0), (4, 10), (4, 11), (4, 15)], ids=["first", "last", "rest", "end"]
)
def test_notices_one_bit(array, order, slot):
    case = make()
    pool, arrays = delivered(case)
    arrays[array][block_tables(case)[1][order], 1, slot, 3] ^= 1
    with pytest.raises(WrongBytesError, match=f"layer {array // 2}, plane {'kv'[array % 2]}"):
        pool.check("raw")


def test_notices_a_block_that_nobody_asked_for():
    case = make()
    pool, arrays = delivered(case)
    spare = next(b for b in range(case.pool_blocks) if b not in block_tables(case)[1])
    arrays[2][spare, 0, 0, 0] ^= 1
    with pytest.raises(WrongBytesError, match="nobody asked for"):
        pool.check("raw")


def test_notices_swapped_blocks_of_every_codec():
    case = make()
    first, second = block_tables(case)[1][:2]
    for codec in TOLERANCE:
        pool, arrays = delivered(case)
        arrays[1][[first, second]] = arrays[1][[second, first]]
        with pytest.raises(WrongBytesError):
            pool.check(codec)


def test_codecs_may_lose_as_much_as_they_do():
    case = make()
    pool, arrays = delivered(case)
    block = block_tables(case)[1][0]
    value = arrays[0][block, 0, 0, 0]
    arrays[0][block, 0, 0, 0] = value ^ 1  # the last bit of a bfloat16 below 1: 2^-8
    pool.check("int8")
    arrays[0][block, 0, 0, 0] = value ^ 0x40  # 0.25
    with pytest.raises(WrongBytesError, match="off by 0.25"):
        pool.check("int8")


def test_notices_nan():
    case = make()
    pool, arrays = delivered(case)
    arrays[0][block_tables(case)[1][0], 0, 0, 0] = 0x7FC0
    with pytest.raises(WrongBytesError, match="nan"):
        pool.check("fp8_e5m2")


@pytest.mark.parametrize("tokens", [1, 16, 17, 640])
@pytest.mark.parametrize("in_flight", [1, 2, 3, 7])
def test_parts_are_the_whole(tokens, in_flight):
    if in_flight > -(-tokens // 16):
        with pytest.raises(BenchError, match="as many blocks"):
            Case(name="parts", tokens=tokens, in_flight=in_flight)
        return
    case = Case(name="parts", tokens=tokens, in_flight=in_flight)
    parts = case.parts()
    assert len(parts) == in_flight
    assert [begin for begin, _ in parts] == [0, *(end for _, end in parts[:-1])]
    assert parts[-1][1] == tokens
    assert all(begin < end and begin % 16 == 0 for begin, end in parts)


@pytest.mark.parametrize("block_bytes", [8, 1000, 4096, 1 << 20])
def test_plain_cases_have_the_blocks_that_were_asked_for(block_bytes):
    case = plain_case("plain", block_bytes, 7)
    assert (case.block_bytes, case.runs, case.bytes) == (block_bytes, 7, 7 * block_bytes)


def test_cases_survive_the_wire_and_others_do_not():
    case = make(codec="int8", in_flight=2)
    assert Case.of(case.frame()) == case
    for change in ({"tokens": -1}, {"layers": "many"}, {"dtype": "int4"}, {"odd": 1}):
        with pytest.raises(BenchError):
            Case.of({**case.frame(), **change})
    with pytest.raises(BenchError):
        Case.of(None)


def test_numbers():
    assert [parse_bytes(text) for text in ("8", "16KiB", "16k", "2M", "1 GiB")] == [
        8, 16384, 16384, 2 << 20, 1 << 30,
    ]  # fmt: skip
    assert [parse_count(text) for text in ("8", "34k", "1.5k", "1M")] == [8, 34000, 1500, 1000000]
    assert listed(str)("raw, tiered(recent=3, sinks=4),int8") == [
        "raw", "tiered(recent=3, sinks=4)", "int8",
    ]  # fmt: skip
    assert [format_bytes(n) for n in (512, 16384, 3 << 19, 256 << 20)] == [
        "512 B", "16 KiB", "1.5 MiB", "256 MiB",
    ]  # fmt: skip
