"""Programs as users write them pass mypy --strict, and their mistakes don't."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
PROGRAMS = sorted((REPOSITORY / "tests" / "typing").glob("*.py"))


def test_user_programs_are_typed():
    pytest.importorskip("mypy", reason="mypy is not installed: make types installs it")
    assert PROGRAMS
    # Without the repository's settings: users have their own.
    checked = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--config-file=", *map(str, PROGRAMS)],
        cwd=REPOSITORY,
        env={**os.environ, "MYPYPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_the_package_says_that_it_is_typed():
    assert (REPOSITORY / "kvxfer" / "py.typed").exists()
