"""docs/coded_chunks.md's panels, written again in NumPy: what the codec kernels are tested against.

A row's elements come in as they are stored (`uint8`, `uint16` or `uint32`), with the name of their
type. 8-bit floats are rounded by looking for the nearest entry of a table, not with bit tricks.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

F32 = np.float32
Stored = NDArray[np.unsignedinteger]
Floats = NDArray[np.float32]

STORAGE = {"float32": np.uint32, "float16": np.uint16, "bfloat16": np.uint16, "uint8": np.uint8}
# Exponent bits, mantissa bits, bias, and how the top of the range is used.
FLOAT8 = {
    "float8_e4m3fn": (4, 3, 7, "fn"),
    "float8_e4m3fnuz": (4, 3, 8, "fnuz"),
    "float8_e5m2": (5, 2, 15, "ieee"),
    "float8_e5m2fnuz": (5, 2, 16, "fnuz"),
}
STORAGE |= dict.fromkeys(FLOAT8, np.uint8)

LARGEST = {"fp8_e4m3": 448, "fp8_e5m2": 57344, "int8": 127}
SCALE_BYTES = {"float32": 4, "bfloat16": 2, "e8m0": 1}
SMALLEST_SCALE = F32(2.0**-120)


@dataclass(frozen=True)
class Encoding:
    scheme: str
    scale: str = "bfloat16"
    group: int = 0


def float8_value(code: int, element: str) -> float:
    exponent_bits, mantissa_bits, bias, top = FLOAT8[element]
    sign = -1.0 if code & 0x80 else 1.0
    magnitude = code & 0x7F
    exponent, mantissa = magnitude >> mantissa_bits, magnitude & ((1 << mantissa_bits) - 1)
    if top == "fnuz" and code == 0x80:
        return float("nan")
    if top == "fn" and magnitude == 0x7F:
        return float("nan")
    if top == "ieee" and exponent == (1 << exponent_bits) - 1:
        return float("nan") if mantissa else sign * float("inf")
    fraction = mantissa / (1 << mantissa_bits)
    if exponent == 0:
        return sign * fraction * 2.0 ** (1 - bias)
    return sign * (1 + fraction) * 2.0 ** (exponent - bias)


FLOAT8_VALUES = {
    name: np.array([float8_value(code, name) for code in range(256)], F32) for name in FLOAT8
}


def to_float32(stored: Stored, element: str) -> Floats:
    """Exact."""
    if element in FLOAT8:
        return FLOAT8_VALUES[element][stored]
    if element == "bfloat16":
        return (stored.astype(np.uint32) << np.uint32(16)).view(F32)
    if element == "float16":
        return stored.view(np.float16).astype(F32)
    assert element == "float32"
    return stored.view(F32)


def round_float8(values: Floats, element: str) -> NDArray[np.uint8]:
    """Nearest code, the even one of two, the largest for what is beyond; no NaN among `values`."""
    table = FLOAT8_VALUES[element][:128].astype(np.float64)
    table = table[np.isfinite(table)]
    magnitude = np.minimum(np.abs(values.astype(np.float64)), table[-1])
    above = np.searchsorted(table, magnitude)  # first entry at or above
    below = np.maximum(above - 1, 0)
    up, down = table[above] - magnitude, magnitude - table[below]
    even = np.where(above % 2 == 0, above, below)
    code = np.where(up == down, even, np.where(up < down, above, below)).astype(np.uint8)
    return np.where(np.signbit(values), code | np.uint8(0x80), code).astype(np.uint8)


def largest_of(element: str) -> float:
    if element in FLOAT8:
        return float(np.nanmax(np.where(np.isinf(t := FLOAT8_VALUES[element]), 0, t)))
    return {
        "float32": float(np.finfo(F32).max),
        "float16": 65504.0,
        "bfloat16": float(np.uint32(0x7F7F0000).view(F32)),
    }[element]


NAN = {
    "float32": 0x7FC00000,
    "float16": 0x7E00,
    "bfloat16": 0x7FC0,
    "float8_e4m3fn": 0x7F,
    "float8_e4m3fnuz": 0x80,
    "float8_e5m2": 0x7F,
    "float8_e5m2fnuz": 0x80,
}
HAS_INFINITY = {"float32", "float16", "bfloat16", "float8_e5m2"}


def into_cache(values: Floats, element: str, scale: float = 1.0) -> tuple[Stored, int]:
    """Values as a cache with that element type and scale stores them; how many were clamped."""
    with np.errstate(all="ignore"):
        values = values * (F32(1) / F32(scale))
    largest = largest_of(element)
    nan, infinite = np.isnan(values), np.isinf(values)
    clamp = (np.abs(values.astype(np.float64)) > largest) & ~nan
    if element in HAS_INFINITY:
        clamp &= ~infinite
    tame = np.where(nan, F32(0), values)
    tame = np.where(clamp, np.copysign(F32(largest), tame), tame).astype(F32)
    finite = np.where(np.isinf(tame), F32(0), tame)
    stored: Stored
    if element == "float32":
        stored = tame.view(np.uint32).copy()
    elif element == "float16":
        stored = tame.astype(np.float16).view(np.uint16).copy()
    elif element == "bfloat16":
        bits = tame.view(np.uint32).astype(np.uint64)
        stored = ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)
    else:
        stored = round_float8(finite, element)
        if element.endswith("fnuz"):
            stored[stored == 0x80] = 0
        else:
            infinity = np.where(np.signbit(tame), np.uint8(0xFC), np.uint8(0x7C))
            stored = np.where(np.isinf(tame), infinity, stored)
    stored[nan] = NAN[element]
    return stored, int(clamp.sum())


def convert(
    stored: Stored, of: str, to: str, of_scale: float = 1.0, to_scale: float = 1.0
) -> tuple[Stored, int, int]:
    """Elements of one cache as another stores them; how many were clamped, how many inexact."""
    if of == to and F32(of_scale) == F32(to_scale):
        return stored.copy(), 0, 0
    if of in FLOAT8 and to in FLOAT8:
        return _exactly(stored, of, to, of_scale, to_scale)
    with np.errstate(all="ignore"):
        values = to_float32(stored, of) * F32(of_scale)
    converted, clamped = into_cache(values, to, to_scale)
    return converted, clamped, 0


def _exactly(
    stored: Stored, of: str, to: str, of_scale: float, to_scale: float
) -> tuple[Stored, int, int]:
    """Where there is no equal, the code is 0."""
    # Products of 4 and 24 bits are exact in float64.
    source = FLOAT8_VALUES[of].astype(np.float64) * np.float64(F32(of_scale))
    target = FLOAT8_VALUES[to].astype(np.float64) * np.float64(F32(to_scale))
    codes, equal = np.zeros(256, np.uint8), np.zeros(256, bool)
    for code, value in enumerate(source):
        if np.isnan(value):
            codes[code], equal[code] = NAN[to], True
            continue
        same = np.flatnonzero(target == value)
        if same.size:  # of two zeros, the one with the same sign
            signed = [c for c in same if np.signbit(target[c]) == np.signbit(value)]
            codes[code], equal[code] = (signed or list(same))[0], True
    return codes[stored], 0, int(np.count_nonzero(~equal[stored]))


def up16(size: int) -> int:
    return -(-size // 16) * 16


def _pad(data: bytes) -> bytes:
    return data + bytes(up16(len(data)) - len(data))


def marked_rows(stored: Stored, element: str) -> NDArray[np.bool_]:
    limit = 2.0**15 if element == "float16" else 2.0**100
    magnitude = np.abs(to_float32(stored, element))
    return np.asarray((~(magnitude < limit)).any(axis=1))


def scale_up(value: Floats, scale: str) -> Floats:
    """The next number of the format at or above a positive one."""
    if scale == "float32":
        return value
    if scale == "bfloat16":
        below = (value.view(np.uint32) & np.uint32(0xFFFF0000)).view(F32)
        step = np.uint32(0x10000)
        return np.where(below == value, below, (below.view(np.uint32) + step).view(F32))
    mantissa, exponent = np.frexp(value)
    return np.ldexp(F32(1), np.where(mantissa == 0.5, exponent - 1, exponent)).astype(F32)


def zero_down(value: Floats, scale: str) -> Floats:
    value = value + F32(0)  # no negative zero
    if scale == "float32":
        return value
    cut = (value.view(np.uint32) & np.uint32(0xFFFF0000)).view(F32)  # towards zero
    further = (cut.view(np.uint32) + np.uint32(0x10000)).view(F32)
    return np.where(cut <= value, cut, further)


def _scale_bytes(scale: Floats, encoding: Encoding) -> bytes:
    bits = np.ascontiguousarray(scale).view(np.uint32)
    if encoding.scale == "float32":
        return bits.tobytes()
    if encoding.scale == "bfloat16":
        return (bits >> np.uint32(16)).astype(np.uint16).tobytes()
    return (bits >> np.uint32(23)).astype(np.uint8).tobytes()


def _scales_of(data: bytes, encoding: Encoding) -> Floats:
    if encoding.scale == "float32":
        return np.frombuffer(data, F32)
    if encoding.scale == "bfloat16":
        return to_float32(np.frombuffer(data, np.uint16), "bfloat16")
    return (np.frombuffer(data, np.uint8).astype(np.uint32) << np.uint32(23)).view(F32)


def groups_of(content: int, encoding: Encoding) -> list[slice]:
    size = encoding.group or content
    return [slice(at, min(at + size, content)) for at in range(0, content, size)]


def _codes(scaled: Floats, scheme: str) -> NDArray[np.uint8]:
    if scheme == "int8":
        return np.clip(np.rint(scaled), -127, 127).astype(np.int8).view(np.uint8)
    element = "float8_e4m3fn" if scheme == "fp8_e4m3" else "float8_e5m2"
    codes = round_float8(scaled, element)
    return np.where(codes == 0x80, np.uint8(0), codes)


def encode_panel(
    stored: Stored, element: str, encoding: Encoding
) -> tuple[bytes, NDArray[np.bool_]]:
    """The bytes of a panel of rows, and which rows are marked to go raw."""
    rows, content = stored.shape
    if encoding.scheme == "raw":
        return _pad(stored.tobytes()), np.zeros(rows, bool)
    marked = marked_rows(stored, element)
    x = np.where(marked[:, None], F32(0), to_float32(stored, element))
    if encoding.scheme == "int8_channel":
        zero, scale = np.zeros(content, F32), np.zeros(content, F32)
        codes = np.zeros((rows, content), np.uint8)
        kept = x[~marked]
        if len(kept):
            zero = zero_down(kept.min(axis=0), encoding.scale)
            span = (kept.max(axis=0) - zero) / F32(255)
            scale = scale_up(np.maximum(span, SMALLEST_SCALE), encoding.scale)
            scaled = (kept - zero) * (F32(1) / scale)
            codes[~marked] = np.clip(np.rint(scaled), 0, 255).astype(np.uint8)
        scales = _scale_bytes(scale, encoding) + _scale_bytes(zero, encoding)
        return _pad(codes.tobytes()) + _pad(scales), marked
    codes = np.zeros((rows, content), np.uint8)
    columns = []
    for part in groups_of(content, encoding):
        amax = np.abs(x[:, part]).max(axis=1)
        scale = scale_up(
            np.maximum(amax / F32(LARGEST[encoding.scheme]), SMALLEST_SCALE), encoding.scale
        )
        codes[:, part] = _codes(x[:, part] * (F32(1) / scale)[:, None], encoding.scheme)
        columns.append(scale)
    scales = _scale_bytes(np.stack(columns, axis=1), encoding)
    return _pad(codes.tobytes()) + _pad(scales), marked


def panel_bytes(element: str, encoding: Encoding, rows: int, content: int) -> int:
    if encoding.scheme == "raw":
        return up16(rows * content * STORAGE[element]().itemsize)
    if encoding.scheme == "int8_channel":
        count = 2 * content
    else:
        count = rows * len(groups_of(content, encoding))
    return up16(rows * content) + up16(count * SCALE_BYTES[encoding.scale])


def decode_panel(coded: bytes, element: str, encoding: Encoding, rows: int, content: int) -> Floats:
    """Values, before they go into the consumer's cache; `element` is the producer's."""
    if encoding.scheme == "raw":
        stored = np.frombuffer(coded, STORAGE[element], rows * content)
        return to_float32(stored.reshape(rows, content), element)
    codes = np.frombuffer(coded, np.uint8, rows * content).reshape(rows, content)
    tail = coded[up16(rows * content) :]
    width = SCALE_BYTES[encoding.scale]
    with np.errstate(all="ignore"):
        if encoding.scheme == "int8_channel":
            scale = _scales_of(tail[: content * width], encoding)
            zero = _scales_of(tail[content * width : 2 * content * width], encoding)
            return codes.astype(F32) * scale + zero
        if encoding.scheme == "int8":
            numbers = codes.view(np.int8).astype(F32)
        else:
            name = "float8_e4m3fn" if encoding.scheme == "fp8_e4m3" else "float8_e5m2"
            numbers = FLOAT8_VALUES[name][codes]
        parts = groups_of(content, encoding)
        scales = _scales_of(tail[: rows * len(parts) * width], encoding).reshape(rows, len(parts))
        values = np.empty((rows, content), F32)
        for index, part in enumerate(parts):
            values[:, part] = numbers[:, part] * scales[:, index : index + 1]
        return values
