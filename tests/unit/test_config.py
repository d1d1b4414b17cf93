"""Knobs: defaults, environment variables, arguments, and values that make no sense."""

from __future__ import annotations

import dataclasses

import pytest

import kvxfer

FIELDS = {field.name: field for field in dataclasses.fields(kvxfer.Config)}


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for field in FIELDS.values():
        monkeypatch.delenv(field.metadata["variable"], raising=False)


def test_the_table_names_every_knob() -> None:
    table = kvxfer.Config.describe()
    for name, field in FIELDS.items():
        row = next(line for line in table.splitlines() if line.startswith(name + " "))
        assert field.metadata["variable"] == f"KVXFER_{name.upper()}"
        for cell in ("variable", "unit", "doc"):
            assert field.metadata[cell] in row
        assert str(getattr(kvxfer.Config(), name)) in row


def test_the_table_does_not_show_the_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVXFER_SECRET", "hush")
    assert "hush" not in kvxfer.Config.describe()


def test_arguments_win_over_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    default = kvxfer.Config().window
    monkeypatch.setenv("KVXFER_WINDOW", "3")
    assert kvxfer.Config().window == 3
    assert kvxfer.Config(window=5).window == 5
    assert kvxfer.Config(window=5).replace(threads=1).window == 5
    monkeypatch.delenv("KVXFER_WINDOW")
    assert kvxfer.Config().window == default
    with kvxfer.Agent("a", config=kvxfer.Config(window=5), threads=1) as agent:
        assert (agent.config.window, agent.config.threads) == (5, 1)


@pytest.mark.parametrize(
    ("variable", "value", "name", "found"),
    [
        ("KVXFER_TRANSPORT", "tcp", "transport", "tcp"),
        ("KVXFER_SECRET", "s", "secret", "s"),
        ("KVXFER_INSECURE", "yes", "insecure", True),
        ("KVXFER_DIGEST", "OFF", "digest", False),
        ("KVXFER_DIGEST", "0", "digest", False),
        ("KVXFER_ARENA_BYTES", "1073741824", "arena_bytes", 1 << 30),
        ("KVXFER_HEARTBEAT_TIMEOUT", "2.5", "heartbeat_timeout", 2.5),
        ("KVXFER_HEARTBEAT_TIMEOUT", "7", "heartbeat_timeout", 7.0),
        ("KVXFER_INTERFACE", "eth1", "interface", "eth1"),
    ],
)
def test_the_environment(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str, name: str, found: object
) -> None:
    monkeypatch.setenv(variable, value)
    assert getattr(kvxfer.Config(), name) == found


@pytest.mark.parametrize(
    ("variable", "value", "words"),
    [
        ("KVXFER_ARENA_BYTES", "lots", "KVXFER_ARENA_BYTES='lots': expected int"),
        ("KVXFER_ARENA_BYTES", "", "KVXFER_ARENA_BYTES='': expected int"),
        ("KVXFER_ARENA_BYTES", "1.5", "expected int"),
        ("KVXFER_DIGEST", "maybe", "KVXFER_DIGEST='maybe': expected bool"),
        ("KVXFER_HEARTBEAT_TIMEOUT", "soon", "expected float"),
        ("KVXFER_HEARTBEAT_TIMEOUT", "nan", "heartbeat_timeout is nan"),
        ("KVXFER_THREADS", "0", "threads is 0: it must be 1 to"),
        ("KVXFER_TRANSPORT", "pigeon", "'pigeon' is not known"),
        ("KVXFER_SECRET", "", "secret is empty"),
    ],
)
def test_an_environment_that_makes_no_sense(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str, words: str
) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(kvxfer.ConfigError, match=words):
        kvxfer.Config()
    with pytest.raises(kvxfer.ConfigError, match=words):
        kvxfer.Agent("a")


@pytest.mark.parametrize(
    ("knobs", "words"),
    [
        ({"arena_bytes": 0}, "arena_bytes is 0: it must be"),
        ({"arena_bytes": -1}, "arena_bytes is -1: it must be"),
        ({"arena_bytes": 1 << 60}, "arena_bytes is"),
        ({"arena_bytes": 1e9}, "arena_bytes is 1000000000.0: expected int"),
        ({"arena_bytes": "1"}, "arena_bytes is '1': expected int"),
        ({"arena_bytes": True}, "arena_bytes is True: expected int"),
        ({"arena_bytes": None}, "arena_bytes is None: expected int"),
        ({"chunk_bytes": 100}, "chunk_bytes is 100: it must be 4096 to"),
        ({"chunk_bytes": 1 << 33, "arena_bytes": 1 << 34}, "chunk_bytes is"),
        ({"arena_bytes": 4096, "chunk_bytes": 8192}, "arena_bytes is 4096, less than one chunk"),
        ({"window": 0}, "window is 0"),
        ({"threads": 10**6}, "threads is 1000000"),
        ({"tcp_streams": 65}, "tcp_streams is 65: it must be 1 to 64"),
        ({"inline_bytes": -1}, "inline_bytes is -1"),
        ({"heartbeat_interval": 0}, "heartbeat_interval is 0"),
        ({"heartbeat_interval": float("nan")}, "heartbeat_interval is nan"),
        ({"heartbeat_interval": float("inf")}, "heartbeat_interval is inf"),
        ({"heartbeat_interval": 1.0, "heartbeat_timeout": 1.5}, "1.5 s: it must be at least twice"),
        ({"handshake_timeout": 0}, "handshake_timeout is 0"),
        ({"handshake_timeout": "5"}, "handshake_timeout is '5': expected float"),
        ({"digest": 1}, "digest is 1: expected bool"),
        ({"secret": ""}, "secret is empty"),
        ({"secret": b"s"}, "secret is bytes: expected str"),
        ({"transport": None}, "transport is None: expected str"),
        ({"interface": 7}, "interface is 7: expected str"),
    ],
    ids=str,
)
def test_values_that_make_no_sense(knobs: dict, words: str) -> None:
    with pytest.raises(kvxfer.ConfigError, match=words):
        kvxfer.Config(**knobs)
    with pytest.raises(kvxfer.ConfigError, match=words):
        kvxfer.Agent("a", **knobs)


def test_a_knob_that_does_not_exist() -> None:
    with pytest.raises(TypeError, match="speed"):
        kvxfer.Agent("a", speed=11)
