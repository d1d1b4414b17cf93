"""What a reader of the figures needs to know about the machine they are from."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import time
from pathlib import Path

import kvxfer


def stamp() -> dict[str, object]:
    """Return machine, kernel, page settings, versions, load and time, as JSON has them."""
    return {
        "host": platform.node(),
        "cpu": cpu_model(),
        "arch": platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": _meminfo("MemTotal"),
        "kernel": platform.release(),
        "thp": _chosen("/sys/kernel/mm/transparent_hugepage/enabled"),
        "shmem_thp": _chosen("/sys/kernel/mm/transparent_hugepage/shmem_enabled"),
        "load": [round(value, 2) for value in os.getloadavg()],
        "versions": {
            "kvxfer": kvxfer.__version__,
            "python": platform.python_version(),
            "numpy": version("numpy"),
            "libc": " ".join(platform.libc_ver()),
        },
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def available_bytes() -> int | None:
    """Return how much memory the kernel thinks is to be had; None where it doesn't say."""
    return _meminfo("MemAvailable")


def cpu_model() -> str:
    model: dict[str, str] = {}
    for line in _read("/proc/cpuinfo").splitlines():
        key, _, value = line.partition(":")
        model.setdefault(key.strip(), value.strip())
    name = model.get("model name", model.get("CPU part", "unknown"))
    return f"{name} (family {model.get('cpu family', '?')} model {model.get('model', '?')})"


def version(package: str) -> str | None:
    """Return the version that is installed, None where none is."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _meminfo(key: str) -> int | None:
    for line in _read("/proc/meminfo").splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) << 10
    return None


def _chosen(path: str) -> str:
    text = _read(path)
    return text[text.find("[") + 1 : text.find("]")] if "[" in text else text.strip() or "unknown"


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""
