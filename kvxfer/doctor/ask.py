"""Asks libraries, each in a process of its own and all at once."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from kvxfer.doctor.tree import Tree

QUESTIONS = ("verbs", "cuda", "hip")
PATIENCE = 4.0
"""Seconds that a library has to answer."""
_SCRIPT = Path(__file__).with_name("libraries.py")

Answers = dict[str, dict[str, Any]]


def ask_all(tree: Tree) -> Answers:
    """Return what each library answers; ``{"missing": ...}`` or ``{"error": ...}`` if it can't."""
    running = {name: _start(name) for name in QUESTIONS} if tree.live else {}
    deadline = time.monotonic() + PATIENCE
    answers: Answers = {}
    for name in QUESTIONS:
        found = tree.answer(name, lambda name=name: _collect(running[name], deadline))  # type: ignore[misc]
        answers[name] = found if isinstance(found, dict) else {"missing": "it was not asked"}
    return answers


def _start(name: str) -> subprocess.Popen[str]:
    # -I and -S: nothing of the environment, and 20 ms faster.
    return subprocess.Popen(
        [sys.executable, "-I", "-S", str(_SCRIPT), name],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )


def _collect(process: subprocess.Popen[str], deadline: float) -> dict[str, Any]:
    assert process.stdout is not None
    try:
        text, _ = process.communicate(timeout=max(0.01, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        process.kill()
        process.stdout.close()
        try:
            process.wait(0.1)
        except subprocess.TimeoutExpired:
            pass  # it is stuck in the kernel, and ends when that lets go of it
        return {"error": f"it did not answer within {PATIENCE:.0f} s"}
    if process.returncode < 0:
        return {"error": f"it was ended by signal {-process.returncode}"}
    try:
        answer: dict[str, Any] = json.loads(text)
    except ValueError:
        return {"error": f"the process that asked it ended with {process.returncode}"}
    return answer
