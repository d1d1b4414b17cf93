"""What CacheLayout.validate() accepts and refuses."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from kv_model import ELEMENTS

import kvxfer
from kvxfer import _core

BASE = 1 << 40  # nothing is ever read there


def layout(**changes: object) -> _core.CacheLayout:
    """4 blocks of 3 tokens, 2 heads, 8 float16 elements, block-major."""
    fields: dict[str, object] = {
        "num_blocks": 4,
        "block_size": 3,
        "num_heads": 2,
        "layers": ["a"],
        "planes": [("k", 8)],
        "views": [(BASE, 96, 48, 16, 2)],
        "element": "float16",
    }
    return _core.CacheLayout(**{**fields, **changes})


def test_a_good_layout():
    good = layout(first_head=6, model="m")
    good.validate()
    assert good.token_bytes() == 8 * 2 * 2
    assert (good.num_blocks, good.block_size, good.num_heads, good.first_head) == (4, 3, 2, 6)
    assert (good.layers, good.planes, good.model, good.element) == (
        ["a"],
        [("k", 8)],
        "m",
        "float16",
    )
    assert good.views == [(BASE, 96, 48, 16, 2)]


def test_element_types():
    for name, size in ELEMENTS.items():
        assert _core.element_bytes(name) == size
        assert layout(element=name).element == name
    with pytest.raises(kvxfer.InvalidError, match='"int4" is not supported; .* float8_e4m3fn'):
        layout(element="int4")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layers": []}, "no layers"),
        ({"planes": []}, "no planes"),
        ({"num_blocks": 0}, "0 blocks"),
        ({"block_size": 0}, "0 tokens per block"),
        ({"num_heads": 0}, "0 kv heads"),
        ({"planes": [("k", 0)]}, 'plane "k" has a content of 0'),
        ({"layers": [""]}, "empty name"),
        ({"planes": [("", 8)]}, "empty name"),
        ({"views": []}, "has 0 views, but 1 layers of 1 planes need 1"),
        ({"first_head": 2**32 - 1}, "first_head 4294967295 plus 2 heads"),
        ({"views": [(0, 96, 48, 16, 2)]}, 'layer "a", plane "k": the address of its data is null'),
        ({"views": [(BASE, 96, 48, 16, -2)]}, "stride of the content axis is -2"),
        ({"views": [(BASE, 96, 48, 0, 2)]}, "stride of the token axis is 0 bytes; .* positive"),
        ({"views": [(BASE, -96, 48, 16, 2)]}, "stride of the block axis is -96"),
        ({"views": [(BASE, 96, 47, 16, 2)]}, "kv head axis is 47 bytes, less than the 48"),
        ({"views": [(BASE, 96, 48, 16, 1)]}, "content axis is 1 bytes, less than the 2"),
        ({"views": [(BASE, 48, 48, 16, 2)]}, "less than the 96 bytes that its kv head spans"),
        ({"views": [(BASE, 2**62, 48, 16, 2)]}, "too much for 4"),
        ({"views": [(2**64 - 64, 96, 48, 16, 2)]}, "end of the address space"),
    ],
)
def test_refused(changes, message):
    with pytest.raises(kvxfer.InvalidError, match=message):
        layout(**changes).validate()


def test_names_must_be_unique():
    views = [(BASE, 96, 48, 16, 2), (BASE + 4096, 96, 48, 16, 2)]
    with pytest.raises(kvxfer.InvalidError, match='layer "a" is named twice'):
        layout(layers=["a", "a"], views=views).validate()
    with pytest.raises(kvxfer.InvalidError, match='plane "k" is named twice'):
        layout(planes=[("k", 8), ("k", 8)], views=views).validate()


def test_strides_of_axes_with_one_element_do_not_matter():
    layout(num_blocks=1, views=[(BASE, -7, 48, 16, 2)]).validate()
    layout(num_heads=1, views=[(BASE, 48, 0, 16, 2)]).validate()
    layout(planes=[("k", 1)], views=[(BASE, 12, 6, 2, 0)]).validate()


PLANES = [("k", 8), ("v", 8)]


@pytest.mark.parametrize(
    ("planes", "views"),
    [
        # K and V packed in the content axis, in equal and in unequal parts.
        (PLANES, [(BASE, 192, 96, 32, 2), (BASE + 16, 192, 96, 32, 2)]),
        ([("k", 12), ("v", 4)], [(BASE, 192, 96, 32, 2), (BASE + 24, 192, 96, 32, 2)]),
        # Element by element.
        (PLANES, [(BASE, 192, 96, 32, 4), (BASE + 2, 192, 96, 32, 4)]),
        # Token by token, and behind each other.
        (PLANES, [(BASE, 192, 32, 64, 2), (BASE + 16, 192, 32, 64, 2)]),
        (PLANES, [(BASE, 96, 48, 16, 2), (BASE + 4 * 96, 96, 48, 16, 2)]),
    ],
)
def test_planes_may_interleave(planes, views):
    layout(planes=planes, views=views).validate()


@pytest.mark.parametrize("shift", [0, 2, 14, 16, 48, 96, 4 * 96 - 16, -16, -96])
def test_planes_that_share_memory_are_refused(shift):
    views = [(BASE, 96, 48, 16, 2), (BASE + shift, 96, 48, 16, 2)]
    with pytest.raises(
        kvxfer.InvalidError, match='plane "k" and layer "a", plane "v" share memory'
    ):
        layout(planes=PLANES, views=views).validate()


def test_views_of_other_strides_that_share_memory_are_refused():
    views = [(BASE, 96, 48, 16, 2), (BASE, 96, 16, 32, 2)]
    with pytest.raises(kvxfer.InvalidError, match="share memory"):
        layout(planes=PLANES, views=views).validate()


def bytes_of(view: tuple[int, ...], extents: tuple[int, ...], element: int) -> list[int]:
    address, *strides = view
    return [
        address + sum(i * s for i, s in zip(index, strides, strict=True)) + byte
        for index in itertools.product(*map(range, extents))
        for byte in range(element)
    ]


small = st.integers(1, 3)


@given(
    st.tuples(small, small, small, small),
    st.tuples(*[st.integers(1, 24)] * 4),
    st.sampled_from(["uint8", "float16"]),
)
def test_what_is_accepted_has_no_shared_bytes(extents, strides, element):
    blocks, heads, tokens, content = extents
    view = (BASE, *strides)
    described = layout(
        num_blocks=blocks,
        num_heads=heads,
        block_size=tokens,
        planes=[("k", content)],
        views=[view],
        element=element,
    )
    covered = bytes_of(view, extents, ELEMENTS[element])
    try:
        described.validate()
    except kvxfer.InvalidError:
        return
    assert len(set(covered)) == len(covered)


@given(
    st.permutations(range(4)),
    st.tuples(small, small, small, small),
    st.tuples(*[st.integers(0, 3)] * 4),
    st.integers(1, 3),
    st.integers(-200, 200),
    st.sampled_from(["uint8", "float16"]),
)
def test_sharing_is_found_exactly_where_strides_are_equal(
    order, extents, padding, other_content, shift, element
):
    """Nested strides with gaps; the second plane may have another content size."""
    strides = [0] * 4
    span = ELEMENTS[element]
    for axis in order:
        strides[axis] = span + padding[axis]
        count = max(extents[axis], other_content if axis == 3 else 0)
        span = strides[axis] * (count - 1) + span
    first, second = (BASE, *strides), (BASE + shift, *strides)
    blocks, heads, tokens, content = extents
    other = (blocks, heads, tokens, other_content)
    # An axis of one element here and several there is judged by its corners only.
    assume((content == 1) == (other_content == 1))
    described = layout(
        num_blocks=blocks,
        num_heads=heads,
        block_size=tokens,
        planes=[("k", content), ("v", other_content)],
        views=[first, second],
        element=element,
    )
    size = ELEMENTS[element]
    shared = set(bytes_of(first, extents, size)) & set(bytes_of(second, other, size))
    if not shared:
        described.validate()
    else:
        with pytest.raises(kvxfer.InvalidError, match="share memory"):
            described.validate()
