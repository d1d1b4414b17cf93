"""Importing the package loads no native code until something needs it."""

from __future__ import annotations

import subprocess
import sys

import pytest

import kvxfer


def python(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize(
    "statement",
    [
        "import kvxfer",
        "import kvxfer.ticket, kvxfer.errors, kvxfer.config, kvxfer.cover, kvxfer.codecs",
        "from kvxfer import Config, Ranks, Status, codecs, tiered; Config(); codecs()",
        "import kvxfer.handles",
        "import kvxfer.cli",
        "import kvxfer; dir(kvxfer)",
    ],
)
def test_no_native_code_is_loaded(statement: str) -> None:
    print_it = "import sys; print('kvxfer._core' in sys.modules)"
    assert python(f"{statement}; {print_it}") == "False"


@pytest.mark.parametrize("name", ["Agent", "Cache", "__version__"])
def test_what_needs_it_loads_it(name: str) -> None:
    code = f"import sys; from kvxfer import {name}; print('kvxfer._core' in sys.modules)"
    assert python(code) == "True"


def test_everything_is_there_by_name() -> None:
    for name in kvxfer.__all__:
        assert getattr(kvxfer, name) is not None
        assert name in dir(kvxfer)
    with pytest.raises(AttributeError, match="has no attribute 'Agnet'"):
        kvxfer.Agnet  # type: ignore[attr-defined]  # noqa: B018


@pytest.mark.parametrize("name", ["codecs", "transports"])
def test_functions_win_over_modules_of_their_name(name: str) -> None:
    # Whoever imports the module first: an import binds its name in the package.
    code = f"import kvxfer.{name}, kvxfer.agent, kvxfer; print(callable(kvxfer.{name}))"
    assert python(code) == "True"
