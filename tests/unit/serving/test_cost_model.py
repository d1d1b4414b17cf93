"""The cost model against arithmetic done another way."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvxfer.serving import Link, exposed_seconds, kv_bytes_per_token
from kvxfer.serving.cost_model import DecodeCost, PrefillCost


@pytest.mark.parametrize(
    ("geometry", "expected"),
    [
        ((80, 8, 128, 2), 327_680),  # Llama-3-70B, bf16
        ((80, 8, 128, 1), 163_840),
        ((32, 8, 128, 2), 131_072),  # Llama-3-8B
        ((64, 8, 128, 2), 262_144),  # Qwen3-32B
        ((94, 4, 128, 2), 192_512),  # Qwen3-235B-A22B
        ((61, 1, 576, 2, 1), 70_272),  # DeepSeek-R1, MLA
    ],
)
def test_bytes_of_known_models(geometry, expected) -> None:
    assert kv_bytes_per_token(*geometry) == expected


def test_what_ethernet_can_hide() -> None:
    ten = 10e9 / 8
    assert Link(ten, 327_680).tokens_per_second == pytest.approx(3_815, rel=1e-3)
    assert Link(ten, 163_840).tokens_per_second == pytest.approx(7_629, rel=1e-3)
    assert Link(ten, 70_272).tokens_per_second == pytest.approx(17_788, rel=1e-3)


def by_layer(transfer: float, prefill: float, layers: int) -> float:
    free = 0.0
    for layer in range(layers):
        ready = prefill * (layer + 1) / layers
        free = max(free, ready) + transfer / layers
    return free - prefill


@given(st.floats(0, 100), st.floats(0, 100), st.integers(1, 100))
def test_exposed_time_layer_by_layer(transfer, prefill, layers) -> None:
    exposed = exposed_seconds(transfer, prefill, layers)
    assert exposed == pytest.approx(by_layer(transfer, prefill, layers), abs=1e-9)


@given(st.integers(1, 5_000), st.integers(1, 5_000), st.integers(0, 5_000))
def test_chunks_of_a_prompt_cost_what_the_prompt_costs(a, b, start) -> None:
    cost = PrefillCost(0.01, 1e-4, 1e-8)
    whole = cost.chunk(start, a + b)
    assert cost.chunk(start, a) + cost.chunk(start + a, b) == pytest.approx(whole)


def test_steps() -> None:
    assert DecodeCost(0.01, 1e-4, 1e-6).step(10, 1_000) == pytest.approx(0.012)
    assert PrefillCost(0.01, 1e-4, 1e-8).prompt(1_000) == pytest.approx(0.12)
    assert PrefillCost(0.01, 1e-4).tokens_per_second == 10_000
