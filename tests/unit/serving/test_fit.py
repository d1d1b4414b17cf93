"""Fitting costs: what went in comes out, and what can't be told is said."""

from __future__ import annotations

import pytest

from kvxfer.errors import InvalidError
from kvxfer.serving.cost_model import DecodeCost, PrefillCost
from kvxfer.serving.fit import Served, fit, fit_decode
from kvxfer.serving.sim import EngineSpec, Fleet, Role, always_local, simulate
from kvxfer.serving.workload import generate, lognormal

PREFILL, DECODE = PrefillCost(0.02, 5e-5), DecodeCost(0.02, 1e-4, 1e-7)


def run(prefill: PrefillCost, decode: DecodeCost, rate: float, count: int = 150):
    spec = EngineSpec(Role.BOTH, prefill, decode, 10**6, batch_tokens=2_048)
    jobs = generate(count, rate, lognormal(800, 1.0, 6_000), lognormal(150, 0.8, 900))
    return simulate(Fleet(((spec, 1),)), jobs, always_local)


def served(rate: float, count: int = 150) -> list[Served]:
    outcomes = run(PREFILL, DECODE, rate, count).outcomes
    return [Served(o.arrived, o.first, o.last, o.prompt_tokens, o.output_tokens) for o in outcomes]


def test_a_fit_to_one_load_predicts_another() -> None:
    costs = fit(served(6.0), 2_048)
    assert costs.error < 0.1
    for rate in (3.0, 6.0, 12.0):
        true, found = run(PREFILL, DECODE, rate), run(costs.prefill, costs.decode, rate)
        assert found.mean(lambda o: o.tpot) == pytest.approx(true.mean(lambda o: o.tpot), rel=0.12)
        assert found.mean(lambda o: o.ttft) == pytest.approx(true.mean(lambda o: o.ttft), rel=0.35)


def test_cold_start_samples_are_too_few() -> None:
    with pytest.raises(InvalidError, match="needs 20"):
        fit(served(6.0, 10), 2_048)


def test_times_that_run_backwards() -> None:
    log = served(6.0)
    log[3] = Served(9.0, 8.0, 10.0, 5, 5)
    with pytest.raises(InvalidError, match="scheduled at 9 s"):
        fit(log, 2_048)


def test_a_log_that_tells_nothing_of_prefill() -> None:
    log = [Served(float(n), float(n), n + 1.0, 1, 11) for n in range(40)]
    with pytest.raises(InvalidError, match="doesn't tell"):
        fit(log, 2_048)


def test_decode_alone() -> None:
    points = [(n, 1_000, DECODE.step(n, n * 1_000)) for n in (1, 8, 64)]
    points += [(8, 9_000, DECODE.step(8, 8 * 9_000))]
    found = fit_decode(points)
    assert (found.base, found.per_sequence, found.per_context) == pytest.approx(
        (0.02, 1e-4, 1e-7), rel=0.01
    )
    with pytest.raises(InvalidError):
        fit_decode(points[:1])
