"""The codec kernels against the model of their specification, and 8-bit floats against torch."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvtest import codec_model as model
from kvtest.codec_model import FLOAT8, STORAGE, Encoding

import kvxfer
from kvxfer import _core

VARIANTS = _core.simd_variants()
WIDE = ["float32", "float16", "bfloat16"]
SCHEMES = ["fp8_e4m3", "fp8_e5m2", "int8", "int8_channel"]
POISON = 0xA5


@pytest.fixture(autouse=True)
def _restore_variant():
    before = _core.simd_variant()
    yield
    _core.set_simd_variant(before)


def as_tuple(encoding: Encoding) -> tuple[str, str, int]:
    return encoding.scheme, encoding.scale, encoding.group


def encode(stored: np.ndarray, element: str, encoding: Encoding, gap: int = 0, offset: int = 0):
    """The rows go in at odd places, in another order than they lie in memory."""
    rows, content = stored.shape
    width = content * stored.itemsize
    memory = np.full(offset + rows * (width + gap), POISON, np.uint8)
    places = [offset + (rows - 1 - row) * (width + gap) for row in range(rows)]
    for row, place in enumerate(places):
        memory[place : place + width] = np.ascontiguousarray(stored[row]).view(np.uint8)
    return _core.encode_panel(as_tuple(encoding), element, memory, places, content)


def decode(coded, encoding: Encoding, source, target, rows: int, content: int, gap=0, offset=0):
    storage = STORAGE[target[0]]
    width = content * storage().itemsize
    memory = np.full(offset + rows * (width + gap), POISON, np.uint8)
    places = [offset + (rows - 1 - row) * (width + gap) for row in range(rows)]
    loss = _core.decode_panel(as_tuple(encoding), source, target, coded, memory, places, content)
    decoded = np.stack([memory[place : place + width].view(np.uint8) for place in places])
    for place in places:
        memory[place : place + width] = POISON
    assert (memory == POISON).all(), "something was written outside the rows"
    return np.ascontiguousarray(decoded).view(storage).reshape(rows, content), loss


@st.composite
def encodings(draw, schemes=("raw", *SCHEMES)):
    scheme = draw(st.sampled_from(schemes))
    formats = ["float32", "bfloat16"] + (["e8m0"] if scheme.startswith("fp8") else [])
    group = 0 if scheme in ("raw", "int8_channel") else draw(st.sampled_from([0, 1, 16, 32, 100]))
    return Encoding(scheme, draw(st.sampled_from(formats)), group)


@st.composite
def panels(draw, elements=WIDE):
    element = draw(st.sampled_from(elements))
    rows = draw(st.one_of(st.integers(1, 9), st.sampled_from([16, 64, 256])))
    content = draw(st.one_of(st.integers(1, 100), st.sampled_from([64, 128, 576])))
    kind = draw(st.sampled_from(["normal", "normal", "any bits", "special", "zero", "channels"]))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    return element, make_panel(rng, element, rows, content, kind)


def make_panel(rng, element: str, rows: int, content: int, kind: str) -> np.ndarray:
    storage = STORAGE[element]
    if kind == "any bits":
        return rng.integers(0, 2 ** (8 * storage().itemsize), (rows, content), dtype=storage)
    values = rng.standard_normal((rows, content))
    if kind == "channels":  # an outlier and an offset for some channels, as keys have them
        values = values * np.exp(rng.standard_normal(content)) + 8 * rng.standard_normal(content)
    values *= 2.0 ** rng.integers(-20, 8)
    if kind == "zero":
        values *= rng.random((rows, 1)) < 0.5
    if kind == "special":
        special = [0.0, -0.0, np.inf, -np.inf, np.nan, 2.0**-149, -(2.0**-130), 2.0**100, 2.0**15]
        where = rng.random((rows, content)) < 0.3 / content
        values = np.where(where, rng.choice(special, (rows, content)), values)
        # Beyond the smallest normal number of float16.
        values[rng.integers(0, rows)] *= 2.0**-20
    return model.into_cache(values.astype(np.float32), element)[0]


def caches(draw):
    element = draw(st.sampled_from([*WIDE, *FLOAT8]))
    if element not in FLOAT8:
        return element, 1.0
    return element, float(np.float32(draw(st.floats(0.01, 4.0))))


@given(st.data())
def test_panels_follow_the_specification(data):
    element, stored = data.draw(panels())
    encoding = data.draw(encodings())
    _core.set_simd_variant(data.draw(st.sampled_from(VARIANTS)))
    rows, content = stored.shape
    gap, offset = data.draw(st.integers(0, 70)), data.draw(st.integers(0, 63))

    coded, marked = encode(stored, element, encoding, gap, offset)
    expected, mask = model.encode_panel(stored, element, encoding)
    assert marked == list(np.flatnonzero(mask))
    assert coded == expected
    assert len(coded) == _core.panel_bytes(as_tuple(encoding), element, rows, content)

    target = caches(data.draw)
    found, loss = decode(coded, encoding, (element, 1.0), target, rows, content, gap, offset)
    if encoding.scheme == "raw":
        wanted, *wanted_loss = model.convert(stored, element, target[0], 1.0, target[1])
    else:
        values = model.decode_panel(expected, element, encoding, rows, content)
        wanted, clamped = model.into_cache(values, *target)
        wanted_loss = [clamped, 0]
    np.testing.assert_array_equal(found, wanted)
    assert list(loss) == wanted_loss


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_bytes_that_no_encoder_makes_are_decoded_as_specified(variant, scheme):
    _core.set_simd_variant(variant)
    rng = np.random.default_rng(3)
    for scale in ("float32", "bfloat16"):
        encoding = Encoding(scheme, scale)
        for content in (1, 33, 64, 128):
            size = model.panel_bytes("bfloat16", encoding, 8, content)
            coded = rng.integers(0, 256, size, np.uint8).tobytes()
            for target in (*WIDE, *FLOAT8):
                found, loss = decode(coded, encoding, ("bfloat16", 1.0), (target, 1.0), 8, content)
                values = model.decode_panel(coded, "bfloat16", encoding, 8, content)
                wanted, clamped = model.into_cache(values, target)
                np.testing.assert_array_equal(found, wanted)
                assert loss == (clamped, 0)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_bfloat16(variant, scheme):
    _core.set_simd_variant(variant)
    stored = np.arange(65536, dtype=np.uint16).reshape(256, 256)
    encoding = Encoding(scheme, "bfloat16", 0 if scheme == "int8_channel" else 64)
    coded, marked = encode(stored, "bfloat16", encoding)
    expected, mask = model.encode_panel(stored, "bfloat16", encoding)
    assert coded == expected
    assert marked == list(np.flatnonzero(mask)) == [*range(113, 128), *range(241, 256)]
    found, _ = decode(coded, encoding, ("bfloat16", 1.0), ("bfloat16", 1.0), 256, 256)
    values = model.decode_panel(expected, "bfloat16", encoding, 256, 256)
    np.testing.assert_array_equal(found, model.into_cache(values, "bfloat16")[0])


def test_a_wrong_byte_would_show():
    """The comparison above is worth something: it tells rounding to even from rounding up."""
    stored = model.into_cache(np.array([[448, 2.125, 2.375, -2.125]], np.float32), "float32")[0]
    encoding = Encoding("fp8_e4m3", "float32")
    coded, _ = encode(stored, "float32", encoding)
    decoded = model.decode_panel(coded, "float32", encoding, 1, 4)
    assert decoded.tolist() == [[448, 2.0, 2.5, -2.0]]


@given(st.data())
def test_conversions_follow_the_specification(data):
    elements = [*WIDE, *FLOAT8]
    of = data.draw(st.sampled_from(elements))
    scales = st.sampled_from([0.25, 0.5, 1.0, 2.0, 0.3, 1.7, 448.0])
    source = of, data.draw(scales) if of in FLOAT8 else 1.0
    to = data.draw(st.sampled_from(elements))
    target = to, data.draw(scales) if to in FLOAT8 else 1.0
    count = data.draw(st.integers(1, 700))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    kind = data.draw(st.sampled_from(["normal", "any bits", "special"]))
    if of in FLOAT8:
        stored = rng.integers(0, 256, count, np.uint8)
    else:
        stored = make_panel(rng, of, 1, count, kind)[0]
    _core.set_simd_variant(data.draw(st.sampled_from(VARIANTS)))

    assert _core.can_convert(source, target)
    converted = np.empty(count, STORAGE[to])
    loss = _core.convert(source, target, stored, converted, count)
    wanted, *wanted_loss = model.convert(stored, of, to, source[1], target[1])
    np.testing.assert_array_equal(converted, wanted)
    assert list(loss) == wanted_loss


@pytest.mark.parametrize(
    ("of", "to", "lost"),
    [
        # The same bytes mean half as much in fnuz, but those that are NaN or infinity in OCP.
        ("float8_e4m3fn", "float8_e4m3fnuz", 0),
        ("float8_e4m3fnuz", "float8_e4m3fn", 2),
        ("float8_e5m2", "float8_e5m2fnuz", 2),  # the infinities
        ("float8_e5m2fnuz", "float8_e5m2", 8),
    ],
)
def test_dialects_convert_exactly_with_the_doubled_scale(of, to, lost):
    scale = 0.37
    scales = (scale, 2 * scale) if to.endswith("fnuz") else (scale, scale / 2)
    codes = np.arange(256, dtype=np.uint8)
    converted = np.empty(256, np.uint8)
    loss = _core.convert((of, scales[0]), (to, scales[1]), codes, converted, 256)
    assert loss == (0, lost)
    equal = converted == codes
    assert equal.sum() >= 247


def test_a_gpu_with_its_own_dialect_encodes_the_same_bytes():
    """gfx942 has fnuz only: half the largest number (224, not its own 240) with twice the scale."""
    rng = np.random.default_rng(5)
    values = (rng.standard_normal((256, 128)) * np.exp(rng.standard_normal((256, 1)))).astype(
        np.float32
    )
    values[0] = 0
    values[1, ::2] = -1e-9
    for scheme, element, largest in (
        ("fp8_e4m3", "float8_e4m3fnuz", 224),
        ("fp8_e5m2", "float8_e5m2fnuz", 28672),
    ):
        for scale_format in ("float32", "bfloat16", "e8m0"):
            encoding = Encoding(scheme, scale_format)
            stored = model.into_cache(values, "float32")[0]
            coded, marked = encode(stored, "float32", encoding)
            assert marked == []
            amax = np.abs(values).max(axis=1)
            scale = model.scale_up(
                np.maximum(amax / np.float32(2 * largest), model.SMALLEST_SCALE), scale_format
            )
            doubled = np.float32(2) * scale
            scaled = np.clip(values * (np.float32(1) / doubled)[:, None], -largest, largest)
            codes = model.round_float8(scaled.astype(np.float32), element)
            codes[codes == 0x80] = 0  # the only NaN there is: what is negative and underflows
            assert codes.tobytes() == coded[: values.size]


TORCH = {
    "float8_e4m3fn": "float8_e4m3fn",
    "float8_e4m3fnuz": "float8_e4m3fnuz",
    "float8_e5m2": "float8_e5m2",
    "float8_e5m2fnuz": "float8_e5m2fnuz",
}


@pytest.mark.parametrize("element", FLOAT8)
def test_every_code_is_what_torch_takes_it_for(element):
    torch = pytest.importorskip("torch", reason="torch is not installed")
    codes = np.arange(256, dtype=np.uint8)
    found = np.empty(256, np.float32)
    _core.convert((element, 1.0), ("float32", 1.0), codes, found, 256)
    expected = torch.from_numpy(codes).view(getattr(torch, TORCH[element])).float().numpy()
    np.testing.assert_array_equal(found, expected)
    numbers = ~np.isnan(expected)
    np.testing.assert_array_equal(np.signbit(found[numbers]), np.signbit(expected[numbers]))


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("element", FLOAT8)
def test_numbers_round_as_torch_rounds_them(element, variant):
    torch = pytest.importorskip("torch", reason="torch is not installed")
    _core.set_simd_variant(variant)
    rng = np.random.default_rng(2)
    bits = np.arange(65536, dtype=np.uint32) << 16  # every bfloat16, and some between them
    values = np.concatenate([bits, bits + rng.integers(0, 65536, 65536, np.uint32)]).view(
        np.float32
    )
    # What is beyond the largest is clamped here and becomes one thing or another in torch.
    values = values[np.abs(values) <= model.largest_of(element)]
    found = np.empty(values.size, np.uint8)
    loss = _core.convert(("float32", 1.0), (element, 1.0), values, found, values.size)
    assert loss == (0, 0)
    expected = torch.from_numpy(values.copy()).to(getattr(torch, TORCH[element]))
    np.testing.assert_array_equal(found, expected.view(torch.uint8).numpy())


@pytest.mark.parametrize("variant", VARIANTS)
def test_flushing_subnormal_numbers_in_the_thread_changes_nothing(variant):
    torch = pytest.importorskip("torch", reason="torch is not installed")
    _core.set_simd_variant(variant)
    stored = np.random.default_rng(4).integers(0, 2**24, (4, 128), np.uint32)
    encoding = Encoding("fp8_e5m2")
    expected, _ = model.encode_panel(stored, "float32", encoding)
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush subnormal numbers")
    try:
        assert encode(stored, "float32", encoding)[0] == expected
    finally:
        torch.set_flush_denormal(False)


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_environment_forces_a_variant_here_too(variant):
    code = "from kvxfer import _core; print(_core.simd_variant())"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "KVXFER_SIMD": variant},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout.strip() == variant


def test_what_makes_no_sense_is_refused():
    row = np.zeros(16, np.uint16)

    def encode_as(scheme: str, scale: str = "bfloat16", element: str = "bfloat16"):
        return _core.encode_panel((scheme, scale, 0), element, row, [0], 4)

    with pytest.raises(kvxfer.InvalidError, match='scheme "int7" is unknown; there are raw, fp8'):
        encode_as("int7")
    with pytest.raises(kvxfer.InvalidError, match='scale format "float16" is unknown'):
        encode_as("int8", "float16")
    with pytest.raises(kvxfer.InvalidError, match="int8 of bfloat16: e8m0 scales are for fp8"):
        encode_as("int8", "e8m0")
    with pytest.raises(kvxfer.InvalidError, match="int8 of uint8: only float32, float16 and"):
        encode_as("int8", element="uint8")
    with pytest.raises(kvxfer.InvalidError, match="do not lie in a buffer of 32 bytes"):
        _core.encode_panel(("int8", "float32", 0), "bfloat16", row, [26], 4)
    with pytest.raises(kvxfer.InvalidError, match="a panel has at most 256 rows, not 257"):
        _core.encode_panel(("int8", "float32", 0), "bfloat16", row, [0] * 257, 4)
    assert not _core.can_convert(("uint8", 1.0), ("float32", 1.0))
    assert not _core.can_convert(("bfloat16", 2.0), ("float32", 1.0))
    with pytest.raises(kvxfer.InvalidError, match="uint8 cannot be converted to float32"):
        _core.convert(("uint8", 1.0), ("float32", 1.0), row, np.zeros(4, np.float32), 1)
    for scheme in ("raw", "int8_channel"):
        with pytest.raises(kvxfer.InvalidError, match=f"{scheme} of bfloat16: .* a group of 8 "):
            _core.encode_panel((scheme, "float32", 8), "bfloat16", row, [0], 4)


@pytest.mark.parametrize("scale", [2.0**-127, 2.0**-149, 0.0, -1.0, np.inf, np.nan])
def test_scales_without_an_inverse_are_refused(scale):
    fp8, codes, out = "float8_e4m3fn", np.zeros(16, np.uint8), np.zeros(16, np.float32)
    panel = _core.encode_panel(("int8", "float32", 0), "float32", out, [0], 4)[0]
    named = f"{fp8} of scale {scale:.9g}".replace("+", r"\+")
    for source, target in [((fp8, scale), ("float32", 1.0)), ((fp8, scale),) * 2]:
        assert not _core.can_convert(source, target)
        with pytest.raises(kvxfer.InvalidError, match=named + ".*at least 2\\^-126"):
            _core.convert(source, target, codes, out, 4)
    with pytest.raises(kvxfer.InvalidError, match=f"can.*become {named}|converted to {named}"):
        _core.decode_panel(
            ("int8", "float32", 0), ("float32", 1.0), (fp8, scale), panel, codes, [0], 4
        )
    with pytest.raises(kvxfer.InvalidError, match="float32 of scale 2; a scale is"):
        _core.decode_panel(
            ("int8", "float32", 0), ("float32", 1.0), ("float32", 2.0), panel, out, [0], 4
        )
    assert _core.can_convert((fp8, 2.0**-126), ("float32", 1.0))
