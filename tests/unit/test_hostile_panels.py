"""Coded chunks as a peer must not send them: refused, and nothing is written outside the slice."""

from __future__ import annotations

import struct

import numpy as np
import pytest
from kvtest import chunk_model
from kvtest.chunk_model import (
    GUARD,
    HEADER_FIELDS,
    INT8,
    PLANE_FIELDS,
    PLANES_AT,
    Format,
    pack,
    pair,
)
from kvtest.codec_model import Encoding

import kvxfer
from kvxfer import _core


def header_fields() -> list[tuple[str, int, str]]:
    fields = [(name, at, letter) for name, (at, letter) in HEADER_FIELDS.items()]
    for plane in range(2):
        for name, (at, letter) in PLANE_FIELDS.items():
            fields.append((f"{name} of plane {plane}", PLANES_AT + 8 * plane + at, letter))
    return fields


@pytest.mark.parametrize(("name", "at", "letter"), header_fields())
def test_a_tampered_header_is_refused(name, at, letter):
    transfer = pair()
    source = chunk_model.plan(transfer, INT8, True)
    target = chunk_model.plan(transfer, INT8, False)
    made, _ = pack(source, 2, 9, 0)
    (value,) = struct.unpack_from(f"<{letter}", made, at)
    for other in {value ^ 1, value ^ 1 << (8 * struct.calcsize(letter) - 1)}:
        bad = bytearray(made)
        struct.pack_into(f"<{letter}", bad, at, other)
        with pytest.raises(kvxfer.TransferError) as caught:
            _core.unpack_panels(target, 2, 9, bad)
        if name != "exceptions":
            assert f" {name} {other}, expected {value};" in str(caught.value)
            assert caught.value.status == kvxfer.Status.PROTOCOL
        else:
            assert "coded rows" in str(caught.value) or "bytes" in str(caught.value)
    assert (transfer.consumer.memory == GUARD).all()
    _core.unpack_panels(target, 2, 9, made)
    assert not (transfer.consumer.memory == GUARD).all()


def test_what_fills_the_header_up_is_checked():
    transfer = pair()
    made, _ = pack(chunk_model.plan(transfer, INT8, True), 2, 9, 0)
    bad = bytearray(made)
    bad[63] = 1
    with pytest.raises(kvxfer.TransferError, match="PROTOCOL.*behind its last plane"):
        _core.unpack_panels(chunk_model.plan(transfer, INT8, False), 2, 9, bad)


def test_another_format_is_refused():
    transfer = pair()
    made, _ = pack(chunk_model.plan(transfer, INT8, True), 0, 4, 0)
    other = Format((Encoding("int8_channel"), Encoding("int8", group=16)))
    with pytest.raises(kvxfer.TransferError, match="group of plane 1 0, expected 16"):
        _core.unpack_panels(chunk_model.plan(transfer, other, False), 0, 4, made)
    with pytest.raises(kvxfer.TransferError, match="first panel 0, expected 4"):
        _core.unpack_panels(chunk_model.plan(transfer, INT8, False), 4, 8, made)


def test_chunks_of_another_length_are_refused():
    transfer = pair(strange=0.2)
    target = chunk_model.plan(transfer, INT8, False)
    made, exceptions = pack(chunk_model.plan(transfer, INT8, True), 0, 8, 0)
    assert exceptions > 4
    for size in [0, 1, 24, 63, 64, 100, len(made) - 16, len(made) - 1]:
        with pytest.raises(kvxfer.TransferError, match=rf"has {size} bytes; its header"):
            _core.unpack_panels(target, 0, 8, made[:size])
    with pytest.raises(kvxfer.TransferError, match="its header asks for"):
        _core.unpack_panels(target, 0, 8, made + bytes(16))
    assert (transfer.consumer.memory == GUARD).all()


@pytest.mark.parametrize(
    ("indices", "what"),
    [
        ([5, 5], "names raw row 5 behind row 5"),
        ([5, 4], "names raw row 4 behind row 5"),
        ([5, 400], "names raw row 400; it has 400 rows"),
        ([5, 2**32 - 1], "names raw row 4294967295"),
        ([5, 398], "whose panel is raw as a whole"),
    ],
)
def test_indices_of_raw_rows_are_checked(indices, what):
    # Of 100 tokens the last 10 are raw; panels of one layer are 50, 40 and 10 tokens for each head.
    transfer = pair(planes={"k": 32, "v": 32})
    form = Format(INT8.encodings, panel_tokens=50, raw_from=90)
    transfer.row(True, "a", "k", 0, 1)[0] = 0x7F80
    transfer.row(True, "a", "k", 1, 1)[0] = 0x7F80
    source = chunk_model.plan(transfer, form, True)
    target = chunk_model.plan(transfer, form, False)
    count = source.panels_per_layer()
    made, exceptions = pack(source, 0, count, 0)
    assert exceptions == 2
    at = len(made) - 2 * 64 - 16
    assert struct.unpack_from("<2I", made, at) == (1, 51)
    bad = bytearray(made)
    struct.pack_into("<2I", bad, at, *indices)
    with pytest.raises(kvxfer.TransferError, match=what):
        _core.unpack_panels(target, 0, count, bad)
    assert (transfer.consumer.memory == GUARD).all()


def test_garbage_writes_nothing_outside_the_slice():
    """Whatever a peer sends: refused, or decoded into the slice's own rows."""
    transfer = pair(strange=0.05, tokens=(3, 97))
    form = Format((Encoding("int8_channel"), Encoding("fp8_e4m3", "float32", 16)), raw_from=80)
    source = chunk_model.plan(transfer, form, True)
    target = chunk_model.plan(transfer, form, False)
    total = source.num_panels()
    made, _ = pack(source, 1, total - 1, 0)
    transfer.consumer.memory[...] = 0
    for panel in chunk_model.panels(transfer, form)[1:-1]:
        for token in panel.tokens:
            name = transfer.planes[panel.plane]
            transfer.row(False, panel.layer, name, panel.head, token)[...] = 0xFFFF
    outside = transfer.consumer.memory == 0
    transfer.consumer.memory[...] = GUARD
    rng = np.random.default_rng(1)
    outcomes = set()
    for _ in range(300):
        bad = np.frombuffer(made, np.uint8).copy()
        kind = rng.integers(0, 3)
        if kind == 0:  # anything behind a good header
            bad[64:] = rng.integers(0, 256, len(bad) - 64, np.uint8)
        elif kind == 1:  # bytes here and there
            where = rng.integers(0, len(bad), rng.integers(1, 40))
            bad[where] = rng.integers(0, 256, len(where), np.uint8)
        else:  # another number of exceptions, another length
            bad[20:24] = rng.integers(0, 4, 4, np.uint8) * (rng.integers(0, 3, 4) == 0)
            bad = bad[: rng.integers(0, len(bad) + 1)]
        try:
            _core.unpack_panels(target, 1, total - 1, bad)
            outcomes.add("decoded")
        except kvxfer.TransferError as error:
            outcomes.add(error.status)
        assert (transfer.consumer.memory[outside] == GUARD).all()
    assert outcomes == {"decoded", kvxfer.Status.PROTOCOL}
