"""Codecs as callers write them, the choice of `auto`, and scales of caches."""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvtest.agents import LONG, pair
from kvtest.caches import Geometry, Paged
from kvtest.coded import fill_like_a_model

import kvxfer
from kvxfer import Codec, InvalidError, _core

NAMES = ["fp8_e4m3", "fp8_e5m2", "int8", "auto"]


@pytest.mark.parametrize(
    ("text", "codec"),
    [
        ("raw", Codec()),
        (" int8 ", Codec("int8")),
        ("int8()", Codec("int8")),
        ("int8(panel_tokens=32)", Codec("int8", panel_tokens=32)),
        ("fp8_e4m3( group=32 , scale=e8m0 )", Codec("fp8_e4m3", group=32, scale="e8m0")),
        ("tiered", Codec("int8", recent=1000, sinks=4)),
        ("tiered()", kvxfer.tiered()),
        ("tiered(recent=10, sinks=2, codec=fp8_e5m2)", kvxfer.tiered(10, 2, "fp8_e5m2")),
        ("tiered(codec=auto, panel_tokens=16)", kvxfer.tiered(codec="auto", panel_tokens=16)),
    ],
)
def test_texts(text: str, codec: Codec) -> None:
    assert Codec.parse(text) == codec
    assert Codec.parse(codec) is codec


@st.composite
def codecs(draw: st.DrawFn) -> Codec:
    name = draw(st.sampled_from(NAMES))
    scales = [None, "float32", "bfloat16", *(["e8m0"] * name.startswith("fp8"))]
    return Codec(
        name,
        draw(st.none() | st.integers(1, 256)),
        draw(st.none() | st.integers(0, 65535)),
        draw(st.sampled_from(scales)),
        draw(st.integers(0, 1 << 20)),
        draw(st.integers(0, 1 << 20)),
    )


@given(codec=codecs())
def test_what_str_writes_is_read_again(codec: Codec) -> None:
    assert Codec.parse(str(codec)) == codec


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("zip", "'zip' is not known; there are raw, fp8_e4m3"),
        ("", "expected a name"),
        ("int8(", "expected a name"),
        ("int8)x", "expected a name"),
        ("int8(32)", "'32' is not option=value"),
        ("int8(panel_tokens=)", "is not option=value"),
        ("int8(panel_tokens=a)", "panel_tokens=a is not an integer"),
        ("int8(panel_tokens=1, panel_tokens=2)", "panel_tokens is there twice"),
        ("int8(panels=1)", "no option 'panels'; there are panel_tokens, group, scale"),
        ("int8(recent=1)", "no option 'recent'"),
        ("int8(panel_tokens=0)", "panel_tokens is 0; it is an integer of 1 to 256"),
        ("int8(group=65536)", "group is 65536"),
        ("int8(scale=e8m0)", "'e8m0' is for fp8_e4m3 and fp8_e5m2"),
        ("fp8_e4m3(scale=float16)", "scale 'float16' is not known"),
        ("raw(panel_tokens=64)", "raw has no options, but panel_tokens"),
        ("tiered(codec=raw)", "raw has no options, but recent, sinks"),
        ("tiered(codec=tiered)", "'tiered' is not known"),
        ("tiered(recent=99999999999)", "recent is 99999999999"),
    ],
)
def test_texts_that_make_no_sense(text: str, words: str) -> None:
    with pytest.raises(InvalidError, match=re.escape(words)):
        Codec.parse(text)


def test_values_that_make_no_sense() -> None:
    for changes in [
        {"panel_tokens": 1.5},
        {"panel_tokens": True},
        {"recent": -1},
        {"recent": None},
        {"group": "8"},
    ]:
        with pytest.raises(InvalidError, match=next(iter(changes))):
            Codec("int8", **changes)
    with pytest.raises(InvalidError, match="tiered already"):
        kvxfer.tiered(codec=kvxfer.tiered())
    with pytest.raises(InvalidError, match=r"\"zip\" is not known; there are raw"):
        _core.CodecSpec(codec="zip")
    with pytest.raises(InvalidError, match="float32, bfloat16 and e8m0"):
        _core.CodecSpec(codec="int8", scale="float8")


def test_the_list_says_what_each_is_for() -> None:
    listed = kvxfer.codecs()
    assert list(listed) == ["raw", "fp8_e4m3", "fp8_e5m2", "int8", "auto", "tiered"]
    for name, info in listed.items():
        assert info.name == name
        assert len(info.about) > 20
        assert isinstance(Codec.parse(name), Codec)


def test_the_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    assert kvxfer.Config().codec == "raw"
    monkeypatch.setenv("KVXFER_CODEC", "tiered(recent=10)")
    assert kvxfer.Config().codec == "tiered(recent=10)"
    monkeypatch.setenv("KVXFER_CODEC", "zip")
    with pytest.raises(kvxfer.ConfigError, match="'zip' is not known"):
        kvxfer.Config()


SIDE = Geometry(layers=("layer.0", "layer.1"), content=64)


def fetched(
    prefill: kvxfer.Agent, decode: kvxfer.Agent, codec: str | None, dtype: str = "bfloat16"
) -> kvxfer.Report:
    source = Paged(dataclasses.replace(SIDE, dtype=dtype))
    fill_like_a_model(source, 1)
    target = Paged(source.geometry)
    prefill.register(source.cache)
    decode.register(target.cache)
    offer = prefill.offer(source.cache, range(24), 24 * 16)
    fetch = decode.fetch(offer.ticket, target.cache, range(24), codec=codec, timeout=LONG)
    fetch.wait()
    assert target.same_as(source) == (fetch.report.codec == "raw")
    return fetch.report


@pytest.fixture
def slow() -> float:
    """Bytes a second."""
    return 4e6


def link(prefill: kvxfer.Agent, decode: kvxfer.Agent, rate: float) -> None:
    faults = _core.LoopbackFaults()
    faults.bytes_per_second = int(rate)
    decode._peers.attach_loopback(prefill._peers, faults)


def test_auto_encodes_for_a_slow_link(slow: float) -> None:
    with pair("loopback") as (prefill, decode):
        link(prefill, decode, slow)
        report = fetched(prefill, decode, "auto")
        assert report.codec == "int8"
        assert "auto: the link carries 0.004 GB/s, int8 encodes at" in report.codec_why
        assert report.bytes / report.wire_bytes > 1.8
        # The link is as slow as it says.
        assert report.seconds > 0.8 * report.wire_bytes / slow
        assert prefill.stats.wire_bytes_sent == report.wire_bytes
        assert decode.stats.wire_bytes_received == report.wire_bytes
        assert prefill.stats.bytes_sent == decode.stats.bytes_received == report.bytes
        tiers = fetched(prefill, decode, "tiered(recent=16, sinks=4, codec=auto)")
        assert tiers.codec == "int8"
        # With so few tokens left to encode there is little to win.
        assert fetched(prefill, decode, "tiered(recent=370, codec=auto)").codec == "raw"
        why = fetched(prefill, decode, "auto", "float8_e4m3fn").codec_why
        assert why == "auto: the cache holds float8_e4m3fn, which is 8 bit as it is"


def test_auto_leaves_a_fast_link_alone() -> None:
    with pair("loopback") as (prefill, decode):
        link(prefill, decode, 1e15)
        report = fetched(prefill, decode, "auto")
        assert report.codec == "raw"
        assert report.codec_why.endswith("which does not pay")


def test_auto_without_a_known_rate() -> None:
    with pair("loopback") as (prefill, decode):
        report = fetched(prefill, decode, "auto")
        assert report.codec == "raw"
        assert report.codec_why == "auto: the rate of the link is not known (yet)"


def test_auto_over_shared_memory() -> None:
    with pair("shm") as (prefill, decode):
        report = fetched(prefill, decode, "auto")
        assert report.codec == "raw"
        assert report.codec_why == "auto: memory is shared, so nothing crosses a link"


def test_the_agents_own_codec_is_the_default() -> None:
    with pair("loopback", codec="fp8_e4m3") as (prefill, decode):
        assert fetched(prefill, decode, None).codec == "fp8_e4m3"
        assert fetched(prefill, decode, "raw").codec == "raw"
    with pair("loopback") as (prefill, decode):
        assert fetched(prefill, decode, None).codec == "raw"


def cache(scales: object, dtype: str = "float8_e4m3fn") -> kvxfer.Cache:
    tensors = {
        name: tuple(np.zeros((4, 2, 16, 8), np.uint8) for _ in range(2)) for name in ("a", "b")
    }
    return kvxfer.Cache(tensors, dtype=dtype, scales=scales)


def test_scales_of_a_cache() -> None:
    assert cache(None).layout.scales == []
    assert cache((0.5, 2)).layout.scales == [0.5, 2, 0.5, 2]
    assert cache([[0.5, 2], [1, 4]]).layout.scales == [0.5, 2, 1, 4]
    assert cache(np.array([[0.5, 2], [1, 4]], np.float32)).layout.scales == [0.5, 2, 1, 4]
    assert cache(np.array([0.5, 2], np.float32)).layout.scales == [0.5, 2, 0.5, 2]


@pytest.mark.parametrize(
    ("scales", "words"),
    [
        ((1.0,), "layer 'a': it has 2 planes and 1 scales"),
        ((1.0, 2.0, 3.0), "layer 'a': it has 2 planes and 3 scales"),
        ([[1.0, 2.0]], "1 entries, where the cache has 2 layers"),
        ([[1.0, 2.0], 3.0], "2 entries, where the cache has 2 layers"),
        ([[1.0, 2.0], [3.0]], "layer 'b': it has 2 planes and 1 scales"),
        ((1.0, 0.0), "a scale is 0.0; as a float32 it must be finite, and at least 2^-126"),
        ((1.0, 1e-50), "a scale is 1e-50; "),
        ((1.0, 1e39), "a scale is 1e+39; "),
        ((1.0, float("nan")), "a scale is nan"),
        ((-1.0, 1.0), "a scale is -1.0"),
    ],
)
def test_scales_that_make_no_sense(scales: object, words: str) -> None:
    with pytest.raises(kvxfer.LayoutError, match=re.escape(words)):
        cache(scales)


def test_scales_are_for_8_bit_floats() -> None:
    with pytest.raises(kvxfer.LayoutError, match="elements of this one are uint8"):
        cache((1.0, 2.0), dtype="uint8")
    layout = _core.CacheLayout(
        num_blocks=1,
        block_size=1,
        num_heads=1,
        layers=["a"],
        planes=[("k", 4)],
        views=[(np.zeros(8, np.uint8).ctypes.data, 8, 8, 8, 2)],
        scales=[2.0],
    )
    with kvxfer.Agent("a") as agent, pytest.raises(InvalidError, match="only 8-bit floats"):
        agent._core.register_cache(layout)


_MEASURED = """
import sys
import kvxfer
from kvxfer import _core
from kvtest.agents import LONG, pair
from kvtest.caches import Geometry, Paged

with pair(sys.argv[1]) as (prefill, decode):
    source, target = Paged(Geometry(), seed=1), Paged(Geometry())
    prefill.register(source.cache)
    decode.register(target.cache)
    if sys.argv[2] == "ahead":
        rates = kvxfer.codec_rates()
        assert rates == kvxfer.codec_rates()
        assert min(rates.pack, rates.unpack, rates.encode, rates.decode) > 0
    offer = prefill.offer(source.cache, [1, 2], 32)
    before = _core.codec_rates_known()
    fetch = decode.fetch(offer.ticket, target.cache, [1, 2], codec="auto", timeout=LONG)
    fetch.wait()
    print(before, _core.codec_rates_known(), fetch.report.codec)
"""


@pytest.mark.parametrize(
    ("transport", "when", "known"),
    [
        ("loopback", "never", "False False raw"),
        ("shm", "never", "False False raw"),
        ("tcp", "never", "False True"),
        ("tcp", "ahead", "True True"),
    ],
)
def test_rates_are_measured_where_they_matter_only(transport: str, when: str, known: str) -> None:
    run = subprocess.run(
        [sys.executable, "-c", _MEASURED, transport, when],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.startswith(known)
