"""A process of the fleet, seen from the driver."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any


class Process:
    """A node, seen from here."""

    def __init__(
        self,
        names: list[str],
        sabotage: str | None,
        inside: Sequence[str] = (),
        preload: str = "",
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Start it, `inside` what this command line runs commands in, with a library before others.

        A node that stands for several agents has several `names`.
        """
        self.names = names
        ours, theirs = Pipe()
        self.pipe: Connection = ours
        self.stopped = 0  # how many faults want it so
        self.waiting: list[tuple[str, dict[str, Any]]] = []
        self.alive = True
        self.struck: float | None = None  # when something else than `kill` has killed it
        self.baseline: dict[str, Any] | None = None
        self.measured: dict[str, Any] | None = None
        tests = str(Path(__file__).parents[2])
        path = os.pathsep.join([tests, *filter(None, [os.environ.get("PYTHONPATH")])])
        first = {"LD_PRELOAD": preload} if preload else {}
        # What a thread has freed goes back to the system, so that memory shows what is held: else
        # glibc keeps up to twice the largest block that was ever mapped by itself, for each thread.
        first["MALLOC_TRIM_THRESHOLD_"] = str(128 << 10)
        with theirs:
            self.process = subprocess.Popen(
                [
                    *inside,
                    sys.executable,
                    "-m",
                    "faults.campaign.node",
                    str(theirs.fileno()),
                    sabotage or "",
                ],
                pass_fds=[theirs.fileno()],
                env={**os.environ, "PYTHONPATH": path, **first, **(environment or {})},
            )

    def send(self, method: str, **args: Any) -> None:
        """Send a command. Those for a stopped process wait here: its pipe may be full."""
        if self.stopped:
            self.waiting.append((method, args))
            return
        with contextlib.suppress(OSError):  # it was killed
            self.pipe.send((method, args))

    def stop(self) -> None:
        self.stopped += 1
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.process.pid, signal.SIGSTOP)

    def resume(self) -> None:
        self.stopped -= 1
        if self.stopped:
            return
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.process.pid, signal.SIGCONT)
        waiting, self.waiting = self.waiting, []
        for method, args in waiting:
            self.send(method, **args)

    def strike(self, sign: signal.Signals) -> None:
        """Kill or stop it at once, from any thread; the driver finds out afterwards."""
        self.struck = time.monotonic()
        self.process.send_signal(sign)

    def kill(self) -> None:
        self.alive = False
        self.process.kill()
        self.process.wait()
        self.pipe.close()
