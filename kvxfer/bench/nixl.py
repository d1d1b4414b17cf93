"""NIXL beside kvxfer, where the Python that runs us has it: two of its agents in two processes.

At its best: no progress thread (with one each agent keeps a core busy for ever), transfers made in
advance and used again, both sides polling, WRITE or READ, whichever is faster here.
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
import select
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from typing import Any

from kvxfer.bench.case import BenchError

_TIMEOUT = 60.0
_COMMON = {"UCX_NET_DEVICES": "lo", "UCX_MODULES": "^efa", "NIXL_LOG_LEVEL": "ERROR"}
# UCX gives NIXL shared memory only with its error handling on.
_ENVIRONMENT = {
    "shm": {"UCX_TLS": "posix", "UCX_POSIX_ERROR_HANDLING": "y"},
    "tcp": {"UCX_TLS": "tcp"},
}
MODULES = ("nixl_cu12", "nixl_cu13")


def nixl_missing() -> str:
    """Return why NIXL can't be compared with, "" when it can."""
    if any(importlib.util.find_spec(name) for name in MODULES):
        return ""
    return "not installed in this Python (pip install nixl, with torch)"


class _Side:
    """One process with a NIXL agent; it ends when its input does."""

    def __init__(self, role: str, transport: str, end: float) -> None:
        self._role, self._end = role, end
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed by close()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "kvxfer.bench.nixl_side"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env={**os.environ, **_COMMON, **_ENVIRONMENT[transport]},
            start_new_session=True,  # Ctrl-C is for us, who then end it
        )
        self._pending = b""

    def post(self, do: str, **fields: object) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"do": do, **fields}).encode() + b"\n")
            self._process.stdin.flush()
        except OSError:
            raise self._ended() from None

    def receive(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        descriptor = self._process.stdout.fileno()
        began = time.monotonic()
        deadline = min(began + _TIMEOUT, self._end)
        while b"\n" not in self._pending:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([descriptor], [], [], left)[0]:
                self._process.kill()
                waited = max(0.0, deadline - began)
                raise BenchError(f"NIXL's {self._role} has not answered within {waited:.0f} s")
            data = os.read(descriptor, 1 << 16)
            if not data:
                raise self._ended()
            self._pending += data
        line, self._pending = self._pending.split(b"\n", 1)
        answer: dict[str, Any] = json.loads(line)
        if "failed" in answer:
            raise BenchError(f"NIXL's {self._role}: {answer['failed']}")
        return answer

    def ask(self, do: str, **fields: object) -> dict[str, Any]:
        self.post(do, **fields)
        return self.receive()

    def close(self) -> None:
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            try:
                pipe.close()
            except OSError:
                pass  # unsent bytes for a process that is gone
        try:
            self._process.wait(3.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()

    def _ended(self) -> BenchError:
        self._process.kill()
        status = self._process.wait()
        self._log.seek(0)
        said = self._log.read().decode(errors="replace").strip().splitlines()[-1:]
        return BenchError(f"NIXL's {self._role} ended with status {status}: {''.join(said)}")


class _Pair:
    def __init__(self, transport: str, end: float) -> None:
        self.sides: list[_Side] = []
        self.key: tuple[int, int] = (0, 0)
        self.operation = ""
        try:
            for role in ("initiator", "target"):
                self.sides.append(_Side(role, transport, end))
            for side in self.sides:
                side.post("start")
            self.version = str([side.receive()["version"] for side in self.sides][0])
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        for side in self.sides:
            side.close()
        self.sides = []


@dataclass
class NixlTurn:
    """One prepared transfer of NIXL."""

    name: str
    pair: _Pair

    def run(self, count: int) -> list[float]:
        """Return the seconds of `count` transfers, one after the other."""
        return _go(self.pair, self.pair.operation, count)


class NixlPairs:
    """A pair of agents for each transport, made when first asked for.

    Parameters
    ----------
    end
        When nothing of NIXL is waited for any more, of `time.monotonic()`.
    """

    def __init__(self, end: float = math.inf) -> None:
        self._pairs: dict[str, _Pair] = {}
        self._end = end

    def turn(self, transport: str, run_bytes: int, runs: int, until: float) -> NixlTurn:
        """Prepare transfers of `runs` scattered runs, check them, and take the faster operation.

        Once it is `until`, fewer are tried.
        """
        if time.monotonic() > self._end:
            raise BenchError("no time was left for it: --within has more")
        try:
            if transport not in self._pairs:
                self._pairs[transport] = _Pair(transport, self._end)
            pair = self._pairs[transport]
            if pair.key != (run_bytes, runs):
                _prepare(pair, run_bytes, runs, until)
        except BenchError:
            if transport in self._pairs:
                self._pairs.pop(transport).close()
            raise
        return NixlTurn(f"NIXL {pair.version}, {pair.operation}", pair)

    def close(self) -> None:
        for pair in self._pairs.values():
            pair.close()
        self._pairs = {}


def _prepare(pair: _Pair, run_bytes: int, runs: int, until: float) -> None:
    initiator, target = pair.sides
    shape = {"run_bytes": run_bytes, "runs": runs}
    pools = [side.ask("pool", **shape) for side in pair.sides]
    initiator.ask("meet", metadata=pools[1]["metadata"])
    target.ask("meet", metadata=pools[0]["metadata"])
    times: dict[str, float] = {}
    for operation in ("WRITE", "READ"):
        if times and time.monotonic() > until:
            break
        initiator.ask("prepare", operation=operation, address=pools[1]["address"])
        source, sink = (initiator, target) if operation == "WRITE" else (target, initiator)
        source.ask("fill")
        sink.ask("poison")
        first = _go(pair, operation, 1)
        sums = [side.ask("digest")["digest"] for side in (source, sink)]
        if sums[0] != sums[1]:
            raise BenchError(f"NIXL's {operation} delivered other bytes than were sent")
        more = _go(pair, operation, 3) if time.monotonic() + 3 * first[0] < until else first
        times[operation] = statistics.median(more)
    pair.operation = min(times, key=lambda operation: times[operation])
    pair.key = (run_bytes, runs)


def _go(pair: _Pair, operation: str, count: int) -> list[float]:
    initiator, target = pair.sides
    target.post("poll")
    try:
        seconds: list[float] = initiator.ask("go", operation=operation, count=count)["seconds"]
    finally:
        target.post("rest")
        target.receive()
        target.receive()
    return seconds
