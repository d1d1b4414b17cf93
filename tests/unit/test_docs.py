"""The pages are complete: commands, states, and what the site lists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import kvxfer
from kvxfer.cli import COMMANDS

ROOT = Path(__file__).parents[2]


def page(name: str) -> str:
    return (ROOT / "docs" / name).read_text()


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_is_on_the_page(command):
    assert re.search(rf"`{command}`", page("cli.md")), f"docs/cli.md does not have {command}"


def test_every_status_is_explained():
    rows = re.findall(r"^\| (`[^|]+) \|", page("concepts.md"), re.MULTILINE)
    named = set(re.findall(r"`([A-Z_]+)`", " ".join(rows)))
    assert named == {status.value for status in kvxfer.Status}


def test_everything_public_is_in_the_reference():
    named = set(re.findall(r"^::: kvxfer\.\w+\.(\w+)", page("api.md"), re.MULTILINE))
    errors = {name for name in kvxfer.__all__ if name.endswith("Error") or name == "Status"}
    assert "::: kvxfer.errors" in page("api.md")
    missing = set(kvxfer.__all__) - named - errors - {"__version__", "Ticket"}
    assert not missing
