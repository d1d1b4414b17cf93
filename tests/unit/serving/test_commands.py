"""The commands, as a user calls them."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from kvxfer.errors import InvalidError
from kvxfer.serving import plan_command, simulate_command
from kvxfer.serving.options import fleet_of
from kvxfer.serving.setup_file import read_setup

DATA = Path(__file__).parents[2] / "data" / "serving"
COSTS = {
    "prefill": {"base": 0.02, "per_token": 1.1e-4},
    "decode": {"base": 0.028, "per_sequence": 3e-4},
    "kv_tokens": 400_000,
    "gpus": 4,
    "price_per_hour": 10.0,
}
SETUP = {
    "slo": {"ttft": 2.0, "tpot": 0.05},
    "link": {"bytes_per_second": 2.5e10, "kv_bytes_per_token": 163840, "layers": 80},
    "engines": {"prefill": COSTS, "decode": COSTS, "both": COSTS},
    "policy": {"threshold": "auto"},
}
LOAD = ["--count", "60", "--prompt", "4000:0.5", "--output", "100", "--rate", "1.5"]


@pytest.fixture
def setup(tmp_path) -> str:
    path = tmp_path / "setup.json"
    path.write_text(json.dumps(SETUP))
    return str(path)


def test_simulate_compares_policies(setup, capsys) -> None:
    assert simulate_command.main([setup, "--fleet", "1P1D", "--policy", "all", *LOAD]) == 0
    rows = capsys.readouterr().out.splitlines()
    names = [row.split("|")[1].strip() for row in rows]
    assert names[2:] == ["local", "remote", "threshold:2000", "decide"]
    assert len({len(row) for row in rows}) == 1
    local, remote = (row.split("|") for row in rows[2:4])
    assert (local[2].strip(), remote[2].strip()) == ("0.0%", "100.0%")


def test_simulate_prints_json(setup, capsys) -> None:
    assert simulate_command.main([setup, "--fleet", "2A", "--json", *LOAD]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert row["policy"] == "decide"
    assert row["rejected"] == "0"


def test_simulate_a_trace_in_a_closed_loop(setup, capsys) -> None:
    trace = str(DATA / "vllm_rtxpro6000_llama_8b.csv")
    arguments = [setup, "--fleet", "1A", "--trace", trace, "--limit", "30", "--concurrency", "4"]
    assert simulate_command.main(arguments) == 0
    assert "| decide" in capsys.readouterr().out


def test_plan(setup, capsys, tmp_path) -> None:
    plot = tmp_path / "plot.svg"
    arguments = [setup, "--gpus", "8", "--confirm", "2", "--plot", str(plot), *LOAD]
    arguments += ["--placement", "InfiniBand=2.5e10", "--placement", "Ethernet=1.2e9"]
    assert plan_command.main(arguments) == 0
    text = capsys.readouterr().out
    assert "1P1D" in text
    assert "2A" in text
    assert "joint goodput" in text
    assert "With prompts x 2: " in text
    assert "InfiniBand: hidden" in text
    assert "Ethernet: not hidden" in text
    lines = ElementTree.parse(plot).getroot().findall("{http://www.w3.org/2000/svg}polyline")
    assert len(lines) == 2


def test_plan_says_that_nothing_will_do(setup, capsys, tmp_path) -> None:
    hard = {**SETUP, "slo": {"ttft": 2.0, "tpot": 0.01}}
    path = tmp_path / "hard.json"
    path.write_text(json.dumps(hard))
    assert plan_command.main([str(path), "--gpus", "8", "--json", *LOAD]) == 3
    assert "promised are 10 ms" in json.loads(capsys.readouterr().out)["infeasible"]


def test_fit_prints_what_a_setup_takes(capsys, tmp_path) -> None:
    log = str(DATA / "vllm_rtxpro6000_qwen3_32b.csv")
    assert plan_command.main(["fit", log, "--batch-tokens", "2048", "--first", "60"]) == 0
    costs = json.loads(capsys.readouterr().out)
    engine = {**costs, "kv_tokens": 100_000}
    path = tmp_path / "fitted.json"
    path.write_text(json.dumps({"slo": SETUP["slo"], "engines": {"both": engine}}))
    (spec,) = read_setup(path).engines
    assert 1e-5 < spec.prefill.per_token < 1e-3


def test_fleets_by_name(setup) -> None:
    known = read_setup(setup)
    for name in ("2P1D", "2P1D+1A", "4A"):
        found = fleet_of(name, known).name
        assert found == name
    for name in ("", "P1D", "2P", "1A+2P1D", "many"):
        with pytest.raises(InvalidError, match="is no fleet"):
            fleet_of(name, known)


def changed(**parts) -> dict:
    return {key: value for key, value in {**SETUP, **parts}.items() if value is not None}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "can't read the setup"),
        (json.dumps([1]), "not an object"),
        (json.dumps(changed(slo=None)), "lacks slo"),
        (json.dumps(changed(rates=1)), "has rates, which is not known"),
        (json.dumps(changed(slo={"ttft": 1})), "slo lacks tpot"),
        (json.dumps(changed(slo={"ttft": "1", "tpot": 1})), "another type"),
        (json.dumps(changed(engines={"mixed": COSTS})), "a role is one of"),
        (json.dumps(changed(engines={"both": {**COSTS, "kv_tokens": 1}})), "engines.both: kv_t"),
        (json.dumps(changed(engines={"both": {**COSTS, "prefill": {}}})), "prefill lacks base"),
        (json.dumps(changed(link={**SETUP["link"], "layers": 0})), "link: layers is 0"),
        (json.dumps(changed(policy={"threshold": "a lot"})), "policy: threshold"),
    ],
)
def test_what_is_wrong_with_a_setup(content, message, tmp_path, capsys) -> None:
    path = tmp_path / "setup.json"
    path.write_text(content)
    assert simulate_command.main([str(path), "--fleet", "1A"]) == 1
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--fleet", "1A", "--policy", "best"], "is no policy"),
        (["--fleet", "1A", "--prompt", "long"], "--prompt is 'long'"),
        (["--fleet", "1A", "--trace", "/nowhere"], "can't read the trace"),
        (["--fleet", "1A", "--rate", "-1"], "rate is -1"),
        (["--fleet", "1A", "--rate", "0"], "rate is 0"),
        (["--fleet", "1A", "--concurrency", "0"], "concurrency is 0"),
    ],
)
def test_what_is_wrong_with_options_of_simulate(setup, arguments, message, capsys) -> None:
    assert simulate_command.main([setup, *arguments]) == 1
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--share", "2"], "share is 2.0, not above 0 and at most 1"),
        (["--confirm", "-1"], "--confirm is -1"),
        (["--plot", "/nowhere/plan.svg"], "its folder does not exist"),
        (["--gpus", "0"], "gpus is 0"),
    ],
)
def test_what_is_wrong_with_options_of_plan(setup, arguments, message, capsys) -> None:
    assert plan_command.main([setup, "--gpus", "8", *arguments]) == 1
    assert message in capsys.readouterr().err
