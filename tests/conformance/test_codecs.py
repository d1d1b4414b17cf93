"""Codecs and other element types from end to end over every transport, against NumPy."""

from __future__ import annotations

import contextlib
import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kvtest.agents import LONG, consumer, producer, registered
from kvtest.caches import Geometry, Paged
from kvtest.coded import NEVER, Coding, deliver_coded, fill_like_a_model
from kvtest.strategies import Case, cases, examples

import kvxfer
from kvxfer import Status

SIDE = Geometry(layers=("layer.0", "layer.1"), num_blocks=12, content=64)
OTHER = dataclasses.replace(SIDE, axes="BNHC", block_size=8, num_blocks=24)
BLOCKS, OTHER_BLOCKS = [7, 2, 9, 0, 5, 11, 3, 8], [20, 3, 5, 17, 0, 9, 8, 1, 2, 4, 6, 7, 10, 11, 12]
TOKENS = 117  # no multiple of a block or a panel
CODECS = ["fp8_e4m3", "fp8_e5m2", "int8"]
Agents = tuple[kvxfer.Agent, kvxfer.Agent]


def model_like(geometry: Geometry, seed: int = 1) -> Paged:
    made = Paged(geometry)
    fill_like_a_model(made, seed)
    return made


def fetch_into(
    agents: Agents, source: Paged, target: Paged, codec: str | kvxfer.Codec, **options: object
) -> kvxfer.Report:
    """Fetch all of the tokens, and return the report."""
    prefill, decode = agents
    with (
        registered(prefill, source.cache),
        registered(decode, target.cache),
        prefill.offer(source.cache, BLOCKS, TOKENS) as offer,
    ):
        fetch = decode.fetch(
            offer.ticket, target.cache, OTHER_BLOCKS, codec=codec, timeout=LONG, **options
        )
        fetch.wait()
        assert offer.wait(LONG) is Status.OK
        return fetch.report


def check(
    agents: Agents, source: Paged, target: Paged, codec: str | kvxfer.Codec, coding: Coding
) -> kvxfer.Report:
    report = fetch_into(agents, source, target, codec)
    want = Paged(target.geometry)
    done = deliver_coded(want, [source], BLOCKS, OTHER_BLOCKS, (0, TOKENS), coding)
    assert target.same_as(want)
    assert (report.codec, report.exceptions) == (coding.codec, done.exceptions)
    assert report.clamped == done.clamped
    assert report.bytes == TOKENS * target.cache.layout.token_bytes()
    return report


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("codec", CODECS)
def test_every_codec_of_every_type(agents: Agents, codec: str, dtype: str) -> None:
    source = model_like(dataclasses.replace(SIDE, dtype=dtype))
    target = Paged(dataclasses.replace(OTHER, dtype=dtype))
    report = check(agents, source, target, codec, Coding(codec))
    ratio = report.bytes / report.wire_bytes
    assert ratio > (3.2 if dtype == "float32" else 1.6)
    assert report.codec_why == "as asked"


def test_raw_crosses_the_link_as_it_is(agents: Agents) -> None:
    source, target = Paged(SIDE, seed=1), Paged(OTHER)
    report = check(agents, source, target, "raw", Coding())
    assert report.wire_bytes == report.bytes


@pytest.mark.parametrize(
    ("codec", "coding"),
    [
        ("int8(panel_tokens=5)", Coding("int8", panel_tokens=5)),
        ("int8(panel_tokens=256, scale=float32)", Coding("int8", 256, scale="float32")),
        ("int8(group=24)", Coding("int8", group=24)),
        ("fp8_e4m3(group=32, scale=e8m0)", Coding("fp8_e4m3", group=32, scale="e8m0")),
        ("fp8_e4m3(group=64)", Coding("fp8_e4m3")),
        ("fp8_e4m3(group=60000)", Coding("fp8_e4m3")),
        ("tiered(recent=40, sinks=3)", Coding("int8", raw_until=3, raw_from=TOKENS - 40)),
        ("tiered(recent=1, sinks=0, codec=fp8_e4m3)", Coding("fp8_e4m3", raw_from=TOKENS - 1)),
        ("tiered(recent=0, sinks=70)", Coding("int8", raw_until=70)),
    ],
)
def test_options(agents: Agents, codec: str, coding: Coding) -> None:
    report = check(agents, model_like(SIDE), Paged(OTHER), codec, coding)
    assert ("travel as they are" in report.codec_why) == codec.startswith("tiered")


def test_tiers_that_leave_nothing_to_encode(agents: Agents) -> None:
    """Then memory is copied, which is faster."""
    source, target = Paged(SIDE, seed=1), Paged(OTHER)
    report = check(agents, source, target, kvxfer.tiered(recent=TOKENS), Coding())
    assert report.wire_bytes == report.bytes
    assert report.codec_why == "no tokens are outside the tiers"


def test_rows_that_cannot_be_encoded(agents: Agents) -> None:
    """NaN, infinity and what is too large arrive as what they are."""
    source = model_like(SIDE)
    rng = np.random.default_rng(3)
    for value in [0x7FC1, 0xFF80, 0x7F80, 0x7200, 0xFF7F]:  # NaN, infinities, 2^101, the largest
        for plane in SIDE.planes:
            block, head, slot = rng.choice(BLOCKS), rng.integers(4), rng.integers(16)
            source.view("layer.1", plane)[block, head, slot, rng.integers(64)] = value
    source.view("layer.0", "k")[BLOCKS[2], 1] = 0x7FC0  # a whole run of rows
    for codec in CODECS:
        report = check(agents, source, Paged(OTHER), codec, Coding(codec))
        assert report.exceptions > 16


def test_bits_that_are_no_numbers_at_all(agents: Agents) -> None:
    """Random bits are full of NaN and extremes: most rows go raw, none is lost."""
    source = Paged(SIDE, seed=5)
    for codec in CODECS:
        report = check(agents, source, Paged(OTHER), codec, Coding(codec))
        assert report.exceptions > 0
        assert report.wire_bytes < 2 * report.bytes


CONVERSIONS = [
    ("bfloat16", None, "float16", None),
    ("float32", None, "bfloat16", None),
    ("float16", None, "float32", None),
    ("bfloat16", None, "float8_e4m3fn", (0.05, 0.02)),
    ("bfloat16", None, "float8_e4m3fnuz", (0.25, 1.0)),
    ("float8_e4m3fn", (0.5, 2.0), "bfloat16", None),
    ("float8_e5m2", None, "float16", None),
]


@pytest.mark.parametrize(
    ("codec", "of", "of_scales", "to", "to_scales"),
    [
        (codec, *conversion)
        for codec in ("raw", "int8", "fp8_e4m3")
        for conversion in CONVERSIONS
        if codec == "raw" or not conversion[0].startswith("float8")
    ],
)
def test_caches_of_other_types(
    agents: Agents,
    codec: str,
    of: str,
    of_scales: tuple[float, ...] | None,
    to: str,
    to_scales: tuple[float, ...] | None,
) -> None:
    source = model_like(dataclasses.replace(SIDE, dtype=of, scales=of_scales))
    target = Paged(dataclasses.replace(OTHER, dtype=to, scales=to_scales))
    report = check(agents, source, target, codec, Coding(codec))
    assert f"{of} becomes {to}" in report.codec_why


@pytest.mark.parametrize("codec", ["raw", "int8", "fp8_e4m3"])
def test_a_scale_for_each_layer(agents: Agents, codec: str) -> None:
    source = model_like(SIDE)
    scales = ((0.05, 0.02), (0.25, 1.5))
    target = Paged(dataclasses.replace(OTHER, dtype="float8_e4m3fn", scales=scales))
    check(agents, source, target, codec, Coding(codec))


def test_scales_of_the_producer_for_each_layer(agents: Agents) -> None:
    """Its layers are in another order than the consumer's."""
    source = model_like(
        dataclasses.replace(
            SIDE,
            layers=SIDE.layers[::-1],
            dtype="float8_e4m3fn",
            scales=((0.5, 2.0), (0.0625, 0.3)),
        )
    )
    for dtype, scales in (("bfloat16", None), ("float8_e4m3fn", ((0.0625, 0.3), (0.5, 2.0)))):
        check(
            agents,
            source,
            Paged(dataclasses.replace(OTHER, dtype=dtype, scales=scales)),
            "raw",
            Coding(),
        )


def test_what_is_too_large_becomes_the_largest_and_is_counted(agents: Agents) -> None:
    source = model_like(SIDE)
    source.view("layer.0", "v")[BLOCKS[0], 0, :3] = 0x4900  # 2^19, beyond float16
    target = Paged(dataclasses.replace(OTHER, dtype="float16"))
    assert check(agents, source, target, "raw", Coding()).clamped == 3 * 64


@pytest.mark.parametrize(
    ("of", "of_scales", "to", "to_scales"),
    [
        ("float8_e4m3fn", None, "float8_e4m3fnuz", (2.0, 2.0)),
        ("float8_e4m3fnuz", (2.0, 1.0), "float8_e4m3fn", (1.0, 0.5)),
        ("float8_e4m3fn", (0.5, 3.0), "float8_e4m3fn", (0.5, 3.0)),
    ],
)
def test_8_bit_floats_that_have_an_equal(
    agents: Agents,
    of: str,
    of_scales: tuple[float, ...] | None,
    to: str,
    to_scales: tuple[float, ...] | None,
) -> None:
    source = model_like(dataclasses.replace(SIDE, dtype=of, scales=of_scales))
    for plane in SIDE.planes:  # what has no equal in the other dialect
        view = source.view("layer.0", plane)
        view[view & 0x78 == 0] = 0x30
        view = source.view("layer.1", plane)
        view[view & 0x78 == 0] = 0x31
        for layer in SIDE.layers:
            view = source.view(layer, plane)
            view[view & 0x7F >= 0x78] = 0x70
    target = Paged(dataclasses.replace(OTHER, dtype=to, scales=to_scales))
    report = check(agents, source, target, "raw", Coding())
    assert report.wire_bytes >= report.bytes


def test_8_bit_floats_without_an_equal_fail_the_fetch(agents: Agents) -> None:
    source = model_like(dataclasses.replace(SIDE, dtype="float8_e4m3fn"))
    source.view("layer.1", "v")[BLOCKS[3], 2, 5, 7] = 0x7E  # 448: fnuz ends at 240
    target = Paged(dataclasses.replace(OTHER, dtype="float8_e4m3fnuz"))
    with pytest.raises(kvxfer.TransferError) as caught:
        fetch_into(agents, source, target, "raw")
    assert caught.value.status is Status.MISMATCH
    for words in ["no equal", "float8_e4m3fn in", "float8_e4m3fnuz", "'prefill'"]:
        assert words in str(caught.value)


@pytest.mark.parametrize("codec", ["int8", "tiered(recent=20, sinks=2)", "raw"])
def test_layers_that_become_ready_later(agents: Agents, codec: str) -> None:
    prefill, decode = agents
    complete, source = model_like(SIDE), Paged(SIDE)
    target = Paged(dataclasses.replace(OTHER, dtype="float16"))
    with registered(prefill, source.cache), registered(decode, target.cache):
        offer = prefill.offer(source.cache, BLOCKS, TOKENS, ready=False)
        fetch = decode.fetch(offer.ticket, target.cache, OTHER_BLOCKS, codec=codec, timeout=LONG)
        for index in (1, 0):
            assert not fetch.done
            for array, data in zip(source.arrays[index], complete.arrays[index], strict=True):
                array[...] = data
            offer.mark_ready(index)
        fetch.wait()
        assert offer.wait(LONG) is Status.OK
    tiers = (2, TOKENS - 20) if codec.startswith("tiered") else (0, NEVER)
    coding = Coding("raw" if codec == "raw" else "int8", raw_until=tiers[0], raw_from=tiers[1])
    want = Paged(target.geometry)
    deliver_coded(want, [complete], BLOCKS, OTHER_BLOCKS, (0, TOKENS), coding)
    assert target.same_as(want)


@pytest.mark.parametrize("codec", CODECS)
def test_slices_of_several_agents(transport: str, codec: str) -> None:
    cuts = [(("layer.0",), (0, 1)), (("layer.0",), (1, 4)), (("layer.1",), (0, 4))]
    with contextlib.ExitStack() as stack:
        sources, references, ranks = [], [], []
        for number, (layers, heads) in enumerate(cuts):
            source = model_like(dataclasses.replace(SIDE, layers=layers, heads=heads), number)
            rank = stack.enter_context(producer(transport, f"rank-{number}"))
            rank.register(source.cache)
            sources.append(source)
            ranks.append(rank)
            references.append(rank.reference(layers=layers, heads=heads))
        ticket = kvxfer.issue_ticket("request", references, num_tokens=TOKENS)
        for rank, source in zip(ranks, sources, strict=True):
            rank.offer(source.cache, BLOCKS, ticket=ticket)
        decode = stack.enter_context(consumer(transport))
        target = Paged(OTHER)
        decode.register(target.cache)
        fetch = decode.fetch(ticket, target.cache, OTHER_BLOCKS, codec=codec, timeout=LONG)
        fetch.wait()
        want = Paged(OTHER)
        deliver_coded(want, sources, BLOCKS, OTHER_BLOCKS, (0, TOKENS), Coding(codec))
        assert target.same_as(want)
        assert fetch.report.codec == codec


@pytest.mark.parametrize("codec", ["raw", "int8"])
def test_producers_of_several_types_in_one_fetch(transport: str, codec: str) -> None:
    cuts = [
        (("layer.0",), (0, 1), "float16"),
        (("layer.0",), (1, 4), "float32"),
        (("layer.1",), (0, 4), "bfloat16"),
    ]
    with contextlib.ExitStack() as stack:
        sources, ranks = [], []
        for number, (layers, heads, dtype) in enumerate(cuts):
            side = dataclasses.replace(SIDE, layers=layers, heads=heads, dtype=dtype)
            sources.append(model_like(side, number))
            ranks.append(stack.enter_context(producer(transport, f"rank-{number}")))
        references = [
            rank.reference(layers=layers, heads=heads)
            for rank, (layers, heads, _) in zip(ranks, cuts, strict=True)
        ]
        ticket = kvxfer.issue_ticket("request", references, num_tokens=TOKENS)
        for rank, source in zip(ranks, sources, strict=True):
            rank.register(source.cache)
            rank.offer(source.cache, BLOCKS, ticket=ticket)
        decode = stack.enter_context(consumer(transport))
        target = Paged(OTHER)
        decode.register(target.cache)
        fetch = decode.fetch(ticket, target.cache, OTHER_BLOCKS, codec=codec, timeout=LONG)
        fetch.wait()
        want = Paged(OTHER)
        deliver_coded(want, sources, BLOCKS, OTHER_BLOCKS, (0, TOKENS), Coding(codec))
        assert target.same_as(want)
        assert fetch.report.codec == codec
        for dtype in ("float16", "float32"):
            assert f"{dtype} becomes bfloat16" in fetch.report.codec_why
        assert "bfloat16 becomes" not in fetch.report.codec_why


@pytest.mark.parametrize(
    ("content", "tokens", "panel_tokens"),
    [(300, 47, 256), (300, 200, 256), (576, 117, 128), (72, 90, 200)],
)
def test_small_fetches_have_panels_as_large_as_asked_for(
    transport: str, content: int, tokens: int, panel_tokens: int
) -> None:
    """A chunk of a small fetch is small, but holds a panel."""
    side = dataclasses.replace(SIDE, layers=("layer.0",), content=content, block_size=32)
    source, target = model_like(side), Paged(side)
    blocks = [7, 2, 9, 0, 5, 11, 3]
    knobs = {"arena_bytes": 16 << 20, "chunk_bytes": 1 << 20}
    with producer(transport, **knobs) as prefill, consumer(transport, **knobs) as decode:
        prefill.register(source.cache)
        decode.register(target.cache)
        for codec in ("int8", "fp8_e4m3"):
            target.poison()
            offer = prefill.offer(source.cache, blocks, tokens)
            asked = kvxfer.Codec(codec, panel_tokens)
            fetch = decode.fetch(offer.ticket, target.cache, blocks, codec=asked, timeout=LONG)
            fetch.wait()
            want = Paged(side)
            coding = Coding(codec, panel_tokens)
            deliver_coded(want, [source], blocks, blocks, (0, tokens), coding)
            assert target.same_as(want)
            assert fetch.report.codec_why == "as asked"


def test_an_mla_latent_in_groups(agents: Agents) -> None:
    """A row of more than 256 elements has several scales; a chunk holds few of its panels."""
    side = dataclasses.replace(
        SIDE, axes="BNC", planes=("kv",), content=576, heads=(0, 1), layers=("layer.0",)
    )
    source = model_like(side)
    target = Paged(dataclasses.replace(side, block_size=8, num_blocks=24))
    for codec in ("fp8_e4m3", "int8"):
        target.poison()
        report = fetch_into(agents, source, target, codec)
        # 64 tokens, all raw, would not fit into the 64 KiB of a chunk: the panels are halved.
        want = Paged(target.geometry)
        coding = Coding(codec, panel_tokens=32)
        deliver_coded(want, [source], BLOCKS, OTHER_BLOCKS, (0, TOKENS), coding)
        assert target.same_as(want)
        assert report.codec == codec
        assert "; panels have 32 tokens, not 64, for a chunk of 65536" in report.codec_why


@st.composite
def codings(draw: st.DrawFn) -> tuple[kvxfer.Codec, Coding]:
    codec = draw(st.sampled_from(CODECS))
    panel, group = draw(st.sampled_from([1, 7, 16, 64, 200])), draw(st.sampled_from([0, 1, 5, 32]))
    scale = draw(st.sampled_from(["float32", "bfloat16"] + ["e8m0"] * codec.startswith("fp8")))
    return kvxfer.Codec(codec, panel, group, scale), Coding(codec, panel, group, scale)


WIDE = ["float32", "float16", "bfloat16"]


@settings(max_examples=examples(30))
@given(
    case=cases(),
    coding=codings(),
    tiers=st.tuples(st.integers(0, 60), st.integers(0, 60)),
    of=st.sampled_from(WIDE),
    to=st.sampled_from([*WIDE, "float8_e4m3fn", "float8_e5m2"]),
    tame=st.booleans(),
)
def test_random_layouts_and_slices(
    agents: Agents,
    case: Case,
    coding: tuple[kvxfer.Codec, Coding],
    tiers: tuple[int, int],
    of: str,
    to: str,
    tame: bool,
) -> None:
    """Numbers as of a model, or random bits, which are full of NaN and extremes."""
    prefill, decode = agents
    source = Paged(dataclasses.replace(case.producer, dtype=of), seed=case.seed)
    if tame:
        fill_like_a_model(source, case.seed)
    target = Paged(dataclasses.replace(case.consumer, dtype=to))
    sinks, recent = tiers
    codec = dataclasses.replace(coding[0], sinks=sinks, recent=recent)
    raw_from = max(sinks, case.offered[1] - recent) if recent else NEVER
    resolved = dataclasses.replace(coding[1], raw_until=sinks, raw_from=raw_from)
    with registered(prefill, source.cache), registered(decode, target.cache):
        offer = prefill.offer(
            source.cache,
            case.producer_blocks,
            case.offered[1] - case.offered[0],
            first_token=case.offered[0],
        )
        fetch = decode.fetch(
            offer.ticket,
            target.cache,
            case.consumer_blocks,
            tokens=slice(*case.wanted),
            first_slot=case.first_slot,
            codec=codec,
            timeout=LONG,
        )
        fetch.wait()
        assert offer.wait(LONG) is Status.OK
    want = Paged(target.geometry)
    done = deliver_coded(
        want,
        [source],
        case.producer_blocks,
        case.consumer_blocks,
        case.wanted,
        resolved,
        offered_from=case.offered[0],
        first_slot=case.slot,
    )
    assert target.same_as(want)
    assert (fetch.report.exceptions, fetch.report.clamped) == (done.exceptions, done.clamped)
