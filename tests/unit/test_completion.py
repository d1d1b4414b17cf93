"""What a shell gets when it asks how a command line of kvxfer may go on."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kvxfer import cli

KVXFER = [sys.executable, "-m", "kvxfer"]


@pytest.fixture(autouse=True)
def _argcomplete():
    pytest.importorskip("argcomplete", reason="argcomplete is not installed")


def completions(line: str, folder: Path) -> list[str]:
    """Ask as bash does, through argcomplete's script."""
    answer = folder / "answer"
    asked = {
        "COMP_LINE": line,
        "COMP_POINT": str(len(line)),
        "COMP_TYPE": "9",
        "_ARGCOMPLETE": "1",
        "_ARGCOMPLETE_IFS": "\n",
        "_ARGCOMPLETE_SHELL": "bash",
        "_ARGCOMPLETE_SUPPRESS_SPACE": "1",
        "_ARGCOMPLETE_STDOUT_FILENAME": str(answer),
    }
    done = subprocess.run(
        KVXFER, env={**os.environ, **asked}, capture_output=True, text=True, timeout=60
    )
    assert done.stdout == ""
    return answer.read_text().split("\n") if answer.exists() else []


def test_commands(tmp_path):
    assert set(cli.COMMANDS) <= set(completions("kvxfer ", tmp_path))
    assert completions("kvxfer doc", tmp_path) == ["doctor"]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("kvxfer doctor --rec", ["--record"]),
        ("kvxfer size --t", ["--tokens", "--tp"]),
        ("kvxfer size llama-3.1", ["llama-3.1-8b", "llama-3.1-70b", "llama-3.1-405b"]),
        ("kvxfer size llama-3-8b --prefill", ["--prefill-rate"]),
        ("kvxfer plan f", ["fit"]),
        ("kvxfer plan fit --bat", ["--batch-tokens"]),
        ("kvxfer completion z", ["zsh"]),
        ("kvxfer bench local --transport shm,t", ["shm,tcp"]),
        ("kvxfer bench run 10.0.0.5:7710 --codec raw,in", ["raw,int8"]),
        ("kvxfer bench local --model deepseek-r", ["deepseek-r1"]),
        ("kvxfer demo --model deep", ["deepseek-r1"]),
    ],
)
def test_options_and_values_of_commands(line, expected, tmp_path):
    assert completions(line, tmp_path) == expected


@pytest.mark.parametrize("line", ["kvxfer nope ", "kvxfer nope --x", "kvxfer doctor 'unfinished"])
def test_nothing_where_there_is_nothing(line, tmp_path):
    assert completions(line, tmp_path) in ([], [""])


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_scripts_of_shells(shell):
    done = subprocess.run(
        [*KVXFER, "completion", shell], capture_output=True, text=True, timeout=60, check=True
    )
    assert "kvxfer" in done.stdout
    assert "_ARGCOMPLETE" in done.stdout
    if shutil.which(shell):
        subprocess.run([shell, "-n"], input=done.stdout, text=True, timeout=60, check=True)


def test_a_shell_that_is_not_known():
    done = subprocess.run(
        [*KVXFER, "completion", "cmd"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2
    assert "cmd" in done.stderr


def test_without_argcomplete(monkeypatch, capsys):
    from kvxfer import completion

    monkeypatch.setitem(sys.modules, "argcomplete", None)
    assert completion.main(["bash"]) == 2
    assert "kvxfer[completion]" in capsys.readouterr().err
