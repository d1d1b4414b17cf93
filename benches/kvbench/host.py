"""What this machine is, and who uses its processors."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
import time
from pathlib import Path

from kvbench.child import BENCHES


def process_cpu_seconds(pid: int) -> float:
    """CPU seconds (user and system, all threads, nanosecond resolution) that a process has used."""
    # The kernel's clock id of another process: clock_getcpuclockid(3) computes the same.
    return time.clock_gettime((~pid << 3) | 2)


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
    return {
        "cpu": _cpu_model(),
        "arch": platform.machine(),
        "cores": os.cpu_count(),
        "kernel": platform.release(),
        "thp": _chosen("/sys/kernel/mm/transparent_hugepage/enabled"),
        "shmem_thp": _chosen("/sys/kernel/mm/transparent_hugepage/shmem_enabled"),
        "load": [round(x, 2) for x in os.getloadavg()],
        "versions": {
            "python": platform.python_version(),
            "libc": " ".join(platform.libc_ver()),
            "numpy": _version("numpy"),
            "kvxfer": _version("kvxfer"),
            "commit": _commit(),
        },
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def _cpu_model() -> str:
    model: dict[str, str] = {}
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        key, _, value = line.partition(":")
        model.setdefault(key.strip(), value.strip())
    name = model.get("model name", model.get("CPU part", "unknown"))
    return f"{name} (family {model.get('cpu family', '?')} model {model.get('model', '?')})"


def _chosen(path: str) -> str:
    try:
        text = Path(path).read_text()
    except OSError:
        return "unknown"
    return text[text.find("[") + 1 : text.find("]")] if "[" in text else text.strip()


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


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
