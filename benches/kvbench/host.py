"""What this machine is, and who uses its processors."""

from __future__ import annotations

import os
import socket
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from kvbench.child import BENCHES


def process_cpu_seconds(pid: int) -> float:
    """CPU seconds (user and system, all threads, nanosecond resolution) that a process has used."""
    # The kernel's clock id of another process: clock_getcpuclockid(3) computes the same.
    return time.clock_gettime((~pid << 3) | 2)


def idle_cores(pids: Sequence[int], seconds: float) -> list[float]:
    """Processors that each process keeps busy for so long, while nothing is asked of it."""
    before = [process_cpu_seconds(pid) for pid in pids]
    began = time.monotonic()
    time.sleep(seconds)
    elapsed = time.monotonic() - began
    return [
        round((process_cpu_seconds(pid) - used) / elapsed, 4)
        for pid, used in zip(pids, before, strict=True)
    ]


def free_port() -> int:
    """Return a port of 127.0.0.1 that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def machine_cpu_seconds() -> float:
    """CPU seconds that the whole machine has used since it started, in ticks of 10 ms."""
    fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]
    user, nice, system, _idle, _wait, irq, softirq, steal = map(int, fields)
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def resident_bytes(pid: int) -> int:
    """Anonymous memory that a process has resident."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/{pid}/status has no RssAnon")


def open_fds(pid: int) -> int:
    """How many descriptors a process has open."""
    return len(os.listdir(f"/proc/{pid}/fd"))


def threads(pid: int) -> int:
    """How many threads a process has."""
    return len(os.listdir(f"/proc/{pid}/task"))


def stamp() -> dict[str, object]:
    """What a reader of the figures needs to know about where they come from."""
    from kvxfer.bench.stamp import stamp as machine

    found = machine()
    return {**found, "commit": _commit()}


def _commit() -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(BENCHES), "rev-parse", "--short=12", "HEAD"],
            capture_output=True,
            text=True,
            timeout=10,
            check=False,
        )
    except OSError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None
