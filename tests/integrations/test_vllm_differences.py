"""Sides that differ: parallelism, number types, codecs; and what is refused, by name."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

pytestmark = pytest.mark.filterwarnings("default")


@pytest.fixture
def pair(fake: Any) -> Any:
    from rig import pair

    return pair


@pytest.fixture
def numbers(fake: Any) -> Any:
    """The class rig.arithmetic.Numbers, with few levels: 8-bit floats hold these exactly."""
    from rig.arithmetic import Numbers

    return lambda *given, **more: Numbers(*given, **{"levels": 15, **more})


def _needs_avx512() -> None:
    import torch

    if not torch.cpu._is_avx512_supported():
        pytest.skip("vLLM keeps 8-bit caches on processors with AVX-512 only")


@pytest.mark.parametrize(("tp", "other"), [(1, 2), (2, 1), (2, 2), (4, 2)])
def test_tensor_parallel_degrees(
    engine: Callable[..., Any], pair: Any, tp: int, other: int
) -> None:
    p = engine("kv_producer", tp=tp, extra={"lease": 1000})
    d = engine("kv_consumer", tp=other, block_size=64)
    for length in (1, 2, 33, 200):  # the first is declined by all ranks
        tokens = pair.prompt(length)
        _, params = pair.prefill(p, tokens)
        pair.decode(d, tokens, params, p)
    name, params = pair.prefill(p, pair.prompt(300))
    gone = d.add(pair.prompt(300), params=params)
    d.step()
    d.abort(gone)
    pair.settle(p, d)
    assert "failures" not in d.stats or d.stats["failures"] == {"cancelled": other}


@pytest.mark.parametrize("codec", ["int8", "fp8_e4m3"])
def test_codec_is_handed_on(engine: Callable[..., Any], pair: Any, codec: str) -> None:
    p, d = engine("kv_producer"), engine("kv_consumer", block_size=64, extra={"codec": codec})
    tokens = pair.prompt(300)
    _, params = pair.prefill(p, tokens)
    name = d.add(tokens, params=params)
    pair.step_until(lambda: d.answers[name]["finish"] is not None, d, p)
    assert "failures" not in d.stats
    assert d.wrong  # it rounds, so it was used
    assert 0 < d.stats["wire_bytes"] < d.stats["loaded_bytes"] / 2
    pair.settle(p, d)


def test_raw_over_tcp_is_exact(engine: Callable[..., Any], pair: Any) -> None:
    agent = {"transport": "tcp"}
    p = engine("kv_producer", extra={"agent": agent})
    d = engine("kv_consumer", block_size=64, extra={"agent": agent, "codec": "raw"})
    tokens = pair.prompt(300)
    _, params = pair.prefill(p, tokens)
    pair.decode(d, tokens, params, p)
    assert d.stats["loads"] == 1
    assert d.stats["wire_bytes"] == d.stats["loaded_bytes"]
    pair.settle(p, d)


@pytest.mark.parametrize(
    ("there", "here"),
    [((2, 1), (1, 1)), ((1, 2), (2, 1)), ((2, 2), (1, 1)), ((1, 1), (2, 1)), ((2, 1), (2, 2))],
)
def test_pipeline_stages(
    engine: Callable[..., Any], pair: Any, there: tuple[int, int], here: tuple[int, int]
) -> None:
    """(pp, tp) on either side: each rank fetches its layers from whoever holds them."""
    windows = (None, 64)
    p = engine("kv_producer", pp=there[0], tp=there[1], windows=windows, extra={"lease": 1000})
    d = engine("kv_consumer", pp=here[0], tp=here[1], windows=windows)
    for length in (1, 2, 33, 200):
        tokens = pair.prompt(length)
        _, params = pair.prefill(p, tokens)
        pair.decode(d, tokens, params, p)
        pair.settle(p, d)
    assert "failures" not in d.stats


@pytest.mark.parametrize(("there", "here"), [("bfloat16", "float32"), ("float32", "bfloat16")])
@pytest.mark.parametrize("codec", ["raw", "auto"])
def test_models_of_other_types(
    engine: Callable[..., Any], pair: Any, numbers: Any, there: str, here: str, codec: str
) -> None:
    p = engine("kv_producer", numbers=numbers(there))
    d = engine("kv_consumer", numbers=numbers(here), block_size=64, extra={"codec": codec})
    for length in (2, 33, 300):
        tokens = pair.prompt(length)
        _, params = pair.prefill(p, tokens)
        pair.decode(d, tokens, params, p)
    assert d.stats["loads"] == 3
    assert "failures" not in d.stats
    pair.settle(p, d)


@pytest.mark.parametrize(
    ("there", "here"),
    [
        ({}, {"cache": "fp8", "scales": (0.5, 2.0)}),
        ({"cache": "fp8", "scales": (0.5, 2.0)}, {}),
        ({"cache": "fp8", "scales": (0.5, 2.0)}, {"cache": "fp8", "scales": (0.5, 2.0)}),
        ({"cache": "fp8", "scales": (0.5, 2.0)}, {"cache": "fp8", "scales": (1.0, 0.5)}),
    ],
)
def test_caches_of_8_bits(
    engine: Callable[..., Any], pair: Any, numbers: Any, there: dict[str, Any], here: dict[str, Any]
) -> None:
    """Quantized and restored with each side's own scales, whatever the other's are."""
    _needs_avx512()
    p = engine("kv_producer", numbers=numbers(**there))
    d = engine("kv_consumer", numbers=numbers(**here), block_size=64)
    for length in (2, 33, 300):
        tokens = pair.prompt(length)
        _, params = pair.prefill(p, tokens)
        pair.decode(d, tokens, params, p)
    assert d.stats["loads"] == 3
    assert "failures" not in d.stats
    pair.settle(p, d)


def test_scales_that_no_8_bit_float_can_follow(
    engine: Callable[..., Any], pair: Any, numbers: Any, log: list[str]
) -> None:
    """Nothing is rounded a second time: the load fails, and says why."""
    _needs_avx512()
    p = engine("kv_producer", numbers=numbers(cache="fp8", scales=(1.0, 1.0)))
    d = engine("kv_consumer", numbers=numbers(cache="fp8", scales=(0.3, 1.0), levels=1))
    tokens = pair.prompt(100)
    _, params = pair.prefill(p, tokens)
    name = d.add(tokens, params=params)
    pair.step_until(lambda: d.answers[name]["finish"] is not None, d, p)
    assert d.stats["failures"] == {"mismatch": 1}
    assert any("8-bit floats are converted exactly or not at all" in line for line in log)
    pair.settle(p, d)


def test_other_8_bit_floats_are_refused(
    engine: Callable[..., Any], pair: Any, numbers: Any, log: list[str]
) -> None:
    _needs_avx512()
    p = engine("kv_producer", numbers=numbers(cache="fp8_e5m2", levels=7), extra={"lease": 1000})
    d = engine("kv_consumer", numbers=numbers(cache="fp8", levels=7))
    tokens = pair.prompt(100)
    _, params = pair.prefill(p, tokens)
    pair.decode(d, tokens, params, p)
    assert d.stats["failures"] == {"mismatch": 1}
    wanted = "cache g0 element type is 'float8_e4m3fn' here and 'float8_e5m2' there"
    assert any(wanted in line for line in log)
    pair.settle(p, d)  # declined


def test_which_types_become_others(fake: Any) -> None:
    from kvxfer import _core
    from kvxfer.integrations.vllm_connector.compat import _fits

    assert _fits("cache g0 element type", "bfloat16", "float8_e4m3fn")
    assert _fits("cache g0 element type", "float8_e4m3fnuz", "float8_e4m3fn")  # by halving scales
    assert not _fits("cache g0 element type", "uint8", "float8_e4m3fn")
    assert not _fits("cache g0 element type", "uint8", "float16")
    assert not _fits("cache g0 element type", "missing", "float16")
    assert not _fits("cache g0 window", "float32", "float16")
    names = [
        "float32",
        "float16",
        "bfloat16",
        "uint8",
        "float8_e4m3fn",
        "float8_e4m3fnuz",
        "float8_e5m2",
        "float8_e5m2fnuz",
    ]
    for here in names:
        for there in names:
            if _fits("cache g0 element type", here, there):
                assert _core.can_convert((here, 1.0), (there, 1.0))


def _differing(engine: Callable[..., Any], pair: Any, log: list[str], **fields: str) -> list[str]:
    p, d = engine("kv_producer", extra={"lease": 1000}), engine("kv_consumer")
    tokens = pair.prompt(100)
    _, params = pair.prefill(p, tokens)
    ours = params["kvxfer"]
    ours["fields"] = {**ours["fields"], **{n.replace("__", " "): v for n, v in fields.items()}}
    pair.decode(d, tokens, params, p)
    assert d.stats["failures"] == {"mismatch": 1}
    pair.settle(p, d)  # declined, long before the lease ends
    return log


def test_a_config_that_differs_is_named_by_key(
    engine: Callable[..., Any], pair: Any, log: list[str]
) -> None:
    _differing(engine, pair, log, **{"model config rope_parameters.rope_theta": "5"})
    text = "model config rope_parameters.rope_theta is '10000.0' here and '5' there"
    assert any(text in line for line in log), log


def test_layers_that_differ_are_named(
    engine: Callable[..., Any], pair: Any, log: list[str]
) -> None:
    _differing(engine, pair, log, **{"cache g0 layers": "model.layers.{0-4}.attn"})
    text = "cache g0 layers is 'model.layers.{0-1}.attn' here and 'model.layers.{0-4}.attn' there"
    assert any(text in line for line in log), log


def test_layers_in_short(fake: Any) -> None:
    from kvxfer.integrations.vllm_connector.compat import layer_ranges

    def names(*numbers: int) -> list[str]:
        return [f"model.layers.{number}.self_attn.attn" for number in numbers]

    assert layer_ranges(names(0, 1, 2, 4, 10, 11)) == "model.layers.{0-2,4,10-11}.self_attn.attn"
    assert layer_ranges(reversed(names(3, 10))) == "model.layers.{3,10}.self_attn.attn"
    assert layer_ranges(["draft.attn", *names(0)]) == (
        "draft.attn, model.layers.{0}.self_attn.attn"
    )
    many = layer_ranges(f"{letter}{number}" for letter in "abcdefgh" for number in range(0, 99, 3))
    assert len(many) < 200
    assert many != layer_ranges(["z1", *(f"a{number}" for number in range(0, 99, 3))])


def test_what_travels_of_a_config_is_bounded(fake: Any, engine: Callable[..., Any]) -> None:
    from kvxfer.integrations.vllm_connector.compat import engine_fields

    config = engine("kv_both").config
    given = config.model_config.hf_config

    def fields() -> dict[str, str]:
        found = engine_fields(config)
        assert sum(len(name) + len(value) for name, value in found.items()) < 20000
        return found

    given.text_config = {"rope": {"theta": 3.0, "factors": [1.5] * 500}, "dtype": "float7"}
    before = fields()
    assert before["model config text_config.rope.theta"] == "3.0"
    assert "model config text_config.dtype" not in before
    given.text_config["rope"]["factors"][400] = 2.5
    assert (
        before["model config text_config.rope.factors"]
        != (fields()["model config text_config.rope.factors"])
    )
    given.table = {f"key {number}": number for number in range(2000)}
    before = fields()
    given.table["key 1999"] = "another"
    assert before != fields()
    for number in range(3000):
        setattr(given, f"more_{number}", number)
    before = fields()
    given.more_2999 = 7
    assert before != fields()


def test_ranks_that_differ_are_refused(engine: Callable[..., Any], fake: Any) -> None:
    from kvxfer.errors import ConfigError

    d = engine("kv_consumer", tp=2)
    first, second = (rank.worker.get_handshake_metadata() for rank in d.ranks)
    (info,) = second.caches
    second.caches = [dataclasses.replace(info, fields={**info.fields, "window": "7"})]
    with pytest.raises(ConfigError, match="window of cache g0 is 'none' on one and '7'"):
        d.connector.set_xfer_handshake_metadata_pp_aware({(0, 0): first, (0, 1): second})
