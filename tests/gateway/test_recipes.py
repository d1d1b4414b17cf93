"""What docs/serving.md tells people to type: it parses, and names what exists."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import json
import re
import shlex
import sys
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from gateway.fake import engines, output
from gateway.rig import in_loop
from rig.engines import free_port

from kvxfer.integrations.gateway import command, prewarm_command
from kvxfer.integrations.gateway.metrics import Metrics
from kvxfer.integrations.gateway.settings import Entry, Settings
from kvxfer.serving import advice, plan_command, watch_command
from kvxfer.serving.decide import Reason

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "serving.md").read_text(encoding="utf-8")
KNOWN = json.loads((ROOT / "tests" / "data" / "serving" / "recipes.json").read_text())


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


def recipes() -> list[Any]:
    """Return the recipes for KEDA, Ray Serve LLM and llm-d."""
    yaml = pytest.importorskip("yaml", reason="PyYAML is not installed")
    return [yaml.safe_load(block) for block in blocks("yaml")]


def test_recipes_are_what_their_readers_know() -> None:
    """By what KEDA and llm-d publish; see the README beside the file."""
    jsonschema = pytest.importorskip("jsonschema", reason="jsonschema is not installed")
    scaled, _, pod = recipes()
    jsonschema.validate(scaled, KNOWN["scaledobject"])
    with pytest.raises(jsonschema.ValidationError):  # it can tell
        jsonschema.validate({**scaled, "spec": {**scaled["spec"], "x": 1}}, KNOWN["scaledobject"])
    (trigger,) = scaled["spec"]["triggers"]
    assert trigger["metadata"].keys() <= set(KNOWN["prometheus trigger"])
    sidecar, engine = pod["containers"]
    options = dict(word.removeprefix("--").split("=", 1) for word in sidecar["args"])
    assert options.keys() <= set(KNOWN["routing sidecar"]["flags"])
    assert options["kv-connector"] in KNOWN["routing sidecar"]["kv-connector"]
    assert f"--port={options['vllm-port']}" in engine["args"]


def test_ray_builds_the_recipe() -> None:
    """As far as an application goes without a cluster: engines are not started."""
    pytest.importorskip("ray.llm", reason="ray is not installed")
    schema = pytest.importorskip("ray.serve.schema")
    builder = pytest.importorskip(
        "ray.llm._internal.serve.serving_patterns.prefill_decode.builder",
        reason="this ray has no prefill/decode builder, or pyarrow is missing",
    )
    _, ray, _ = recipes()
    schema.ServeDeploySchema.model_validate(ray)
    (application,) = ray["applications"]
    given = builder.PDServingArgs.model_validate(application["args"])
    for side, role in (("prefill_config", "kv_producer"), ("decode_config", "kv_consumer")):
        transfer = getattr(given, side).engine_kwargs["kv_transfer_config"]
        assert (transfer["kv_connector"], transfer["kv_role"]) == ("KvxferConnector", role)


def test_recipes_parse() -> None:
    scaled, ray, pod = recipes()
    (trigger,) = scaled["spec"]["triggers"]
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


@in_loop
async def test_router_sends_both_legs() -> None:
    """The recipe as it is told, with the ports of engines that are here."""
    program = Path(sys.executable).with_name("vllm-router")
    if not program.exists():
        pytest.skip("vllm-router is not installed beside this Python")
    (words,) = commands("vllm-router")
    async with engines(1, 1) as ((prefill,), (decode,)):
        port, other = free_port(), free_port()
        places = {
            "http://p1:8100": prefill.url,
            "http://d1:8200": decode.url,
            "0.0.0.0": "127.0.0.1",
            "8000": str(port),
        }
        command = [places.get(word, word) for word in words[1:]]
        command += ["--prometheus-port", str(other)]
        nowhere = asyncio.subprocess.DEVNULL
        router = await asyncio.create_subprocess_exec(
            program, *command, stdout=nowhere, stderr=nowhere
        )
        try:
            async with aiohttp.ClientSession(f"http://127.0.0.1:{port}") as client:
                while True:
                    with contextlib.suppress(aiohttp.ClientError):
                        async with client.get("/health") as answer:
                            if answer.status == 200:
                                break
                    assert router.returncode is None
                    await asyncio.sleep(0.1)
                body = {"model": "m", "prompt": list(range(10, 60)), "max_tokens": 5}
                async with client.post("/v1/completions", json=body) as answer:
                    assert answer.status == 200
                    found = (await answer.json())["choices"][0]["text"]
            assert found == "".join(f" {token}" for token in output(body["prompt"], 5))
            assert len(prefill.bodies("prefill")) == 1
            assert len(decode.bodies("fetch")) == 1
            assert (decode.counts["loads"], prefill.held) == (1, {})
        finally:
            router.kill()
            await router.wait()


def test_limits_have_options() -> None:
    parser = argparse.ArgumentParser()
    watch_command.add_arguments(parser)
    options = {action.dest for action in parser._actions}
    assert {field.name for field in dataclasses.fields(advice.Limits)} <= options
    assert plan_command.main  # the command that leads there
