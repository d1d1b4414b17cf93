"""Advice as the load changes, with the mistakes that planners are known for."""

from __future__ import annotations

import dataclasses
import json
import socket
import threading
import urllib.request

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvxfer.errors import InvalidError
from kvxfer.serving import Slo, plan_command, watch_command
from kvxfer.serving.advice import Kinds, Limits, Load, Memory, Why, advise
from kvxfer.serving.cost_model import DecodeCost, PrefillCost
from kvxfer.serving.live import Fleet
from kvxfer.serving.prometheus import parse
from kvxfer.serving.sim import EngineSpec, Role

PREFILL = EngineSpec(
    Role.PREFILL, PrefillCost(0.0, 1e-4), DecodeCost(0.02, 1e-4), 500_000, batch_tokens=8192
)
DECODE = dataclasses.replace(PREFILL, role=Role.DECODE, decode=DecodeCost(0.02, 3e-4), gpus=2)
KINDS = Kinds(PREFILL, DECODE)
SLO = Slo(2.0, 0.05)
LIMITS = Limits(gpus=16)


def load(rate: float, prompt: float = 2000, output: float = 200, **more: float) -> Load:
    """Return ten seconds at so many requests a second."""
    count = 10.0 * rate
    return Load(10.0, count, count * prompt, count, count * prompt, count * output, **more)


class Rig:
    """A fleet that follows the advice, after a while."""

    def __init__(self, engines=(1, 1), limits=LIMITS, delay: int = 0) -> None:
        self.engines, self.limits, self.delay = engines, limits, delay
        self.memory, self.now = Memory(), 0.0
        self.history = [engines]
        self._ordered: list[tuple[int, tuple[int, int]]] = []
        self._steps = 0

    def step(self, seen: Load | None):
        self._steps += 1
        while self._ordered and self._ordered[0][0] <= self._steps:
            self.engines = self._ordered.pop(0)[1]
        advice = advise(seen, self.engines, KINDS, SLO, self.limits, self.memory, self.now)
        self.memory = advice.memory
        self.now += 10.0
        found = (advice.prefill, advice.decode)
        if found != self.history[-1]:
            self.history.append(found)
            self._ordered.append((self._steps + 1 + self.delay, found))
        return advice

    def run(self, seen: Load | None, steps: int):
        return [self.step(seen) for _ in range(steps)]


def test_it_follows_the_load_up_and_down() -> None:
    rig = Rig()
    last = rig.run(load(14), 60)[-1]
    assert last.why is Why.STEADY
    assert rig.engines == (4, 2)  # 2.8 and 1.4 busy, of which 80 % are to be used
    rig.run(load(4, prompt=500, output=3000), 120)
    assert rig.engines[0] == 1
    assert rig.engines[1] > 1


@pytest.mark.parametrize("delay", [0, 3, 12])
@given(st.floats(0, 60), st.floats(10, 8000), st.floats(1, 2000), st.integers(1, 6))
def test_a_steady_load_never_swings(delay, rate, prompt, output, decode) -> None:
    """Dynamo's planner went from 2 to 1 and back: one engine fewer was already too few."""
    rig = Rig((3, decode), delay=delay)
    rig.run(load(rate, prompt, output), 300)
    for side in range(2):
        counts = [engines[side] for engines in rig.history]
        moves = [b - a for a, b in zip(counts, counts[1:], strict=False) if b != a]
        assert all(move > 0 for move in moves) or all(move < 0 for move in moves), rig.history


def test_one_fewer_only_if_it_would_not_be_one_more_again() -> None:
    rig = Rig((2, 1))
    # One engine would be 75 % busy: below the headroom, above what consolidation allows.
    rig.run(load(3.75), 120)
    assert rig.engines == (2, 1)
    rig.run(load(3.25), 120)
    assert rig.engines == (1, 1)
    rig.run(load(3.75), 120)
    assert rig.engines == (1, 1)


def test_what_fresh_engines_do_first_does_not_count() -> None:
    rig = Rig((2, 1))
    odd = load(4, queued_tokens=1e7)
    for _ in range(6):
        assert rig.step(odd).why is Why.STARTING
    assert all(advice.why is Why.STEADY for advice in rig.run(load(4), 30))
    rig.engines = (3, 1)  # another one joins: it all begins anew
    for _ in range(6):
        advice = rig.step(odd)
        assert advice.why is Why.STARTING
        assert (advice.prefill, advice.decode) == (3, 1)
    assert rig.history[0] == (2, 1)


@given(
    st.tuples(st.integers(0, 12), st.integers(0, 12)),
    st.lists(
        st.tuples(st.floats(0, 200), st.floats(1, 9000), st.floats(1, 4000), st.floats(0, 1e7)),
        min_size=1,
        max_size=12,
    ),
    st.integers(3, 40),
)
def test_the_budget_is_never_overrun(engines, seen, gpus) -> None:
    limits = Limits(gpus=gpus, warmup=0.0, cooldown_up=0.0, cooldown_down=0.0)
    rig = Rig(engines, limits)
    for rate, prompt, output, queued in seen:
        advice = rig.step(load(rate, prompt, output, queued_tokens=queued))
        if advice.why not in (Why.STARTING, Why.STALE, Why.INFEASIBLE, Why.STEADY):
            assert KINDS.gpus(advice.prefill, advice.decode) <= gpus
            assert advice.prefill >= limits.min_prefill
            assert advice.decode >= limits.min_decode


def test_within_the_budget_the_tighter_side_gets_what_the_other_can_spare() -> None:
    rig = Rig((2, 3), Limits(gpus=8))
    found = rig.run(load(20, prompt=2000, output=50), 40)
    assert Why.REBALANCE in [advice.why for advice in found]
    assert (rig.engines, found[-1].why) == ((5, 1), Why.STEADY)
    found = rig.run(load(40, prompt=2000, output=50), 40)
    assert rig.engines == (6, 1)
    assert found[-1].why is Why.BUDGET


def test_without_traffic_it_goes_down_one_at_a_time_to_the_fewest() -> None:
    rig = Rig((4, 3))
    rig.run(load(0), 300)
    assert rig.engines == (1, 1)
    for before, after in zip(rig.history, rig.history[1:], strict=False):
        assert all(0 <= a - b <= 1 for a, b in zip(before, after, strict=True))
    last = rig.step(load(0))
    assert last.why is Why.STEADY
    assert (last.needed_prefill, last.needed_decode) == (0.0, 0.0)


def test_long_answers_without_an_end_are_no_zero_traffic() -> None:
    busy = Load(10.0, 0, 0, 0, 0, 20_000)
    rig = Rig((1, 4))
    assert not busy.idle
    rig.run(busy, 60)
    assert all(advice.needed_decode > 1 for advice in rig.run(busy, 3))


def test_a_burst_changes_nothing_and_a_queue_that_stays_does() -> None:
    rig = Rig((2, 1))
    rig.run(load(4), 30)
    burst = load(4, queued_tokens=60_000)
    for _ in range(5):
        assert rig.step(burst).why is Why.STEADY
        assert rig.step(load(4)).why is Why.STEADY
    found = rig.run(burst, 2)
    assert found[-1].why is Why.MORE_PREFILL
    assert found[-1].prefill > 2


def test_waiting_requests_ask_for_decode_engines() -> None:
    rig = Rig((1, 1))
    rig.run(load(2), 30)
    found = rig.run(load(2, waiting=300), 2)
    assert found[-1].why is Why.MORE_DECODE


def test_unknown_is_not_zero() -> None:
    rig = Rig((3, 3))
    rig.run(load(30), 30)
    before = rig.engines
    assert {advice.why for advice in rig.run(None, 100)} == {Why.STALE}
    assert rig.engines == before


def test_an_advice_stands_until_it_is_followed() -> None:
    rig = Rig((1, 1), delay=10_000)
    rig.run(load(14), 10)
    assert rig.engines == (1, 1)
    for advice in rig.run(load(14), 60):
        assert (advice.prefill, advice.decode) == (4, 2)
    rig.engines = (2, 1)  # half of it came
    for advice in rig.run(load(14), 6):
        assert (advice.prefill, advice.decode) == (4, 2)


def test_down_waits_longer_than_up() -> None:
    rig = Rig((1, 1))
    rig.run(load(14), 8)
    up = rig.memory.up
    while rig.memory.down == float("-inf"):
        rig.step(load(2))
    assert rig.memory.down - up >= LIMITS.cooldown_down


def test_what_no_engine_can_do() -> None:
    rig = Rig((2, 1))
    found = rig.run(load(1, prompt=50_000), 10)[-1]
    assert found.why is Why.INFEASIBLE
    assert (found.prefill, found.decode) == (2, 1)
    with pytest.raises(InvalidError, match="take 3 GPUs"):
        advise(None, (1, 1), KINDS, SLO, Limits(gpus=2), Memory(), 0.0)
    with pytest.raises(InvalidError, match="consolidate"):
        Limits(gpus=8, consolidate=0.9)
    with pytest.raises(InvalidError, match="seconds"):
        load(1).__class__(0.0, 0, 0, 0, 0, 0)


# --- from metrics ---


class Engines:
    """What engines would say, by URL."""

    def __init__(self) -> None:
        self.said: dict[str, dict[str, float]] = {}

    def __call__(self, url: str) -> str:
        assert url.endswith("/metrics")
        name = url.removesuffix("/metrics")
        if name not in self.said:
            raise ConnectionRefusedError(name)
        return "".join(f'vllm:{key}{{engine="0"}} {n}\n' for key, n in self.said[name].items())


def served(count: float, waiting: float = 0.0) -> dict[str, float]:
    return {
        "prompt_tokens_total": 2000 * count,
        "request_prefill_kv_computed_tokens_sum": 1500 * count,
        "generation_tokens_total": 200 * count,
        "request_success_total": count,
        "num_requests_waiting": waiting,
    }


def test_the_load_is_what_counters_have_grown_by() -> None:
    engines = Engines()
    fleet = Fleet(["p1", "p2/"], ["d"], engines)
    assert fleet.look(0.0) is None
    assert fleet.engines == (0, 0)
    engines.said = {"p1": served(100), "p2": served(7), "d": served(300)}
    assert fleet.look(10.0) is None  # what they did before is not what they did since
    assert fleet.engines == (2, 1)
    engines.said = {"p1": served(110, 3), "p2": served(17), "d": served(320, 2)}
    found = fleet.look(20.0)
    assert found == Load(10.0, 20, 30_000, 20, 40_000, 4_000, 6_000, 2)
    engines.said["p1"] = served(1)  # a new process
    assert fleet.look(30.0) is None
    engines.said["p1"] = served(2)
    assert fleet.look(40.0) is not None
    del engines.said["p2"]
    assert fleet.look(50.0) is not None
    assert fleet.engines == (1, 1)


def test_an_engine_that_dies_while_it_answers_is_not_there() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(4096)
                connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\nvllm:a 1\n")

        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        fleet = Fleet([], [f"http://127.0.0.1:{server.getsockname()[1]}"])
        assert fleet.look(0.0) is None
        assert fleet.engines == (0, 0)
        thread.join(10)


def test_long_answers_that_have_just_begun_are_many() -> None:
    """Nothing is complete yet: it is not one request with all these tokens."""
    engines = Engines()
    fleet = Fleet([], ["d"], engines)
    counts = {"request_success_total": 0.0, "time_to_first_token_seconds_count": 0.0}
    engines.said = {"d": {**counts, "prompt_tokens_total": 0, "generation_tokens_total": 0}}
    assert fleet.look(0.0) is None
    engines.said["d"] |= {"time_to_first_token_seconds_count": 50, "prompt_tokens_total": 50_000}
    engines.said["d"]["generation_tokens_total"] = 20_000
    found = fleet.look(10.0)
    assert found is not None
    assert (found.requests, found.prompt_tokens, found.output_tokens) == (50, 50_000, 20_000)


SETUP = {
    "slo": {"ttft": 2.0, "tpot": 0.05},
    "engines": {
        name: {
            "prefill": {"base": 0.0, "per_token": 1e-4},
            "decode": {"base": 0.02, "per_sequence": 3e-4},
            "kv_tokens": 500_000,
        }
        for name in ("prefill", "decode")
    },
}


@pytest.fixture
def setup(tmp_path) -> str:
    path = tmp_path / "setup.json"
    path.write_text(json.dumps(SETUP))
    return str(path)


def test_the_command_advises_and_exports(setup, monkeypatch, capsys) -> None:
    engines = Engines()
    engines.said = {"http://p": served(0), "http://d": served(0)}
    monkeypatch.setattr("kvxfer.serving.watch_command.Fleet", lambda p, d: Fleet(p, d, engines))
    texts = []

    def sleep(seconds: float) -> None:
        for said in engines.said.values():
            count = said["request_success_total"] + 14 * seconds
            said.update(served(count))
        port = int(capsys.readouterr().err.rsplit(" ", 1)[1]) if not texts else texts[0]
        texts.append(port) if not texts else None
        with urllib.request.urlopen(f"http://127.0.0.1:{texts[0]}/metrics", timeout=10) as answer:
            texts.append(answer.read().decode())

    moments = iter(range(0, 10_000, 10))
    parser = watch_command.argparse.ArgumentParser()
    watch_command.add_arguments(parser)
    arguments = [setup, "--prefill", "http://p", "--decode", "http://d", "--gpus", "8"]
    arguments += ["--count", "20", "--listen", "127.0.0.1:0", "--json"]
    options = parser.parse_args(arguments)
    assert watch_command.run(options, lambda: float(next(moments)), sleep) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert lines[-1]["advised"] == {"prefill": 3, "decode": 2}
    assert "more_both" in [line["reason"] for line in lines]
    found = parse(texts[-1])
    assert found.total("kvxfer_plan_advised_engines", role="prefill") == 3
    assert found.total("kvxfer_plan_engines", role="prefill") == 1
    assert found.total("kvxfer_plan_needed_engines", role="prefill") == pytest.approx(2.625)
    assert found.total("kvxfer_plan_reason") == 1


P, D = "http://p", "http://d"


@pytest.mark.parametrize(
    ("more", "what"),
    [
        (["--gpus", "8"], "--prefill"),
        (["--gpus", "8", "--prefill", "p", "--decode", D], "'p' is no engine"),
        (["--gpus", "8", "--prefill", P, "--decode", D, "--interval", "0"], "--interval"),
        (["--gpus", "0", "--prefill", P, "--decode", D], "gpus"),
        (["--gpus", "1", "--prefill", P, "--decode", D, "--count", "1"], "GPUs"),
        (["--gpus", "8", "--prefill", P, "--decode", D, "--listen", "x"], "HOST:PORT"),
    ],
)
def test_the_command_says_what_is_wrong(setup, more, what, capsys) -> None:
    assert plan_command.main(["watch", setup, *more]) == 1
    assert what in capsys.readouterr().err


def test_the_command_sees_nobody(setup, capsys) -> None:
    arguments = ["watch", setup, "--gpus", "8", "--prefill", "http://127.0.0.1:9"]
    assert plan_command.main([*arguments, "--decode", "http://127.0.0.1:9", "--count", "1"]) == 0
    assert capsys.readouterr().out == "0P0D stays: starting\n"
