"""Coded chunks: what is packed, and what the other side makes of it, against NumPy."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kv_model import Transfer, reference_digest, transfers
from kvtest import chunk_model
from kvtest.chunk_model import FOREVER, GUARD, INT8, Format, pack, pair
from kvtest.codec_model import Encoding
from kvtest.strategies import examples

import kvxfer
from kvxfer import _core

FLOATS = ["float32", "float16", "bfloat16"]
FLOAT8 = ["float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz"]
PAIRS = [("uint8", "uint8"), *itertools.product([*FLOATS, *FLOAT8], repeat=2)]


@pytest.fixture(autouse=True)
def _restore_variant():
    before = _core.simd_variant()
    yield
    _core.set_simd_variant(before)


@st.composite
def encodings(draw: st.DrawFn, element: str) -> Encoding:
    schemes = ["raw", "fp8_e4m3", "fp8_e5m2", "int8", "int8_channel"] if element in FLOATS else []
    scheme = draw(st.sampled_from(schemes or ["raw"]))
    scales = ["float32", "bfloat16"] + (["e8m0"] if scheme.startswith("fp8") else [])
    group = draw(st.sampled_from([0, 16, 32])) if scheme not in ("raw", "int8_channel") else 0
    return Encoding(scheme, draw(st.sampled_from(scales)), group)


@st.composite
def coded(draw: st.DrawFn) -> tuple[Transfer, Format]:
    """A transfer and its format: every scheme, raw stretches, either side's element types."""
    transfer = draw(transfers(st.sampled_from(PAIRS)))
    begin, end = transfer.tokens
    cut = st.integers(max(0, begin - 3), end + 3)
    return transfer, Format(
        tuple(draw(encodings(transfer.producer.element)) for _ in transfer.planes),
        transfer.producer.element,
        draw(st.sampled_from([2, 3, 7, 16, 64, 256])),
        draw(st.just(0) | cut),
        draw(st.just(FOREVER) | cut),
        draw(st.integers(0, 255)),
    )


@settings(max_examples=examples(100))
@given(st.data())
def test_moves_exactly_the_slice(data):
    transfer, form = data.draw(coded())
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    strange = data.draw(st.sampled_from([0, 0, 0.02, 0.3, 1]))
    chunk_model.fill_numbers(transfer, rng, strange)
    transfer.consumer.memory[...] = rng.integers(0, 256, transfer.consumer.memory.size, np.uint8)
    _core.set_simd_variant(data.draw(st.sampled_from(_core.simd_variants())))

    source = chunk_model.plan(transfer, form, True)
    target = chunk_model.plan(transfer, form, False)
    total = source.num_panels()
    assert target.num_panels() == total == len(chunk_model.panels(transfer, form))
    assert source.panels_per_layer() * len(transfer.layers) == total
    ends = sorted({*data.draw(st.lists(st.integers(0, total), max_size=3)), 0, total})

    untouched = transfer.consumer.memory.copy()
    produced = transfer.producer.memory.copy()
    loss = [chunk_model.deliver(transfer, form, *cut) for cut in itertools.pairwise(ends)]
    chunk_model.zero_tail(transfer)
    expected = transfer.consumer.memory.copy()
    transfer.consumer.memory[...] = untouched

    for (first, end), lost in zip(itertools.pairwise(ends), loss, strict=True):
        made, exceptions = pack(source, first, end, seed=first)
        model = chunk_model.chunk(transfer, form, first, end)
        assert made == model.wire
        assert exceptions == model.exceptions
        assert source.most_bytes(first, end) == model.most_bytes
        assert target.most_bytes(first, end) == model.most_bytes
        result = _core.unpack_panels(target, first, end, made, first)
        assert result == (
            reference_digest(made, first),
            (lost.clamped, lost.inexact),
            exceptions,
        )
    target.zero_tail()

    assert np.array_equal(transfer.consumer.memory, expected)
    assert np.array_equal(transfer.producer.memory, produced)


def moved(transfer: Transfer, form: Format) -> tuple[int, int]:
    """Move all of it, check it, and return what was lost."""
    source = chunk_model.plan(transfer, form, True)
    target = chunk_model.plan(transfer, form, False)
    total = source.num_panels()
    made, exceptions = pack(source, 0, total, 5)
    assert made == chunk_model.chunk(transfer, form, 0, total).wire
    lost = chunk_model.deliver(transfer, form, 0, total)
    expected = transfer.consumer.memory.copy()
    transfer.consumer.memory[...] = GUARD
    digest, loss, raw = _core.unpack_panels(target, 0, total, made, 5)
    assert digest == reference_digest(made, 5)
    assert loss == (lost.clamped, lost.inexact)
    assert raw == exceptions
    assert np.array_equal(transfer.consumer.memory, expected)
    return loss


@pytest.mark.parametrize("elements", PAIRS, ids="-".join)
@pytest.mark.parametrize("strange", [0, 0.1])
def test_every_pair_of_element_types(elements, strange):
    transfer = pair(elements, strange=strange)
    raw = Format((Encoding("raw"),) * 2, elements[0], raw_from=90)
    clamped, inexact = moved(transfer, raw)
    if elements[0] == elements[1]:
        assert (clamped, inexact) == (0, 0)
    if elements[0] in FLOATS:
        moved(transfer, Format((Encoding("int8_channel"), Encoding("fp8_e4m3")), elements[0]))


@pytest.mark.parametrize("variant", _core.simd_variants())
@pytest.mark.parametrize("elements", list(itertools.product(FLOATS, repeat=2)), ids="-".join)
@pytest.mark.parametrize("strange", [0, 0.05])
def test_every_variant_on_long_rows(variant, elements, strange):
    _core.set_simd_variant(variant)
    transfer = pair(elements, strange=strange, planes={"k": 128, "v": 80}, layers=["a"])
    for scheme in ("raw", "fp8_e4m3", "fp8_e5m2", "int8", "int8_channel"):
        moved(transfer, Format((Encoding(scheme),) * 2, elements[0]))


@pytest.mark.parametrize("scheme", ["fp8_e4m3", "fp8_e5m2", "int8", "int8_channel"])
def test_a_chunk_of_raw_rows_only(scheme):
    transfer = pair(strange=1)
    form = Format((Encoding(scheme),) * 2)
    source = chunk_model.plan(transfer, form, True)
    made, exceptions = pack(source, 0, source.num_panels(), 0)
    assert exceptions == 2 * 2 * 2 * 100
    assert len(made) == source.most_bytes(0, source.num_panels())
    moved(transfer, form)


@pytest.mark.parametrize("variant", _core.simd_variants())
@pytest.mark.parametrize("element", ["float16", "float8_e4m3fn"])
@pytest.mark.parametrize("scheme", ["fp8_e4m3", "int8", "int8_channel"])
def test_a_row_that_goes_raw_counts_by_its_elements(scheme, element, variant):
    """With int8_channel its codes, which are 0, stand for the zero point of the other rows."""
    _core.set_simd_variant(variant)
    transfer = pair(("bfloat16", element))
    for view in (view for layer in transfer.producer.views for view in layer):
        view[...] = 0x4800  # 2^17, more than the consumer can hold
    for layer, plane, head in itertools.product("ab", "kv", range(2)):
        for token in (3, 99):
            transfer.row(True, layer, plane, head, token)[:] = 0x3F80  # 1
            transfer.row(True, layer, plane, head, token)[5] = 0x7FC0  # NaN
    form = Format((Encoding(scheme),) * 2)
    assert moved(transfer, form) == (2 * 2 * 2 * (100 - 2) * 32, 0)
    for token, clamped in ((3, 0), (4, 1)):
        row = transfer.row(False, "a", "k", 1, token)
        assert (row[0] == {"float16": 0x7BFF, "float8_e4m3fn": 0x7E}[element]) == clamped


def test_stretches_that_travel_raw():
    transfer = pair(tokens=(10, 90))
    for until, start in [(14, 70), (0, 70), (14, FOREVER), (95, FOREVER), (0, 5), (50, 20)]:
        form = Format((Encoding("int8"), Encoding("raw")), panel_tokens=16, raw_until=until)
        moved(transfer, Format(form.encodings, "bfloat16", 16, until, start))
    rows = [transfer.row(side, "a", "k", 1, 12).copy() for side in (True, False)]
    assert np.array_equal(*rows)  # after the last, all of it is raw


@pytest.mark.parametrize("panel_tokens", [1, 99, 100, 256])
def test_panels_of_any_number_of_tokens(panel_tokens):
    moved(pair(strange=0.02), Format(INT8.encodings, panel_tokens=panel_tokens))


def test_bytes_of_panels_add_up():
    form = Format((Encoding("int8"), Encoding("raw")), "bfloat16", 16, 14, 70)
    transfer = pair(("bfloat16", "float32"), tokens=(10, 90), planes={"k": 24, "v": 40})
    listed = chunk_model.panels(transfer, form)
    for producing, width in ((True, 2), (False, 4)):
        plan = chunk_model.plan(transfer, form, producing)
        sizes = [len(panel.tokens) * [24, 40][panel.plane] * width for panel in listed]
        for first, end in itertools.combinations(range(0, len(listed) + 1, 5), 2):
            assert plan.memory_bytes(first, end) == sum(sizes[first:end])
        assert plan.memory_bytes(3, 3) == 0
        with pytest.raises(kvxfer.InvalidError, match=f"the slice has {len(listed)}"):
            plan.memory_bytes(0, len(listed) + 1)


def test_a_flipped_bit_shows_in_the_digest():
    transfer = pair(strange=0.05)
    target = chunk_model.plan(transfer, INT8, False)
    source = chunk_model.plan(transfer, INT8, True)
    made, _ = pack(source, 0, 8, 9)
    digest = reference_digest(made, 9)
    assert _core.unpack_panels(target, 0, 8, made, 9)[0] == digest
    assert _core.unpack_panels(target, 0, 8, made, 8)[0] != digest
    for position in [64, 65, len(made) // 2, len(made) - 1]:
        bad = bytearray(made)
        bad[position] ^= 0x10
        assert _core.unpack_panels(target, 0, 8, bad, 9)[0] != digest
    without = _core.unpack_panels(target, 0, 8, made, 9, with_digest=False)
    assert without[0] == (0, 0)


def test_a_wrong_plan_shows():
    """The comparison that the tests above rest on does fail when something is moved wrongly."""
    transfer = pair()
    made, _ = pack(chunk_model.plan(transfer, INT8, True), 0, 16, 0)
    chunk_model.deliver(transfer, INT8, 0, 16)
    expected = transfer.consumer.memory.copy()
    transfer.consumer_table.blocks[:2] = reversed(transfer.consumer_table.blocks[:2])
    _core.unpack_panels(chunk_model.plan(transfer, INT8, False), 0, 16, made)
    assert not np.array_equal(transfer.consumer.memory, expected)


@pytest.mark.parametrize(
    ("form", "what"),
    [
        (Format(INT8.encodings, panel_tokens=0), "panels of 0 tokens"),
        (Format(INT8.encodings, panel_tokens=257), "panels of 257 tokens"),
        (Format(INT8.encodings[:1]), "1 encodings are given for 2 planes"),
        (Format(INT8.encodings, "uint8"), "uint8"),
    ],
)
def test_a_format_that_does_not_fit_is_refused(form, what):
    with pytest.raises(kvxfer.InvalidError, match=what):
        chunk_model.plan(pair(), form, True)


def test_unknown_names_are_refused():
    with pytest.raises(kvxfer.InvalidError, match='scheme "zip" is unknown; there are raw'):
        _core.PanelFormat(encodings=[("zip", "float32", 0)])
    with pytest.raises(kvxfer.InvalidError, match='scale format "int4" is unknown'):
        _core.PanelFormat(encodings=[("raw", "int4", 0)])


def test_elements_that_cannot_become_the_consumers_are_a_mismatch():
    form = Format((Encoding("raw"),) * 2, "uint8")
    with pytest.raises(
        kvxfer.TransferError, match="MISMATCH.*producer's uint8 can't become bfloat16"
    ):
        chunk_model.plan(pair(("uint8", "bfloat16")), form, False)


def test_only_the_producer_packs():
    transfer = pair(("bfloat16", "float32"))
    plan = chunk_model.plan(transfer, INT8, False)
    with pytest.raises(kvxfer.InvalidError, match="a cache of float32 is asked to pack"):
        _core.pack_panels(plan, 0, 1, bytearray(plan.most_bytes(0, 1)))


def test_ranges_and_buffers_are_checked():
    transfer = pair()
    plan = chunk_model.plan(transfer, INT8, True)
    wire = bytearray(plan.most_bytes(0, plan.num_panels()))
    for first, end in [(0, plan.num_panels() + 1), (4, 3), (2**32 - 1, 2**32 - 1)]:
        with pytest.raises(kvxfer.InvalidError, match="panels"):
            _core.pack_panels(plan, first, end, wire)
        with pytest.raises(kvxfer.InvalidError, match="panels"):
            _core.unpack_panels(plan, first, end, wire)
    for empty in (0, plan.num_panels()):
        with pytest.raises(kvxfer.InvalidError, match="no panels"):
            _core.pack_panels(plan, empty, empty, wire)
    with pytest.raises(kvxfer.InvalidError, match="do not fit in a buffer"):
        _core.pack_panels(plan, 0, 2, wire[: plan.most_bytes(0, 2) - 1])
