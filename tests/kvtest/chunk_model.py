"""docs/coded_chunks.md's chunks, written again in NumPy: header, panels, rows that go raw."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from kv_model import Table, Transfer, make_side, reference_digest

from kvtest import codec_model
from kvtest.codec_model import STORAGE, Encoding, Stored, up16
from kvxfer import _core

SCHEMES = ["raw", "fp8_e4m3", "fp8_e5m2", "int8", "int8_channel"]
SCALES = ["float32", "bfloat16", "e8m0"]
ELEMENTS = [
    "float32",
    "float16",
    "bfloat16",
    "uint8",
    "float8_e4m3fn",
    "float8_e4m3fnuz",
    "float8_e5m2",
    "float8_e5m2fnuz",
]
FOREVER = 2**32 - 1
RAW = Encoding("raw")
GUARD = 0xEE

# By name: offset from its start, and struct's letter.
HEADER_FIELDS = {
    "magic": (0, "I"),
    "version": (4, "B"),
    "codec": (5, "B"),
    "element": (6, "B"),
    "planes": (7, "B"),
    "panel tokens": (8, "H"),
    "reserved": (10, "H"),
    "first panel": (12, "I"),
    "panels": (16, "I"),
    "exceptions": (20, "I"),
}
PLANE_FIELDS = {
    "scheme": (0, "B"),
    "scale format": (1, "B"),
    "group": (2, "H"),
    "content": (4, "I"),
}
PLANES_AT = 24


@dataclass(frozen=True)
class Format:
    encodings: tuple[Encoding, ...]  # by wire plane
    element: str = "bfloat16"  # the producer's
    panel_tokens: int = 64
    raw_until: int = 0
    raw_from: int = FOREVER
    codec: int = 0

    def core(self) -> _core.PanelFormat:
        return _core.PanelFormat(
            encodings=[(e.scheme, e.scale, e.group) for e in self.encodings],
            panel_tokens=self.panel_tokens,
            raw_until=self.raw_until,
            raw_from=self.raw_from,
            producer_element=self.element,
            codec=self.codec,
        )


INT8 = Format((Encoding("int8_channel"), Encoding("int8")))


@dataclass(frozen=True)
class Panel:
    layer: str
    plane: int  # wire plane
    head: int
    tokens: range
    encoding: Encoding


def runs(tokens: tuple[int, int], form: Format) -> Iterator[tuple[range, bool]]:
    """Yield the runs of tokens, and whether their panels are coded."""
    begin, end = tokens
    until = min(max(form.raw_until, begin), end)
    start = min(max(form.raw_from, until), end)
    for first, last, coded in [(begin, until, False), (until, start, True), (start, end, False)]:
        for at in range(first, last, form.panel_tokens):
            yield range(at, min(at + form.panel_tokens, last)), coded


def panels(transfer: Transfer, form: Format) -> list[Panel]:
    return [
        Panel(layer, plane, head, tokens, form.encodings[plane] if coded else RAW)
        for layer in transfer.layers
        for plane in range(len(transfer.planes))
        for tokens, coded in runs(transfer.tokens, form)
        for head in range(*transfer.heads)
    ]


def rows_of(transfer: Transfer, panel: Panel) -> Stored:
    """The producer's rows, [token, content]."""
    name = transfer.planes[panel.plane]
    return np.stack(
        [transfer.row(True, panel.layer, name, panel.head, token) for token in panel.tokens]
    )


def header(form: Format, contents: Sequence[int], first: int, count: int, exceptions: int) -> bytes:
    made = b"KVXC" + struct.pack(
        "<BBBBHHIII",
        1,
        form.codec,
        ELEMENTS.index(form.element),
        len(contents),
        form.panel_tokens,
        0,
        first,
        count,
        exceptions,
    )
    for encoding, content in zip(form.encodings, contents, strict=True):
        made += struct.pack(
            "<BBHI",
            SCHEMES.index(encoding.scheme),
            SCALES.index(encoding.scale),
            encoding.group,
            content,
        )
    return made + bytes(-len(made) % 64)


@dataclass(frozen=True)
class Chunk:
    wire: bytes
    exceptions: int
    most_bytes: int


def chunk(transfer: Transfer, form: Format, first: int, end: int) -> Chunk:
    """The chunk of panels [first, end)."""
    contents = [transfer.producer.planes[name] for name in transfer.planes]
    body, raw, indices = b"", b"", []
    row = most_rows = most_raw = 0
    for panel in panels(transfer, form)[first:end]:
        stored = rows_of(transfer, panel)
        coded, marked = codec_model.encode_panel(stored, form.element, panel.encoding)
        body += coded
        indices += [row + int(i) for i in np.flatnonzero(marked)]
        raw += stored[marked].tobytes()
        row += len(stored)
        if panel.encoding.scheme != "raw":
            most_rows += len(stored)
            most_raw += stored.nbytes
    start = header(form, contents, first, end - first, len(indices))
    listed = struct.pack(f"<{len(indices)}I", *indices)
    wire = start + body
    for part in (listed, raw):
        wire += part + bytes(up16(len(part)) - len(part))
    most = len(start) + len(body) + up16(4 * most_rows) + up16(most_raw)
    return Chunk(wire, len(indices), most)


@dataclass
class Result:
    clamped: int = 0
    inexact: int = 0


def deliver(transfer: Transfer, form: Format, first: int, end: int) -> Result:
    """Put panels [first, end) into the consumer's memory, as they look behind codec and types."""
    result = Result()
    element = transfer.consumer.element

    def convert(stored: Stored) -> Stored:
        converted, clamped, inexact = codec_model.convert(stored, form.element, element)
        result.clamped += clamped
        result.inexact += inexact
        return converted

    for panel in panels(transfer, form)[first:end]:
        stored = rows_of(transfer, panel)
        if panel.encoding.scheme == "raw":
            made = convert(stored)
        else:
            coded, marked = codec_model.encode_panel(stored, form.element, panel.encoding)
            values = codec_model.decode_panel(coded, form.element, panel.encoding, *stored.shape)
            made = np.empty(stored.shape, STORAGE[element])
            made[~marked], clamped = codec_model.into_cache(values[~marked], element)
            result.clamped += clamped
            if marked.any():
                made[marked] = convert(stored[marked])
        for token, row in zip(panel.tokens, made, strict=True):
            name = transfer.planes[panel.plane]
            transfer.row(False, panel.layer, name, panel.head, token)[...] = row
    return result


def zero_tail(transfer: Transfer) -> None:
    """Zero the slots behind the last token in the consumer's last block."""
    side, table = transfer.side(False)
    block, slot = table.place(transfer.tokens[1] - 1, side.block_size)
    for layer in transfer.layers:
        for plane in transfer.planes:
            view = side.views[side.layers.index(layer)][list(side.planes).index(plane)]
            view[block, side.heads(*transfer.heads), slot + 1 :] = 0


def plan(transfer: Transfer, form: Format, producing: bool) -> _core.PanelPlan:
    side, table = transfer.side(producing)
    names = list(side.planes)
    return _core.PanelPlan(
        side.layout(),
        table.core(),
        _core.Slice(
            [side.layers.index(name) for name in transfer.layers],
            *transfer.heads,
            *transfer.tokens,
        ),
        [names.index(name) for name in transfer.planes],
        form.core(),
    )


def fill_numbers(transfer: Transfer, rng: np.random.Generator, strange: float) -> None:
    """Fill the producer with numbers of its type; a share `strange` of rows holds a special one."""
    side = transfer.producer
    special = {
        "float32": [0x7FC00001, 0x7F800000, 0xFF800000, 0x71800000, 0xF1800000, 0xFF7FFFFF],
        "float16": [0x7E01, 0x7C00, 0xFC00, 0x7800, 0xF800, 0xFBFF],
        "bfloat16": [0x7FC1, 0x7F80, 0xFF80, 0x7180, 0xF180, 0xFF7F],
    }
    for view in (view for layer in side.views for view in layer):
        if side.element not in special:
            view[...] = rng.integers(0, 256, view.shape, np.uint8)
            continue
        numbers = rng.standard_normal(view.shape) * np.exp2(rng.integers(-20, 12))
        numbers += rng.standard_normal(view.shape[-1]) * rng.integers(0, 2)
        numbers *= rng.integers(0, 10, view.shape) > 0
        view[...] = codec_model.into_cache(numbers.astype(np.float32), side.element)[0]
        rows = rng.random(view.shape[:-1]) < strange
        where = np.argwhere(rows)
        columns = rng.integers(0, view.shape[-1], len(where))
        values = rng.choice(np.array(special[side.element], STORAGE[side.element]), len(where))
        view[(*where.T, columns)] = values


def pack(plan: _core.PanelPlan, first: int, end: int, seed: int) -> tuple[bytes, int]:
    """Pack into memory as large as promised; returns the chunk and its exceptions."""
    wire = np.full(plan.most_bytes(first, end) + 16, GUARD, np.uint8)
    size, exceptions, digest = _core.pack_panels(plan, first, end, wire[:-16], seed)
    assert (wire[size:] == GUARD).all()
    made = wire[:size].tobytes()
    assert digest == reference_digest(made, seed)
    return made, exceptions


def pair(
    elements: tuple[str, str] = ("bfloat16", "bfloat16"),
    producer: dict[str, object] | None = None,
    consumer: dict[str, object] | None = None,
    tokens: tuple[int, int] = (0, 100),
    strange: float = 0,
    **common: object,
) -> Transfer:
    """Two sides of one model: the producer has blocks of 16, the consumer other ones of 64."""
    shape: dict[str, object] = {
        "layers": ["a", "b"],
        "planes": {"k": 32, "v": 32},
        "num_heads": 2,
        "axes": "BNHC",
        **common,
    }
    source = make_side(
        element=elements[0], **{**shape, "num_blocks": 10, "block_size": 16, **(producer or {})}
    )
    target = make_side(
        element=elements[1],
        **{**shape, "num_blocks": 4, "block_size": 64, "axes": "BHNC", **(consumer or {})},
    )
    transfer = Transfer(
        source,
        target,
        Table([7, 2, 9, 0, 1, 8, 4, 3, 6, 5], 0, 0),
        Table([3, 0, 2, 1], 0, 0),
        source.layers,
        list(source.planes),
        (0, source.num_heads),
        tokens,
    )
    fill_numbers(transfer, np.random.default_rng(3), strange)
    target.memory[...] = GUARD
    return transfer
