"""How many requests the simulator gets through a minute: `make bench-micro ARGS="-k simulator"`."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from kvxfer.serving import Link, Slo
from kvxfer.serving.cost_model import DecodeCost, PrefillCost
from kvxfer.serving.sim import Decided, EngineSpec, Fleet, Role, Router, always_local, simulate
from kvxfer.serving.workload import generate, lognormal

REQUESTS = 3000
BAR = 100_000  # a minute, on one core
COSTS = PrefillCost(0.02, 1e-4, 2e-10), DecodeCost(0.025, 2.5e-4, 2.5e-8), 1_200_000
SLO = Slo(3.0, 0.06)
LINK = Link(2e10, 163_840, latency=0.01, layers=80)
PREFILL = EngineSpec(Role.PREFILL, *COSTS, batch_tokens=16_384)
DECODE = EngineSpec(Role.DECODE, *COSTS, chunk_tokens=1_024)
BOTH = EngineSpec(Role.BOTH, *COSTS, chunk_tokens=2_048)


@pytest.mark.parametrize(
    ("fleet", "router"),
    [
        (Fleet(((BOTH, 8),), LINK), lambda: always_local),
        (Fleet(((PREFILL, 6), (DECODE, 2)), LINK), lambda: Decided(SLO)),
    ],
    ids=["8A-local", "6P2D-decide"],
)
def test_simulator(benchmark: Any, fleet: Fleet, router: Callable[[], Router]) -> None:
    load = generate(REQUESTS, 6.0, lognormal(2000, 0.8, 10**6), lognormal(250, 0.8, 10**6), 0)
    served: list[int] = []

    def run() -> None:
        served.append(len(simulate(fleet, load, router()).outcomes))

    began = time.process_time()
    benchmark.pedantic(run, rounds=5, warmup_rounds=1)
    rate = 60 * sum(served) / (time.process_time() - began)
    assert set(served) == {REQUESTS}
    if benchmark.stats is not None:  # it is with --benchmark-disable
        benchmark.extra_info["requests a minute"] = round(rate)
        benchmark.extra_info["met"] = rate >= BAR
