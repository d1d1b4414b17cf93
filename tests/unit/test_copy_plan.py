"""Block tables, tiles, wire orders and the runs of a plan."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from kv_model import ORDERS, Side, make_side, sides, transfers

import kvxfer
from kvxfer import _core

SHAPE = {
    "layers": ["a", "b"],
    "planes": {"k": 64, "v": 64},
    "num_heads": 4,
    "num_blocks": 8,
    "block_size": 16,
}
ROW = 128  # bytes


def plan_of(
    side: Side,
    order: str = "LPTHN",
    *,
    blocks: list[int] | None = None,
    tokens: tuple[int, int] = (0, 16),
    layers: list[int] | None = None,
    heads: tuple[int, int] | None = None,
    ends: list[int] | None = None,
    first_token: int = 0,
    first_slot: int = 0,
    planes: list[int] | None = None,
) -> _core.CopyPlan:
    return _core.CopyPlan(
        side.layout(),
        _core.BlockTable([3] if blocks is None else blocks, first_token, first_slot),
        _core.Slice(
            list(range(len(side.layers))) if layers is None else layers,
            *(heads or (side.first_head, side.first_head + side.num_heads)),
            *tokens,
        ),
        _core.tile_ends(*tokens, side.block_size, 0, side.block_size, 0) if ends is None else ends,
        order,
        list(range(len(side.planes))) if planes is None else planes,
    )


def all_runs(plan: _core.CopyPlan) -> list[tuple[int, int, int, int]]:
    return plan.runs(0, plan.wire_bytes())


# Block tables


@pytest.mark.parametrize(
    ("table", "tokens", "message"),
    [
        (([1, 8], 0, 0), (0, 32), "block 8 is out of range; the cache has 8 blocks"),
        (([1, 2, 1], 0, 0), (0, 48), "block 1 is named twice"),
        (([1, 2], 0, 0), (0, 33), "tokens up to 33 need 3 blocks of 16 tokens, .* has 2"),
        (([1, 2], 10, 5), (12, 38), "need 3 blocks"),
        (([1], 0, 16), (0, 1), "first slot is 16, but its blocks have only 16"),
        (([1], 8, 0), (7, 9), "token 7 is asked for, but the block table starts with token 8"),
        (([1], 0, 0), (5, 5), r"\[5, 5\) is empty"),
        (([], 0, 0), (0, 1), "block table has 0"),
    ],
)
def test_block_tables_that_do_not_fit(table, tokens, message):
    layout = make_side(**SHAPE, axes="BHNC").layout()
    with pytest.raises(kvxfer.InvalidError, match=message):
        _core.BlockTable(*table).validate(layout, *tokens, True)


def test_block_tables_that_fit():
    layout = make_side(**SHAPE, axes="BHNC").layout()
    _core.BlockTable([7, 0], 10, 5).validate(layout, 12, 37, True)
    _core.BlockTable([1, 1], 0, 0).validate(layout, 0, 32, False)  # shared by a producer
    _core.BlockTable([1, 2, 3], 0, 0).validate(layout, 0, 1, True)  # more than needed


# Tiles


@given(
    st.integers(0, 50),
    st.integers(1, 100),
    st.tuples(st.integers(1, 20), st.integers(1, 20)),
    st.tuples(st.integers(0, 19), st.integers(0, 19)),
)
def test_tiles_end_where_a_block_ends_on_either_side(begin, count, sizes, slots):
    slots = [slot % size for slot, size in zip(slots, sizes, strict=True)]
    end = begin + count
    expected = [
        at
        for at in range(begin + 1, end + 1)
        if at == end
        or any((at - begin + slot) % size == 0 for slot, size in zip(slots, sizes, strict=True))
    ]
    assert _core.tile_ends(begin, end, sizes[0], slots[0], sizes[1], slots[1]) == expected


def test_tiles_of_impossible_sides():
    with pytest.raises(kvxfer.InvalidError, match="the producer's blocks have 0 tokens"):
        _core.tile_ends(0, 5, 0, 0, 4, 0)
    with pytest.raises(kvxfer.InvalidError, match="the consumer's first slot is 4"):
        _core.tile_ends(0, 5, 4, 0, 4, 4)
    assert _core.tile_ends(5, 5, 4, 0, 4, 0) == []


# Plans that are refused


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layers": []}, "no layers"),
        ({"layers": [2]}, "layer 2 is out of range; the cache has 2 layers"),
        ({"layers": [1, 1]}, 'layer "b" is in the slice twice'),
        ({"heads": (0, 5)}, r"kv heads \[0, 5\) are asked for; the cache holds \[0, 4\)"),
        ({"heads": (2, 2)}, r"kv heads \[2, 2\)"),
        ({"planes": []}, "no planes"),
        ({"planes": [2]}, "plane 2 is out of range"),
        ({"planes": [0, 0]}, 'plane "k" is asked for twice'),
        ({"blocks": [8]}, "block 8 is out of range"),
        ({"tokens": (0, 17)}, "need 2 blocks"),
        ({"tokens": (0, 0), "ends": [1]}, "is empty"),
        ({"ends": []}, "the tiles end at token 0, the slice at 16"),
        ({"ends": [8]}, "the tiles end at token 8"),
        ({"ends": [8, 8, 16]}, r"tile end 8 does not lie in \(8, 16\]"),
        ({"ends": [17]}, r"tile end 17 does not lie in \(0, 16\]"),
        (
            {"blocks": [0, 1], "tokens": (0, 32), "ends": [32]},
            r"tile \[0, 32\) reaches over the end of a block of 16",
        ),
        ({"order": "LPNHT"}, "Token outside Tile"),
        ({"order": "LPTHH"}, "does not name each axis once"),
        ({"order": "LPTHX"}, 'wire order "LPTHX" is not five of the letters'),
        ({"order": "LPTH"}, "is not five of the letters"),
    ],
)
def test_refused(changes, message):
    with pytest.raises(kvxfer.InvalidError, match=message):
        plan_of(make_side(**SHAPE, axes="BHNC"), **changes)


# Runs


@given(st.data())
def test_runs_cover_each_row_once_and_in_wire_order(data):
    transfer = data.draw(transfers())
    order = data.draw(st.sampled_from(ORDERS))
    plan = transfer.plan(True, order)
    begin, end = sorted(plan.row_floor(data.draw(st.integers(0, plan.wire_bytes()))) for _ in "ab")
    memory = transfer.producer.memory
    base = memory.__array_interface__["data"][0]
    memory[...] = data.draw(st.integers(0, 255))
    runs = plan.runs(begin, end)
    assert sum(size * count for _, size, count, _ in runs) == end - begin

    # The addresses of the whole wire, byte by byte, give those of any part.
    def addresses(runs):
        return [
            address + index * stride + byte - base
            for address, size, count, stride in runs
            for index in range(count)
            for byte in range(size)
        ]

    if plan.wire_bytes() <= 4096:
        assert addresses(runs) == addresses(all_runs(plan))[begin:end]


@given(st.data())
def test_row_floor_and_layers_of(data):
    transfer = data.draw(transfers())
    plan = transfer.plan(True, data.draw(st.sampled_from(ORDERS)))
    total = plan.wire_bytes()
    offset = data.draw(st.integers(0, total))
    floor = plan.row_floor(offset)
    largest = max(transfer.producer.planes.values()) * 4
    assert floor <= offset < floor + largest or floor == offset == total
    assert plan.row_floor(floor) == floor
    assert plan.row_floor(total + 1) == total
    assert plan.row_floor(2**64 - 1) == total


def test_layers_of_ranges():
    plan = plan_of(make_side(**SHAPE, axes="BHNC"))
    layer = plan.wire_bytes() // 2
    assert plan.layers_of(0, 1) == (0, 1)
    assert plan.layers_of(0, layer) == (0, 1)
    assert plan.layers_of(layer - 1, layer + 1) == (0, 2)
    assert plan.layers_of(layer, 2 * layer) == (1, 2)
    assert plan.layers_of(layer, 2**64 - 1) == (1, 2)
    first, last = plan.layers_of(layer, layer)
    assert first == last
    inner = plan_of(make_side(**SHAPE, axes="BHNC"), "TLPHN")
    assert inner.layers_of(0, 1) == (0, 2)


BLOCK = 16 * 4 * ROW

# How both sides hold their memory, and the runs for one block: pieces and bytes of each.
SAME_ORDER = [
    ({"axes": "BHNC"}, 4, BLOCK),
    ({"axes": "BNHC"}, 4, BLOCK),
    ({"axes": "BHNC", "packed": True}, 2, 2 * BLOCK),
    ({"axes": "BNHC", "packed": True}, 2, 2 * BLOCK),
    ({"axes": "BPHNC"}, 2, 2 * BLOCK),
    ({"axes": "BPNHC"}, 2, 2 * BLOCK),
    ({"axes": "PBNHC"}, 4, BLOCK),
    ({"axes": "BHPNC"}, 2, 2 * BLOCK),
    ({"axes": "BLPNHC"}, 1, 4 * BLOCK),
    ({"axes": "BLNHC", "packed": True}, 1, 4 * BLOCK),
    ({"axes": "BHLPNC"}, 1, 4 * BLOCK),
    ({"axes": "LBPHNC"}, 2, 2 * BLOCK),
]


@pytest.mark.parametrize(("arrangement", "count", "size"), SAME_ORDER)
def test_a_block_that_both_sides_hold_alike_is_one_run(arrangement, count, size):
    sides = [make_side(**SHAPE, **arrangement) for _ in range(2)]
    order = _core.choose_wire_order(*(side.layout() for side in sides))
    for side in sides:
        runs = all_runs(plan_of(side, order))
        assert [run[1:3] for run in runs] == [(size, 1)] * count
        assert {address for address, *_ in runs} <= {
            view[3].__array_interface__["data"][0]
            for view in itertools.chain.from_iterable(side.views)
        }


def test_layer_first_keeps_layers_apart():
    sides = [make_side(**SHAPE, axes="BLPNHC") for _ in range(2)]
    order = _core.choose_wire_order(*(side.layout() for side in sides), True)
    assert order[0] == "L"
    plan = plan_of(sides[0], order)
    assert [run[1:3] for run in plan.runs(0, plan.wire_bytes() // 2)] == [(2 * BLOCK, 1)]


def test_adjacent_blocks_and_layers_merge():
    side = make_side(**SHAPE, axes="BHNC")
    runs = all_runs(plan_of(side, blocks=[2, 3, 4, 6], tokens=(0, 64)))
    assert [run[1:3] for run in runs] == [(3 * BLOCK, 1), (BLOCK, 1)] * 4
    whole = plan_of(side, blocks=list(range(8)), tokens=(0, 128))
    assert [run[1:3] for run in all_runs(whole)] == [(4 * 8 * BLOCK, 1)]


def test_partial_blocks_are_strided_runs():
    side = make_side(**SHAPE, axes="BHNC")
    plan = plan_of(side, tokens=(0, 5))
    assert [run[1:] for run in all_runs(plan)] == [(5 * ROW, 4, 16 * ROW)] * 4
    assert [run[1:] for run in plan.tail_runs()] == [(11 * ROW, 4, 16 * ROW)] * 4
    assert plan_of(side).tail_runs() == []


def test_rows_of_another_order_are_strided_runs():
    side = make_side(**SHAPE, axes="BNHC")
    runs = all_runs(plan_of(side, "LPTHN", layers=[0], planes=[0]))
    assert [run[1:] for run in runs] == [(ROW, 16, 4 * ROW)] * 4


def test_some_heads_of_a_block():
    side = make_side(**SHAPE, axes="BHNC", first_head=4)
    runs = all_runs(plan_of(side, heads=(5, 7), layers=[1], planes=[1]))
    view = side.views[1][1]
    start = view[3, 1].__array_interface__["data"][0]
    assert runs == [(start, 2 * 16 * ROW, 1, 0)]


def test_content_that_is_not_contiguous_goes_element_by_element():
    side = make_side(**SHAPE, axes="BHCN")
    runs = all_runs(plan_of(side, layers=[0], planes=[0], heads=(0, 1), tokens=(0, 1)))
    assert [run[1:] for run in runs] == [(2, 64, 32)]


# Wire orders


def orders_of(*arrangements: dict[str, object], **common: object) -> str:
    layouts = [
        make_side(**{**SHAPE, **common, **arrangement}).layout() for arrangement in arrangements
    ]
    return _core.choose_wire_order(*layouts)


def test_of_two_equally_good_orders_the_consumer_s_is_taken():
    assert orders_of({"axes": "BNHC"}, {"axes": "BHNC"}) == "LPTHN"
    assert orders_of({"axes": "BHNC"}, {"axes": "BNHC"}) == "LPTNH"


def test_the_side_with_more_to_lose_decides():
    """The consumer's tokens lie apart in any order; the producer's can stay together."""
    consumer = {"axes": "BNHC", "padding": {"H": 1, "C": 8}}
    assert orders_of({"axes": "BHNC"}, consumer) == "LPTHN"


def test_other_head_ranges_and_block_sizes():
    order = orders_of(
        {"axes": "BHNC", "first_head": 2},
        {"axes": "BHNC", "first_head": 4, "num_heads": 2, "block_size": 32},
    )
    assert order == "LPTHN"


def test_only_what_both_have_counts():
    order = orders_of({"axes": "BNHC"}, {"axes": "BNHC", "layers": ["b", "c"], "planes": {"v": 64}})
    assert order == "LPTNH"


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"layers": ["c"]}, "layer"),
        ({"planes": {"latent": 64}}, "plane"),
        ({"first_head": 4}, "kv head"),
    ],
)
def test_nothing_in_common(changes, what):
    with pytest.raises(kvxfer.TransferError, match=f"no {what} in common") as caught:
        orders_of({"axes": "BNHC"}, {"axes": "BNHC", **changes})
    assert caught.value.status is kvxfer.Status.MISMATCH


def pieces(side: Side, other: Side, order: str, names: tuple[list[str], list[str]]) -> int:
    """Runs for two whole blocks of what both sides have, which are no neighbours by chance."""
    heads = (
        max(side.first_head, other.first_head),
        min(side.first_head + side.num_heads, other.first_head + other.num_heads),
    )
    tokens = min(side.block_size, other.block_size)
    plan = plan_of(
        side,
        order,
        blocks=[side.num_blocks - 1, 2],
        first_slot=side.block_size - tokens,
        tokens=(0, 2 * tokens),
        ends=[tokens, 2 * tokens],
        heads=heads,
        layers=[side.layers.index(name) for name in names[0]],
        planes=[list(side.planes).index(name) for name in names[1]],
    )
    return sum(count for _, _, count, _ in all_runs(plan))


@given(st.data())
def test_no_other_order_has_fewer_runs(data):
    """For sides with the same layers and planes; with some left out, a few may touch by chance."""
    names = [f"layer.{index}" for index in range(data.draw(st.integers(1, 3)))]
    planes = data.draw(st.sampled_from([{"kv": 8}, {"k": 8, "v": 8}, {"k": 24, "v": 8}]))
    ranges = data.draw(st.sampled_from([((0, 1), (0, 1)), ((0, 4), (0, 4)), ((0, 4), (2, 4))]))
    producer, consumer = (data.draw(sides("bfloat16", names, planes, heads)) for heads in ranges)
    assume(min(producer.num_blocks, consumer.num_blocks) > 4)  # for blocks that don't touch
    layer_first = data.draw(st.booleans())
    order = _core.choose_wire_order(producer.layout(), consumer.layout(), layer_first)

    def total(order):
        return sum(
            pieces(side, other, order, (names, list(planes)))
            for side, other in ((producer, consumer), (consumer, producer))
        )

    allowed = [other for other in ORDERS if other[0] == "L" or not layer_first]
    assert order in allowed
    assert total(order) == min(total(other) for other in allowed)


@given(transfers(), st.booleans())
def test_the_order_is_valid_and_always_the_same(transfer, layer_first):
    layouts = transfer.producer.layout(), transfer.consumer.layout()
    order = _core.choose_wire_order(*layouts, layer_first)
    assert order in ORDERS
    assert order[0] == "L" or not layer_first
    assert order == _core.choose_wire_order(*layouts, layer_first)
