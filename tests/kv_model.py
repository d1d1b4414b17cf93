"""What layout, plans, pack and the digest should do, written again in NumPy and plain Python.

`Side` is one side's cache in a drawn arrangement of memory; `reference_digest` follows
docs/digest.md. Nothing here uses the code under test, except to describe a layout to it.
"""

from __future__ import annotations

import itertools
import struct
from dataclasses import dataclass, field

import numpy as np
from hypothesis import strategies as st

from kvxfer import _core

ELEMENTS = {
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "uint8": 1,
    "float8_e4m3fn": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2": 1,
    "float8_e5m2fnuz": 1,
}
STORAGE = {1: np.uint8, 2: np.uint16, 4: np.uint32}


@dataclass
class Side:
    """A paged cache in one buffer; `views[layer][plane]` is [block, head, token, content]."""

    element: str
    layers: list[str]
    planes: dict[str, int]  # name to content, in the order of the cache
    first_head: int
    num_heads: int
    num_blocks: int
    block_size: int
    memory: np.ndarray  # all bytes, with what lies between and around the elements
    views: list[list[np.ndarray]] = field(repr=False)

    def layout(self) -> _core.CacheLayout:
        flat = [view for layer in self.views for view in layer]
        return _core.CacheLayout(
            num_blocks=self.num_blocks,
            block_size=self.block_size,
            num_heads=self.num_heads,
            first_head=self.first_head,
            layers=self.layers,
            planes=list(self.planes.items()),
            views=[(view.__array_interface__["data"][0], *view.strides) for view in flat],
            element=self.element,
        )

    def heads(self, begin: int, end: int) -> slice:
        return slice(begin - self.first_head, end - self.first_head)


@dataclass
class Table:
    blocks: list[int]
    first_token: int
    first_slot: int

    def core(self) -> _core.BlockTable:
        return _core.BlockTable(self.blocks, self.first_token, self.first_slot)

    def place(self, token: int, block_size: int) -> tuple[int, int]:
        at = self.first_slot + token - self.first_token
        return self.blocks[at // block_size], at % block_size


def make_side(
    *,
    element: str = "bfloat16",
    layers: list[str],
    planes: dict[str, int],
    num_heads: int,
    num_blocks: int,
    block_size: int,
    axes: str,
    first_head: int = 0,
    packed: bool = False,
    padding: dict[str, int] | None = None,
    offset: int = 0,
) -> Side:
    """Lay a cache out in memory.

    `axes` are the axes of one array, outermost first: B, H, N, C and maybe P and L. Layers and
    planes that are not among them lie behind each other. With `packed` the planes share the
    content axis. `padding` adds elements to an axis that nobody uses; `offset` misaligns
    everything, in bytes.
    """
    storage = STORAGE[ELEMENTS[element]]
    contents = list(planes.values())
    extents = {
        "L": len(layers),
        "P": len(planes),
        "B": num_blocks,
        "H": num_heads,
        "N": block_size,
        "C": sum(contents) if packed else max(contents),
    }
    shape = [extents[axis] + (padding or {}).get(axis, 0) for axis in axes]
    array_layers = 1 if "L" in axes else len(layers)
    array_planes = 1 if "P" in axes or packed else len(planes)
    array_bytes = int(np.prod(shape)) * storage().itemsize
    memory = np.zeros(array_bytes * array_layers * array_planes + offset + 64, np.uint8)

    views: list[list[np.ndarray]] = []
    for layer, (plane, content) in itertools.product(range(len(layers)), enumerate(contents)):
        index = (0 if "L" in axes else layer) * array_planes + (0 if array_planes == 1 else plane)
        begin = offset + index * array_bytes
        array = memory[begin : begin + array_bytes].view(storage).reshape(shape)
        start = sum(contents[:plane]) if packed else 0
        chosen = {
            "L": layer,
            "P": plane,
            "C": slice(start, start + content),
            "B": slice(num_blocks),
            "H": slice(num_heads),
            "N": slice(block_size),
        }
        view = array[tuple(chosen[axis] for axis in axes)]
        rest = [axis for axis in axes if axis in "BHNC"]
        view = view.transpose([rest.index(axis) for axis in "BHNC"])
        if plane == 0:
            views.append([])
        views[layer].append(view)
    return Side(
        element, layers, planes, first_head, num_heads, num_blocks, block_size, memory, views
    )


@dataclass
class Transfer:
    """Two sides, and what moves from one to the other."""

    producer: Side
    consumer: Side
    producer_table: Table
    consumer_table: Table
    layers: list[str]
    planes: list[str]
    heads: tuple[int, int]
    tokens: tuple[int, int]

    def side(self, producing: bool) -> tuple[Side, Table]:
        if producing:
            return self.producer, self.producer_table
        return self.consumer, self.consumer_table

    def tile_ends(self) -> list[int]:
        begin, end = self.tokens
        return _core.tile_ends(
            begin,
            end,
            self.producer.block_size,
            self.producer_table.place(begin, self.producer.block_size)[1],
            self.consumer.block_size,
            self.consumer_table.place(begin, self.consumer.block_size)[1],
        )

    def plan(self, producing: bool, order: str) -> _core.CopyPlan:
        side, table = self.side(producing)
        names = list(side.planes)
        return _core.CopyPlan(
            side.layout(),
            table.core(),
            _core.Slice(
                [side.layers.index(name) for name in self.layers], *self.heads, *self.tokens
            ),
            self.tile_ends(),
            order,
            [names.index(name) for name in self.planes],
        )

    def row(self, producing: bool, layer: str, plane: str, head: int, token: int) -> np.ndarray:
        side, table = self.side(producing)
        view = side.views[side.layers.index(layer)][list(side.planes).index(plane)]
        block, slot = table.place(token, side.block_size)
        return view[block, head - side.first_head, slot]

    def expected_wire(self, order: str) -> bytes:
        """The wire, row by row, from the definition of the order."""
        begin, end = self.tokens
        ends = self.tile_ends()
        tiles = list(zip([begin, *ends[:-1]], ends, strict=True))
        rows: list[bytes] = []

        def walk(axes: str, at: dict[str, object]) -> None:
            if not axes:
                row = self.row(True, at["L"], at["P"], at["H"], at["N"])
                rows.append(np.ascontiguousarray(row).tobytes())
                return
            choices = {
                "L": self.layers,
                "P": self.planes,
                "T": tiles,
                "H": range(*self.heads),
                "N": range(*at["T"]) if "T" in at else (),
            }
            for choice in choices[axes[0]]:
                walk(axes[1:], {**at, axes[0]: choice})

        walk(order, {})
        return b"".join(rows)

    def expected_memory(self) -> np.ndarray:
        """The consumer's memory after the transfer, made from its memory now."""
        saved = self.consumer.memory.copy()
        for layer, plane in itertools.product(self.layers, self.planes):
            for head, token in itertools.product(range(*self.heads), range(*self.tokens)):
                here = self.row(False, layer, plane, head, token)
                here[...] = self.row(True, layer, plane, head, token)
            side, table = self.consumer, self.consumer_table
            block, slot = table.place(self.tokens[1] - 1, side.block_size)
            view = side.views[side.layers.index(layer)][list(side.planes).index(plane)]
            view[block, side.heads(*self.heads), slot + 1 :] = 0
        expected = self.consumer.memory.copy()
        self.consumer.memory[...] = saved
        return expected


@st.composite
def sides(
    draw: st.DrawFn, element: str, layers: list[str], planes: dict[str, int], heads: tuple[int, int]
) -> Side:
    """A side that holds these layers, planes and heads in any arrangement."""
    equal_contents = len(set(planes.values())) == 1
    axes = ["B", "H", "N"]
    packed = draw(st.booleans())
    if not packed and equal_contents and draw(st.booleans()):
        axes.append("P")
    if draw(st.booleans()):
        axes.append("L")
    axes = draw(st.permutations(axes))
    axes.insert(len(axes) if draw(st.integers(0, 4)) else draw(st.integers(0, len(axes))), "C")
    # A padded content axis of unequal planes is what happens anyway when each has its own array.
    padding = draw(st.dictionaries(st.sampled_from(axes), st.integers(1, 3), max_size=2))
    return make_side(
        element=element,
        layers=layers,
        planes=planes,
        first_head=heads[0],
        num_heads=heads[1] - heads[0],
        num_blocks=draw(st.integers(1, 8)),
        block_size=draw(st.sampled_from([1, 2, 3, 4, 8, 16])),
        axes="".join(axes),
        packed=packed,
        padding=padding,
        offset=draw(st.sampled_from([0, 0, 4, 16, 60])),
    )


@st.composite
def transfers(
    draw: st.DrawFn, elements: st.SearchStrategy[tuple[str, str]] | None = None
) -> Transfer:
    """Two sides that have something in common, and a slice of it.

    `elements` are the producer's and the consumer's; without, both have the same.
    """
    if elements is None:
        elements = st.sampled_from([(element, element) for element in ELEMENTS])
    pair = draw(elements)
    row_sizes = st.sampled_from([1, 2, 3, 8, 16, 24, 32, 64, 128])
    same = draw(st.booleans())
    contents = [draw(row_sizes)] * 2 if same else [draw(row_sizes), draw(row_sizes)]
    planes = dict(zip(["k", "v"], contents, strict=True))
    if draw(st.booleans()):
        planes = {"kv": contents[0]}
    names = [f"layer.{index}" for index in range(draw(st.integers(1, 3)))]
    low = draw(st.integers(0, 2))
    heads = (low, low + draw(st.integers(1, 4)))

    def reach() -> tuple[int, int]:
        return (
            draw(st.integers(max(0, heads[0] - 1), heads[0])),
            heads[1] + draw(st.integers(0, 1)),
        )

    producer, consumer = (
        draw(
            sides(
                element,
                draw(st.permutations([*names, *extra])),
                dict(draw(st.permutations(list(planes.items())))),
                reach(),
            )
        )
        for element, extra in zip(pair, (["only.producer"], []), strict=True)
    )

    slots = min(side.num_blocks * side.block_size for side in (producer, consumer))
    count = draw(st.integers(1, slots))
    begin = draw(st.integers(0, 40))
    tables = []
    for side in (producer, consumer):
        spare = side.num_blocks * side.block_size - count
        first_token = begin - draw(st.integers(0, min(begin, spare)))
        spare -= begin - first_token
        first_slot = draw(st.integers(0, min(spare, side.block_size - 1)))
        needed = -(-(first_slot + begin - first_token + count) // side.block_size)
        blocks = draw(st.permutations(range(side.num_blocks)))
        tables.append(Table(blocks[:needed], first_token, first_slot))
    head_begin = draw(st.integers(heads[0], heads[1] - 1))
    return Transfer(
        producer,
        consumer,
        *tables,
        layers=draw(st.permutations(names))[: draw(st.integers(1, len(names)))],
        planes=draw(st.permutations(list(planes)))[: draw(st.integers(1, len(planes)))],
        heads=(head_begin, draw(st.integers(head_begin + 1, heads[1]))),
        tokens=(begin, begin + count),
    )


def fill(side: Side, rng: np.random.Generator) -> None:
    side.memory[...] = rng.integers(0, 256, side.memory.size, np.uint8)


ORDERS = [
    "".join(order)
    for order in itertools.permutations("LPTHN")
    if order.index("T") < order.index("N")
]

_MASK = (1 << 64) - 1


def _splitmix64(count: int) -> list[int]:
    state, outputs = 0, []
    for _ in range(count):
        state = (state + 0x9E3779B97F4A7C15) & _MASK
        outputs.append(_avalanche(state))
    return outputs


def _avalanche(x: int) -> int:
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


def reference_digest(data: bytes, seed: int = 0) -> tuple[int, int]:
    """The digest from its specification."""
    padded = bytes(data) + bytes(-len(data) % 64)
    words = np.frombuffer(padded, "<u4").reshape(-1, 8, 2).astype(np.uint64)
    outputs = _splitmix64(16)
    halves = [[(value & 0xFFFFFFFF), (value >> 32)] for value in outputs]
    base = np.array(halves[:8], np.uint64)
    step = np.array(halves[8:], np.uint64) | np.uint64(1)
    stripe = np.arange(len(words), dtype=np.uint64)[:, None, None]
    low = np.uint64(0xFFFFFFFF)
    key = (base + stripe * step) & low
    x = words ^ key
    y = (words + key[:, :, ::-1]) & low
    p = (x[:, :, 0] * x[:, :, 1]).sum(axis=0, dtype=np.uint64)
    q = (y[:, :, 0] * y[:, :, 1]).sum(axis=0, dtype=np.uint64)
    total = sum(struct.unpack(f"<{len(padded) // 8}Q", padded)) & _MASK

    h = 0
    for value in [seed, len(data), *np.stack([p, q], axis=1).ravel().tolist()]:
        h = (_avalanche(h ^ value) + 0x9E3779B97F4A7C15) & _MASK
    return total, h
