"""Child processes that are told what to do by JSON lines, and die when we do or when they hang."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any

Reply = dict[str, Any]
Handler = Callable[..., Reply]

BENCHES = Path(__file__).resolve().parents[1]


class ChildError(RuntimeError):
    """A child failed, died or did not answer in time."""


class Child:
    """One child process. Commands go to its stdin, answers come from a pipe of its own.

    Parameters
    ----------
    name
        How messages call it.
    command
        Its argument vector.
    environment
        Variables to set (or, with None, to unset) on top of ours.
    """

    def __init__(
        self, name: str, command: Sequence[str], environment: dict[str, str | None] | None = None
    ) -> None:
        self.name = name
        merged = dict(os.environ, PYTHONPATH=_with_benches(os.environ.get("PYTHONPATH")))
        for key, value in (environment or {}).items():
            if value is None:
                merged.pop(key, None)
            else:
                merged[key] = value
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 (closed by close())
        try:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, env=merged
            )
        except OSError as error:
            self._log.close()
            raise ChildError(f"{name}: cannot start {command[0]}: {error}") from error
        self._pending = b""

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def post(self, command: str, **arguments: object) -> None:
        """Send a command without waiting for its answer."""
        line = json.dumps({"command": command, **arguments}) + "\n"
        stdin = self._process.stdin
        assert stdin is not None
        try:
            stdin.write(line.encode())
            stdin.flush()
        except OSError as error:
            raise ChildError(f"{self.name}: gone before {command!r}{self._tail()}") from error

    def receive(self, timeout: float = 60.0) -> Reply:
        """Wait for the next answer; the child is killed when it does not come in time."""
        deadline = time.monotonic() + timeout
        stdout = self._process.stdout
        assert stdout is not None
        while b"\n" not in self._pending:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([stdout], [], [], left)[0]:
                self.kill()
                raise ChildError(f"{self.name}: no answer in {timeout:g} s, killed{self._tail()}")
            data = os.read(stdout.fileno(), 1 << 16)
            if not data:
                self.kill()
                raise ChildError(
                    f"{self.name}: died (status {self._process.returncode}){self._tail()}"
                )
            self._pending += data
        line, self._pending = self._pending.split(b"\n", 1)
        reply: Reply = json.loads(line)
        if "error" in reply:
            raise ChildError(f"{self.name}: {reply['error']}")
        return reply

    def ask(self, command: str, timeout: float = 60.0, **arguments: object) -> Reply:
        """Send a command and wait for its answer."""
        self.post(command, **arguments)
        return self.receive(timeout)

    def kill(self) -> None:
        """Kill it now."""
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait(10)

    def close(self, timeout: float = 10.0) -> None:
        """Let it end by closing its stdin; kill it when it does not."""
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                try:
                    pipe.close()
                except OSError:
                    # Unsent bytes for a child that is gone: there is nobody to tell.
                    pass
        try:
            self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.kill()
        self._log.close()

    def __enter__(self) -> Child:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _tail(self) -> str:
        if self._log.closed:
            return ""
        self._log.seek(0)
        text = self._log.read().decode(errors="replace").strip()[-2000:]
        return f"; it said:\n{text}" if text else ""


def python_child(name: str, module: str, environment: dict[str, str | None] | None = None) -> Child:
    """A child that runs one of our modules under our own interpreter."""
    return Child(name, [sys.executable, "-m", module], environment)


def stdin_ready() -> bool:
    """In a child: whether a command waits (or the parent is gone)."""
    return bool(select.select([0], [], [], 0)[0])


def serve(handlers: dict[str, Handler]) -> None:
    """In a child: answer commands until stdin ends.

    A handler gets the command's arguments as keywords and returns the answer. What libraries print
    on stdout goes to stderr, so it cannot be taken for an answer.
    """
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    # Unbuffered, so that stdin_ready() never misses a line that a buffer already holds.
    commands = os.fdopen(0, "rb", buffering=0, closefd=False)
    while line := commands.readline():
        arguments = json.loads(line)
        command = arguments.pop("command")
        try:
            reply = handlers[command](**arguments)
        except Exception as error:  # noqa: BLE001 (whatever it is, the parent decides)
            traceback.print_exc()
            reply = {"error": f"{command}: {type(error).__name__}: {error}"}
        answers.write(json.dumps(reply) + "\n")


def _with_benches(path: str | None) -> str:
    return os.pathsep.join([str(BENCHES), *([path] if path else [])])
