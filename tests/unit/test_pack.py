"""Pack on one side, unpack on the other, for drawn pairs of caches, against NumPy."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kv_model import ORDERS, Side, Table, Transfer, fill, make_side, reference_digest, transfers

import kvxfer
from kvxfer import _core


@pytest.fixture(autouse=True)
def _restore_variant():
    before = _core.simd_variant()
    yield
    _core.set_simd_variant(before)


def move(transfer: Transfer, order: str, cuts: list[float]) -> bytes:
    """Move the transfer in chunks that end near these shares of the wire; returns the wire."""
    source, target = transfer.plan(True, order), transfer.plan(False, order)
    total = source.wire_bytes()
    assert target.wire_bytes() == total
    ends = sorted({source.row_floor(int(cut * total)) for cut in cuts} | {0, total})
    assert all(target.row_floor(end) == end for end in ends)
    wire = bytearray()
    for seed, (begin, end) in enumerate(itertools.pairwise(ends)):
        chunk = np.full(end - begin + 1, 0xEE, np.uint8)
        packed = _core.pack(source, begin, end, chunk, seed)
        assert chunk[-1] == 0xEE
        assert _core.unpack(target, begin, end, chunk, seed) == packed
        assert packed == reference_digest(chunk[:-1].tobytes(), seed)
        wire += chunk[:-1].tobytes()
    _core.zero_tail(target)
    return bytes(wire)


@given(st.data())
def test_moves_exactly_the_slice(data):
    transfer = data.draw(transfers())
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    for side in (transfer.producer, transfer.consumer):
        fill(side, rng)
    _core.set_simd_variant(data.draw(st.sampled_from(_core.simd_variants())))
    order = data.draw(st.sampled_from(ORDERS))
    if data.draw(st.booleans()):
        order = _core.choose_wire_order(
            transfer.producer.layout(), transfer.consumer.layout(), data.draw(st.booleans())
        )
    expected_wire = transfer.expected_wire(order)
    expected = transfer.expected_memory()
    produced = transfer.producer.memory.copy()

    wire = move(transfer, order, data.draw(st.lists(st.floats(0, 1), max_size=4)))

    assert wire == expected_wire
    assert np.array_equal(transfer.consumer.memory, expected)
    assert np.array_equal(transfer.producer.memory, produced)


def pair(
    producer: dict[str, object], consumer: dict[str, object], tokens: int, **common: object
) -> Transfer:
    """Two sides of one model; the producer starts at block 0, the consumer with the last one."""
    made: list[Side] = []
    for own in (producer, consumer):
        shape = {
            "layers": ["a", "b"],
            "planes": {"k": 64, "v": 64},
            "num_heads": 4,
            "num_blocks": 8,
            "block_size": 16,
            "axes": "BHNC",
        }
        made.append(make_side(**{**shape, **common, **own}))
    rng = np.random.default_rng(7)
    for side in made:
        fill(side, rng)
    first, second = made
    return Transfer(
        first,
        second,
        Table(list(range(first.num_blocks)), 0, 0),
        Table(list(reversed(range(second.num_blocks))), 0, 0),
        first.layers,
        list(first.planes),
        (0, first.num_heads),
        (0, tokens),
    )


@pytest.mark.parametrize("variant", _core.simd_variants())
@pytest.mark.parametrize("digest", [True, False])
@pytest.mark.parametrize("offset", [0, 16, 62])
def test_every_variant_on_long_runs(variant, digest, offset):
    _core.set_simd_variant(variant)
    shape = {"num_heads": 8, "planes": {"k": 128, "v": 128}, "num_blocks": 40}
    transfer = pair({"axes": "BNHC"}, {"axes": "BHNC", "offset": offset}, 40 * 16 - 5, **shape)
    expected = transfer.expected_memory()
    source, target = transfer.plan(True, "LPTHN"), transfer.plan(False, "LPTHN")
    wire = np.zeros(source.wire_bytes(), np.uint8)
    packed = _core.pack(source, 0, wire.size, wire, 3, digest)
    assert packed == (reference_digest(wire.tobytes(), 3) if digest else (0, 0))
    assert _core.unpack(target, 0, wire.size, wire, 3, digest) == packed
    _core.zero_tail(target)
    assert np.array_equal(transfer.consumer.memory, expected)


@pytest.mark.parametrize("variant", _core.simd_variants())
@pytest.mark.parametrize("content", [80, 33])
def test_runs_of_no_whole_stripes(variant, content):
    _core.set_simd_variant(variant)
    transfer = pair({"axes": "BNHC"}, {"axes": "BHNC"}, 121, planes={"k": content, "v": 64})
    expected = transfer.expected_memory()
    wire = move(transfer, "LPTHN", [0.3, 0.31, 0.9])
    assert wire == transfer.expected_wire("LPTHN")
    assert np.array_equal(transfer.consumer.memory, expected)


def test_zero_tail_leaves_full_blocks_and_leading_slots_alone():
    transfer = pair({}, {"block_size": 8, "num_blocks": 16}, 16)
    before = transfer.consumer.memory.copy()
    _core.zero_tail(transfer.plan(False, "LPTHN"))
    assert np.array_equal(transfer.consumer.memory, before)

    transfer.consumer_table.first_slot = 5
    transfer.tokens = (1, 9)  # slots 6 and 7 of one block, 0 to 5 of the next
    _core.zero_tail(transfer.plan(False, "LPTHN"))
    for view in itertools.chain.from_iterable(transfer.consumer.views):
        first, second = transfer.consumer_table.blocks[:2]
        assert not view[second, :, 6:].any()
        view[second, :, 6:] = 1
        assert view[first].any()
    assert np.count_nonzero(transfer.consumer.memory != before) <= 2 * 2 * 4 * 2 * 64 * 2


def test_a_wrong_plan_shows():
    """The comparison that the tests above rest on does fail when something is moved wrongly."""
    transfer = pair({}, {"axes": "BNHC"}, 100)
    expected = transfer.expected_memory()
    wire = np.zeros(transfer.plan(True, "LPTHN").wire_bytes(), np.uint8)
    _core.pack(transfer.plan(True, "LPTHN"), 0, wire.size, wire)
    wrong = transfer.plan(False, "LPTNH")
    assert wrong.wire_bytes() == wire.size
    _core.unpack(wrong, 0, wire.size, wire)
    assert not np.array_equal(transfer.consumer.memory, expected)


def test_a_corrupted_wire_byte_changes_the_digest():
    transfer = pair({}, {}, 100)
    plan = transfer.plan(True, "LPTHN")
    wire = np.zeros(plan.wire_bytes(), np.uint8)
    packed = _core.pack(plan, 0, wire.size, wire)
    for position in (0, 1, 63, 64, wire.size // 2, wire.size - 1):
        wire[position] ^= 0x10
        assert _core.unpack(transfer.plan(False, "LPTHN"), 0, wire.size, wire) != packed
        wire[position] ^= 0x10
    assert _core.unpack(transfer.plan(False, "LPTHN"), 0, wire.size, wire) == packed


def test_ranges_off_row_boundaries_and_short_buffers_are_refused():
    transfer = pair({}, {}, 16)
    plan = transfer.plan(True, "LPTHN")
    wire = np.zeros(plan.wire_bytes(), np.uint8)
    for begin, end in ((1, 128), (0, 127), (128, 0), (0, wire.size + 128)):
        with pytest.raises(kvxfer.InvalidError):
            _core.pack(plan, begin, end, wire)
    with pytest.raises(kvxfer.InvalidError, match="do not fit in a buffer of 100 bytes"):
        _core.pack(plan, 0, 128, wire[:100])
    assert _core.pack(plan, 128, 128, wire, 5) == reference_digest(b"", 5)


def test_the_wire_buffer_must_be_writable_to_pack():
    plan = pair({}, {}, 16).plan(True, "LPTHN")
    with pytest.raises(BufferError):
        _core.pack(plan, 0, plan.wire_bytes(), bytes(plan.wire_bytes()))
