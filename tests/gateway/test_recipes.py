"""What docs/serving.md tells people to type: it parses, and names what exists."""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import shlex
from pathlib import Path

import pytest

from kvxfer.integrations.gateway import command, prewarm_command
from kvxfer.integrations.gateway.metrics import Metrics
from kvxfer.integrations.gateway.settings import Entry, Settings
from kvxfer.serving import advice, plan_command, watch_command
from kvxfer.serving.decide import Reason

TEXT = (Path(__file__).parents[2] / "docs" / "serving.md").read_text(encoding="utf-8")


def blocks(kind: str) -> list[str]:
    """Return what stands between fences of a kind."""
    parts = re.split(r"^```(\w*)$", TEXT, flags=re.MULTILINE)  # text, kind, block, "", text, ...
    return [parts[at + 1] for at in range(1, len(parts), 4) if parts[at] == kind]


def commands(name: str) -> list[list[str]]:
    lines = [line for block in blocks("") for line in block.splitlines()]
    return [shlex.split(line, comments=True) for line in lines if line.startswith(name)]


@pytest.mark.parametrize(
    ("name", "module"),
    [
        ("kvxfer gateway", command),
        ("kvxfer prewarm", prewarm_command),
        ("kvxfer plan watch", watch_command),
    ],
)
def test_commands_parse(name, module) -> None:
    parser = argparse.ArgumentParser()
    module.add_arguments(parser)
    found = commands(name)
    assert found
    for words in found:
        parser.parse_args(words[len(name.split()) :])


def test_gateway_options_are_told_with_their_defaults() -> None:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    section = TEXT[TEXT.index("### Its options") : TEXT.index("### Its metrics")]
    told = set(re.findall(r"`(--[\w-]+)`", section))
    assert told == {text for action in parser._actions for text in action.option_strings} - {
        "-h",
        "--help",
    }
    for row in section.splitlines():
        names = re.findall(r"`--([\w-]+)`", row)
        values = [part.strip() for part in row.split("|")[2:3]]
        if names and values and re.fullmatch(r"[\d, ]+|0\.[\d, .]+|[\d]+, 0\.\d+", values[0]):
            defaults = [
                getattr(Settings(), name.replace("-", "_"), None)
                if name not in ("ttft", "tpot", "threshold")
                else {"ttft": 2, "tpot": 0.05, "threshold": 2000}[name]
                for name in names
            ]
            assert [float(value) for value in values[0].split(",")] == defaults


def test_all_metrics_are_told_and_exist() -> None:
    section = TEXT[TEXT.index("### Its metrics") : TEXT.index("### What it costs")]
    told = set(re.findall(r"^\| (.*?) \|", section, re.MULTILINE)) - {"metric"}
    names = {name for cell in told for name in re.findall(r"`(\w+)`", cell)}
    prefix = "kvxfer_gateway_"
    exist = {name.removeprefix(prefix) for name in Metrics().registry._families}
    assert names == exist


def test_all_reasons_are_told() -> None:
    for why in (*advice.Why, *Reason):
        assert f"`{why.value}`" in TEXT, why


def test_json_is_what_is_read() -> None:
    found = [json.loads(block) for block in blocks("json")]
    engines = [one for one in found if isinstance(one["engines"], list)]
    assert [Entry.read(entry).role.value for entry in engines[0]["engines"]] == [
        "prefill",
        "decode",
    ]


def test_recipes_parse() -> None:
    yaml = pytest.importorskip("yaml", reason="PyYAML is not installed")
    found = [yaml.safe_load(block) for block in blocks("yaml")]
    scaled, ray, pod = found
    (trigger,) = scaled["spec"]["triggers"]
    assert scaled["apiVersion"] == "keda.sh/v1alpha1"
    exported = watch_command.Exposition().text
    for name in re.findall(r"kvxfer_\w+", trigger["metadata"]["query"]):
        assert f"# TYPE {name} gauge" in exported
    assert all(isinstance(value, str) for value in trigger["metadata"].values())
    for side, role in (("prefill_config", "kv_producer"), ("decode_config", "kv_consumer")):
        transfer = ray["applications"][0]["args"][side]["engine_kwargs"]["kv_transfer_config"]
        assert (transfer["kv_connector"], transfer["kv_role"]) == ("KvxferConnector", role)
    argument = pod["containers"][1]["args"][1]
    assert json.loads(argument.partition("=")[2])["kv_role"] == "kv_consumer"


def test_router_options_exist() -> None:
    router = pytest.importorskip("vllm_router.launch_router", reason="vllm-router is not installed")
    (words,) = commands("vllm-router")
    parser = argparse.ArgumentParser()
    router.RouterArgs.add_cli_args(parser, exclude_host_port=False)
    known = {text for action in parser._actions for text in action.option_strings}
    assert {word for word in words if word.startswith("--")} <= known


def test_limits_have_options() -> None:
    parser = argparse.ArgumentParser()
    watch_command.add_arguments(parser)
    options = {action.dest for action in parser._actions}
    assert {field.name for field in dataclasses.fields(advice.Limits)} <= options
    assert plan_command.main  # the command that leads there
