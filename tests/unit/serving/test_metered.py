"""Costs from metrics: an engine whose steps cost what is known says what it did, between looks."""

from __future__ import annotations

import json
import random

import pytest

from kvxfer.errors import InvalidError
from kvxfer.serving import plan_command
from kvxfer.serving.cost_model import DecodeCost, PrefillCost
from kvxfer.serving.metered import MIN_STRETCHES, Meter, fit_metered

PREFILL, DECODE = PrefillCost(0.02, 5e-5), DecodeCost(0.02, 1e-4, 1e-7)
CAPACITY = 1000 * 16


class Engine:
    """Counts as vLLM does."""

    def __init__(self, seed: int = 0, prefills: bool = True, decodes: bool = True) -> None:
        self._dice = random.Random(seed)
        self._prefills, self._decodes = prefills, decodes
        self._counts: dict[str, float] = {}
        self._used = 0.0
        self.gone = False

    def serve(self, alike: bool = False) -> None:
        """Do a few thousand steps of one kind."""
        draw = (lambda a, b: (a + b) / 2) if alike else self._dice.uniform
        steps = round(draw(50, 5000))
        batch = draw(1, 100) if self._decodes else 0.0
        prompt = draw(50, 2000) if self._prefills else 0.0
        share = draw(0.05, 0.9) if self._decodes else 1.0  # of the steps that prefill something
        context = draw(0.1, 0.9) * CAPACITY if self._decodes else 0.0
        computed = prompt * share
        gap = DECODE.step(batch, context) + PREFILL.per_token * computed
        count = steps * share if self._prefills else 0.0
        seconds = DECODE.step(batch, context) + PREFILL.per_token * max(prompt, computed)
        self._used = context / CAPACITY
        for name, by in {
            "iteration_tokens_total_sum": steps * (batch + computed),
            "iteration_tokens_total_count": steps,
            "generation_tokens_total": steps * batch,
            "inter_token_latency_seconds_sum": steps * batch * gap,
            "inter_token_latency_seconds_count": steps * batch,
            "request_prefill_time_seconds_sum": count * seconds,
            "request_prefill_time_seconds_count": count,
            "request_prefill_kv_computed_tokens_sum": count * prompt,
        }.items():
            self._counts[name] = self._counts.get(name, 0.0) + by

    def restart(self) -> None:
        self._counts.clear()
        self.serve()

    def __call__(self, url: str) -> str:
        if self.gone:
            raise ConnectionRefusedError(url)
        lines = [f'vllm:{name}{{engine="0"}} {value!r}' for name, value in self._counts.items()]
        lines.append(f'vllm:kv_cache_usage_perc{{engine="0"}} {self._used!r}')
        lines.append('vllm:cache_config_info{block_size="16",num_gpu_blocks="1000"} 1')
        return "\n".join(lines) + "\n"


def stretches(engine: Engine, count: int = 20, **how: bool):
    meter, found = Meter("http://e/", engine), []
    engine.serve()
    assert meter.look() is None  # what it did before is not known
    for _ in range(count):
        engine.serve(**how)
        look = meter.look()
        assert look is not None
        found.append(look)
    return found


def test_costs_come_out_as_they_went_in() -> None:
    found = fit_metered(stretches(Engine()), 2048)
    assert found.prefill is not None
    assert found.decode is not None
    assert found.error < 0.01
    assert found.prefill.per_token == pytest.approx(PREFILL.per_token, rel=0.03)
    assert found.decode.base == pytest.approx(DECODE.base, rel=0.03)
    assert found.decode.per_sequence == pytest.approx(DECODE.per_sequence, rel=0.05)
    assert found.decode.per_context == pytest.approx(DECODE.per_context, rel=0.05)


def test_each_role_tells_of_its_own() -> None:
    found = fit_metered(stretches(Engine(decodes=False)), 2048)
    assert found.decode is None
    assert found.prefill is not None
    assert found.prefill.base == pytest.approx(PREFILL.base, rel=0.03)
    assert found.prefill.per_token == pytest.approx(PREFILL.per_token, rel=0.03)
    found = fit_metered(stretches(Engine(prefills=False)), 2048)
    assert found.prefill is None
    assert found.decode is not None
    assert found.decode.step(50, 8000) == pytest.approx(DECODE.step(50, 8000), rel=0.02)


def test_what_tells_nothing() -> None:
    with pytest.raises(InvalidError, match=f"needs {MIN_STRETCHES}"):
        fit_metered(stretches(Engine(), 2), 2048)
    with pytest.raises(InvalidError, match="look while it changes"):
        fit_metered(stretches(Engine(), alike=True), 2048)
    with pytest.raises(InvalidError, match="it has to be vLLM"):
        Meter("http://e", lambda url: "other_metric 1\n").look()


def test_restarts_and_absences_are_left_out() -> None:
    engine = Engine()
    meter = Meter("http://e", engine)
    engine.serve()
    meter.look()
    engine.restart()
    assert meter.look() is None
    engine.serve()
    assert meter.look() is not None
    engine.gone = True
    assert meter.look() is None
    engine.gone = False
    assert meter.look() is None  # it may have been another process meanwhile
    assert meter.look() is None  # no step since
    engine.serve()
    assert meter.look() is not None


def run(*arguments: str, fetch: Engine | None = None) -> int:
    parser = plan_command.argparse.ArgumentParser()
    plan_command.add_fit_arguments(parser)
    options = parser.parse_args(["--batch-tokens", "2048", *arguments])
    engine = fetch or Engine()
    engine.serve()
    return plan_command.run_fit(options, lambda seconds: engine.serve(), engine)


def test_the_command(capsys) -> None:
    assert run("--metrics", "http://e", "--count", "12") == 0
    out, err = capsys.readouterr()
    assert json.loads(out).keys() == {"prefill", "decode"}
    assert "mean error" in err
    for wrong in ([], ["log.csv", "--metrics", "http://e"]):
        with pytest.raises(InvalidError, match="either a log"):
            run(*wrong)
    with pytest.raises(InvalidError, match="--interval"):
        run("--metrics", "http://e", "--interval", "0")
