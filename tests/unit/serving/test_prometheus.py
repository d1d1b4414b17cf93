"""The text format, written and read."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvxfer.errors import InvalidError
from kvxfer.serving.prometheus import Registry, parse


def test_engines_lines_are_read() -> None:
    text = "\n".join(
        [
            "# HELP vllm:num_requests_running Running.",
            "# TYPE vllm:num_requests_running gauge",
            'vllm:num_requests_running{engine="0",model_name="a b"} 3.0',
            'vllm:num_requests_running{engine="1",model_name="a b"} 4.0 1700000000',
            'vllm:cache_config_info{block_size="16",num_gpu_blocks="2761"} 1.0',
            "process_start_time_seconds 1.7e9",
            "broken{",
            "nonsense abc",
            "odd NaN",
        ]
    )
    found = parse(text)
    assert found.total("vllm:num_requests_running") == 7
    assert found.most("vllm:num_requests_running") == 4
    assert found.total("vllm:num_requests_running", engine="1") == 4
    assert found.total("vllm:num_requests_running", engine="2") is None
    assert found.of("vllm:cache_config_info")[0].labels["num_gpu_blocks"] == "2761"
    assert found.total("process_start_time_seconds") == 1.7e9
    assert found.total("odd") is None
    assert found.total("missing") is None
    assert not found.of("nonsense")


@given(st.text(max_size=30), st.floats(allow_nan=False, allow_infinity=False))
def test_what_is_written_is_read_back(label: str, value: float) -> None:
    registry = Registry("k_")
    registry.gauge("level", "One\nline.", "of").set(label, to=value)
    (sample,) = parse(registry.render()).of("k_level")
    assert sample.labels == {"of": label}
    assert sample.value == value


def test_histogram_buckets_are_cumulative() -> None:
    registry = Registry("k_")
    seconds = registry.histogram("seconds", "Waits.", "place")
    for value in (0.001, 0.01, 0.011, 500.0):
        seconds.observe("local", value=value)
    found = parse(registry.render())
    assert found.total("k_seconds_count", place="local") == 4
    assert found.total("k_seconds_sum") == pytest.approx(500.022)
    assert found.total("k_seconds_bucket", le="0.005") == 1
    assert found.total("k_seconds_bucket", le="0.01") == 2  # a bound belongs to its bucket
    assert found.total("k_seconds_bucket", le="0.025") == 3
    counts = [sample.value for sample in found.of("k_seconds_bucket")]
    assert counts == sorted(counts)
    assert found.of("k_seconds_bucket")[-1].labels["le"] == "+Inf"
    assert counts[-1] == 4


def test_counters_of_unlabelled_metrics_start_at_zero() -> None:
    registry = Registry("k_")
    counter = registry.counter("events", "Events.")
    assert parse(registry.render()).total("k_events_total") == 0
    counter.add(by=2)
    assert parse(registry.render()).total("k_events_total") == 2


def test_special_numbers() -> None:
    registry = Registry("k_")
    gauge = registry.gauge("level", "Level.", "of")
    gauge.set("a", to=math.inf)
    gauge.set("b", to=math.nan)
    lines = registry.render().splitlines()
    assert 'k_level{of="a"} +Inf' in lines
    assert 'k_level{of="b"} NaN' in lines


def test_a_name_is_used_once() -> None:
    registry = Registry("k_")
    registry.counter("events", "Events.")
    with pytest.raises(InvalidError, match="already"):
        registry.counter("events", "Events.")
    with pytest.raises(InvalidError, match="no name"):
        Registry("8").gauge("x", "X.")
