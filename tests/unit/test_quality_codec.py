"""What a layer's K and V are after a codec, against the codecs' model in NumPy."""

from __future__ import annotations

import numpy as np
import pytest
from kvtest import codec_model
from kvtest.codec_model import Encoding

from kvxfer._quality_codec import RoundTrip
from kvxfer._quality_run import LayerKv

HEADS, TOKENS, SIZE = 2, 150, 48
FIRST = 70  # of the tokens that the layer holds


@pytest.fixture(scope="module")
def round_trip():
    with RoundTrip("bfloat16") as made:
        yield made


@pytest.fixture
def layer() -> LayerKv:
    rng = np.random.default_rng(5)
    values = rng.normal(size=(2, HEADS, TOKENS, SIZE)).astype(np.float32)
    values[0, :, :, 3] += 30  # an outlier channel in K, as models have them
    stored = (values.view(np.uint32) >> 16).astype(np.uint16)
    return LayerKv(2, FIRST, {"k": stored[0], "v": stored[1]})


def values(stored: np.ndarray) -> np.ndarray:
    return codec_model.to_float32(stored, "bfloat16")


def coded(
    stored: np.ndarray, encoding: Encoding, panels: list[tuple[int, int]]
) -> tuple[np.ndarray, int]:
    """What comes of a plane whose panels of tokens [begin, end) are coded, and their bytes."""
    result, size = stored.copy(), 0
    for head in range(HEADS):
        for begin, end in panels:
            rows = stored[head, begin:end]
            panel, marked = codec_model.encode_panel(rows, "bfloat16", encoding)
            assert not marked.any()
            decoded = codec_model.decode_panel(panel, "bfloat16", encoding, *rows.shape)
            result[head, begin:end], _ = codec_model.into_cache(decoded, "bfloat16")
            size += len(panel)
    return result, size


WHOLE = [(0, 64), (64, 128), (128, TOKENS)]
CHANNEL, ROW = Encoding("int8_channel"), Encoding("int8")


@pytest.mark.parametrize(
    ("codec", "k", "v", "panels"),
    [
        ("fp8_e4m3", Encoding("fp8_e4m3"), Encoding("fp8_e4m3"), WHOLE),
        ("fp8_e5m2(group=16)", *[Encoding("fp8_e5m2", group=16)] * 2, WHOLE),
        ("int8", CHANNEL, ROW, WHOLE),
        # Tokens 74 to 199 of the request are history: FIRST + 4 ... 220 - 20.
        ("tiered(recent=20, sinks=74)", CHANNEL, ROW, [(4, 68), (68, 130)]),
    ],
)
def test_what_arrives(round_trip, layer, codec, k, v, panels):
    arrived = round_trip(codec, layer, FIRST + TOKENS)
    size = 0
    for plane, encoding in (("k", k), ("v", v)):
        wanted, panel_bytes = coded(layer.planes[plane], encoding, panels)
        assert np.array_equal(arrived.planes[plane], wanted)
        assert not np.array_equal(wanted, layer.planes[plane])
        size += panel_bytes
    rows = 2 * HEADS * TOKENS
    raw = 2 * HEADS * (TOKENS - sum(end - begin for begin, end in panels))
    size += raw * SIZE * 2
    assert arrived.memory_bytes == rows * SIZE * 2
    assert size <= arrived.wire_bytes <= size + 4096  # and headers
    assert arrived.raw_rows == 0


def test_raw_changes_nothing(round_trip, layer):
    arrived = round_trip("raw", layer, FIRST + TOKENS)
    assert np.array_equal(arrived.planes["k"], layer.planes["k"])
    assert np.array_equal(arrived.planes["v"], layer.planes["v"])
    assert arrived.memory_bytes == arrived.wire_bytes == 2 * HEADS * TOKENS * SIZE * 2


def test_rows_that_go_raw_are_counted(round_trip, layer):
    layer.planes["v"][1, 17, 5] = 0x7F80  # infinity
    arrived = round_trip("int8", layer, FIRST + TOKENS)
    assert arrived.raw_rows == 1
    assert np.array_equal(arrived.planes["v"][1, 17], layer.planes["v"][1, 17])


def test_planes_of_unequal_size(round_trip):
    rng = np.random.default_rng(6)
    planes = {
        name: rng.normal(size=(1, 10, size)).astype(np.float32).view(np.uint32) >> 16
        for name, size in (("k", 24), ("v", 16))
    }
    layer = LayerKv(0, 0, {name: plane.astype(np.uint16) for name, plane in planes.items()})
    arrived = round_trip("fp8_e4m3", layer, 10)
    assert arrived.planes["k"].shape == (1, 10, 24)
    assert arrived.planes["v"].shape == (1, 10, 16)
    assert values(arrived.planes["v"]) == pytest.approx(values(layer.planes["v"]), rel=0.08)
