"""The examples of the README and the quick start, run as a reader would run them."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys
from pathlib import Path

import pytest

import kvxfer

README = Path(__file__).resolve().parents[2] / "README.md"
QUICK_START = README.parent / "docs/quickstart.md"


@pytest.fixture
def programs(tmp_path):
    text = README.read_text() + QUICK_START.read_text()
    blocks = re.findall(r"```python\n# (\w+\.py)\n(.*?)```", text, re.DOTALL)
    paths = {name: tmp_path / name for name, _ in blocks}
    for name, text in blocks:
        paths[name].write_text(text)
    return paths


def test_the_short_example_runs(programs):
    text = programs["example.py"].read_text()
    assert len([line for line in text.splitlines() if line.strip()]) <= 15
    done = subprocess.run(
        [sys.executable, programs["example.py"]], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert f"bytes={700 * 2 * 2 * 8 * 128 * 2}," in done.stdout


def test_the_two_programs_run(programs):
    with subprocess.Popen(
        [sys.executable, programs["prefill.py"]], stdout=subprocess.PIPE
    ) as prefill:
        decode = subprocess.run(
            [sys.executable, programs["decode.py"]],
            stdin=prefill.stdout,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert decode.returncode == 0, decode.stderr
        assert prefill.wait(30) == 0
    assert f"bytes={700 * 2 * 2 * 8 * 128 * 2}," in decode.stdout
    assert "transport='shm'" in decode.stdout


def test_defaults_are_as_the_pages_say():
    pages = README.read_text(), (README.parent / "docs/architecture.md").read_text()
    default = {field.name: field.default_factory() for field in dataclasses.fields(kvxfer.Config)}
    chunk = f"{default['chunk_bytes'] >> 20} MiB"
    tcp_chunk = f"{default['tcp_chunk_bytes'] >> 10} KiB"
    assert f"chunks of up to {chunk} ({tcp_chunk} over TCP)" in pages[0]
    assert f"`arena_bytes`, {default['arena_bytes'] >> 20} MiB" in pages[0]
    assert f"`chunk_bytes` ({chunk}), over TCP up to `tcp_chunk_bytes` ({tcp_chunk})" in pages[1]


def test_links_to_files_lead_somewhere():
    for page in [README, *README.parent.glob("docs/*.md")]:
        for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"
