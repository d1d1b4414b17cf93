"""Draws two sides of a transfer and what moves between them."""

from __future__ import annotations

import dataclasses

from hypothesis import settings
from hypothesis import strategies as st

from kvtest.caches import STORAGE, Geometry

_ARRANGEMENTS = [("BHNC", False), ("BNHC", False), ("PBNHC", False), ("BPHNC", False)]
_PACKED = [("BNHC", True), ("BHNC", True)]


def examples(count: int) -> int:
    """Return how many to draw: fewer where the profile, as under sanitizers, asks for fewer."""
    return min(count, settings.default.max_examples)


@dataclasses.dataclass(frozen=True)
class Case:
    producer: Geometry
    consumer: Geometry
    producer_blocks: tuple[int, ...]
    consumer_blocks: tuple[int, ...]
    offered: tuple[int, int]  # tokens
    wanted: tuple[int, int]
    first_slot: int | None  # None: left out
    seed: int

    @property
    def slot(self) -> int:
        if self.first_slot is not None:
            return self.first_slot
        return self.wanted[0] % self.consumer.block_size


@st.composite
def cases(draw: st.DrawFn) -> Case:
    mla = draw(st.integers(0, 4)) == 0
    dtype = draw(st.sampled_from(sorted(STORAGE)))
    planes = ("kv",) if mla else ("k", "v")
    content = draw(st.sampled_from([72] if mla else [1, 8, 24, 64]))
    layers = tuple(f"model.layers.{i}" for i in range(draw(st.integers(1, 3))))
    begin = 0 if mla else draw(st.integers(0, 2))
    heads = (begin, begin + (1 if mla else draw(st.integers(1, 3))))
    wider = heads if mla else (draw(st.integers(0, begin)), heads[1] + draw(st.integers(0, 2)))
    more = layers + (("model.extra",) if draw(st.booleans()) else ())

    def side(held: tuple[str, ...], range_: tuple[int, int]) -> Geometry:
        axes, packed = ("BNC", False) if mla else draw(st.sampled_from(_ARRANGEMENTS + _PACKED))
        return Geometry(
            axes=axes,
            packed=packed,
            layers=held,
            planes=planes,
            content=content,
            heads=range_,
            block_size=draw(st.sampled_from([1, 2, 5, 8, 16, 32])),
            num_blocks=draw(st.integers(6, 12)),
            dtype=dtype,
        )

    producer = side(tuple(draw(st.permutations(more))), wider)
    consumer = side(layers, heads)
    room = min(side.block_size * side.num_blocks for side in (producer, consumer))
    offered_from = draw(st.integers(0, 40))
    offered = (offered_from, offered_from + draw(st.integers(1, room)))
    first = draw(st.integers(*offered).filter(lambda token: token < offered[1]))
    first_slot = draw(st.none() | st.integers(0, consumer.block_size - 1))
    slot = first % consumer.block_size if first_slot is None else first_slot
    capacity = consumer.block_size * consumer.num_blocks - slot
    wanted = (first, min(offered[1], first + draw(st.integers(1, capacity))))
    spare = draw(st.integers(0, 1))
    return Case(
        producer,
        consumer,
        tuple(
            draw(st.permutations(range(producer.num_blocks)))[
                : producer.blocks_for(offered[1] - offered[0])
            ]
        ),
        tuple(
            draw(st.permutations(range(consumer.num_blocks)))[
                : consumer.blocks_for(wanted[1] - wanted[0], slot) + spare
            ]
        ),
        offered,
        wanted,
        first_slot,
        draw(st.integers(0, 2**16)),
    )
