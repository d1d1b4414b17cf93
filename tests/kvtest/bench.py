"""kvxfer bench in processes of its own."""

from __future__ import annotations

import json
import os
import re
import select
import subprocess
import sys
import time
from pathlib import Path

import jsonschema

SCHEMA = json.loads((Path(__file__).parents[2] / "docs/schemas/bench.json").read_text())
KVXFER = [sys.executable, "-m", "kvxfer.cli"]
SMALL = ["--block", "4KiB", "--blocks", "40", "--seconds", "0.05"]
LONG = ["--block", "4KiB", "--blocks", "40", "--seconds", "600"]
PATIENCE = 60.0


def environment(**variables: str) -> dict[str, str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("KVXFER_")}
    return {**clean, "PYTHONUNBUFFERED": "1", **variables}


def bench(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*KVXFER, "bench", *arguments],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        env=environment(**variables),
        check=False,
    )


def records(text: str) -> list[dict]:
    lines = [json.loads(line) for line in text.splitlines()]
    for line in lines:
        jsonschema.validate(line, SCHEMA)
    assert [line["kind"] for line in lines] == ["env"] + ["result"] * (len(lines) - 1)
    return lines[1:]


class Process:
    """A command that runs beside the test; it is killed at the end if it has not ended."""

    def __init__(self, *arguments: str, **variables: str) -> None:
        self.process = subprocess.Popen(
            [*KVXFER, "bench", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment(**variables),
            start_new_session=True,
        )
        self.seen = ""

    def wait_for(self, pattern: str) -> re.Match[str]:
        deadline = time.monotonic() + PATIENCE
        while (found := re.search(pattern, self.seen)) is None:
            left = deadline - time.monotonic()
            assert left > 0, f"no {pattern!r} in {self.seen!r}"
            if select.select([self.process.stdout], [], [], left)[0]:
                data = os.read(self.process.stdout.fileno(), 1 << 16)
                assert data, f"it ended: {self.seen!r} {self.process.stderr.read()!r}"
                self.seen += data.decode()
        return found

    def end(self) -> tuple[int, str]:
        out, err = self.process.communicate(timeout=PATIENCE)
        self.seen += out.decode()
        return self.process.returncode, err.decode()

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self.process.stdout.close()
        self.process.stderr.close()
