"""The host: limits and settings that transfers meet."""

from __future__ import annotations

import re
from collections.abc import Mapping

from kvxfer.config import Config
from kvxfer.doctor.findings import Finding, State
from kvxfer.doctor.gpus import Gpu
from kvxfer.doctor.nics import Nic
from kvxfer.doctor.tree import Tree
from kvxfer.errors import ConfigError

_LOCK = 14  # the capability that lifts the limit on locked memory
_FEW_FILES = 4096
_USUAL_ARENA = 256 << 20


def describe_host(tree: Tree) -> dict[str, object]:
    """Return what this host is, for the head of a report."""
    models = tree.lines("/proc/cpuinfo", "^(model name|CPU part)") or []
    nodes = [name for name in tree.names("/sys/devices/system/node") if name[4:].isdigit()]
    return {
        "name": tree.text("/proc/sys/kernel/hostname") or "",
        "kernel": tree.text("/proc/sys/kernel/osrelease") or "",
        "cpu": models[0].partition(":")[2].strip() if models else "",
        "cores": len(tree.lines("/proc/cpuinfo", "^processor") or []),
        "numa_nodes": len(nodes),
        "guest": bool(tree.lines("/proc/cpuinfo", r"^flags\s.*\bhypervisor\b")),
    }


def check_host(
    tree: Tree, gpus: list[Gpu], nics: list[Nic], environment: Mapping[str, str]
) -> list[Finding]:
    """Return what the host's settings do to transfers."""
    return [
        *_check_memlock(tree, nics),
        *_check_numa(tree, gpus, nics),
        *_check_files(tree),
        *_check_quota(tree),
        *_check_interfaces(tree),
        *_check_environment(tree, environment, nics),
    ]


def _limit(tree: Tree, title: str) -> int | None:
    """Return a soft limit of this process; -1 for unlimited, None where it is not known."""
    for line in tree.lines("/proc/self/limits", f"^{title}") or []:
        soft = line[len(title) :].split()[:1]
        if soft and (soft[0].isdigit() or soft[0] == "unlimited"):
            return -1 if soft[0] == "unlimited" else int(soft[0])
    return None


def _arena_bytes() -> int:
    try:
        return Config().arena_bytes
    except ConfigError:  # told among the settings
        return _USUAL_ARENA


def _check_memlock(tree: Tree, nics: list[Nic]) -> list[Finding]:
    limit = _limit(tree, "Max locked memory")
    if limit is None:
        return []
    capabilities = (tree.lines("/proc/self/status", "^CapEff:\t[0-9a-f]+$") or ["CapEff:\t0"])[0]
    lifted = bool(int(capabilities.partition("\t")[2] or "0", 16) >> _LOCK & 1)
    shown = "unlimited" if limit < 0 else f"{limit >> 10} KiB"
    what = "locked memory (ulimit -l)"
    if limit < 0 or lifted:
        return [Finding("host.memlock", what, shown + (", lifted for root" if lifted else ""))]
    if not nics:
        return [Finding("host.memlock", what, f"{shown}: of no matter without RDMA")]
    arena = _arena_bytes() if tree.live else _USUAL_ARENA
    return [
        Finding(
            "host.memlock",
            what,
            shown,
            State.BAD if limit < arena else State.WARN,
            f"RDMA registers memory by locking it; the arena alone has {arena >> 20} MiB, and "
            "caches are larger",
            "ulimit -l unlimited; for good '* - memlock unlimited' in /etc/security/limits.conf, "
            "LimitMEMLOCK=infinity in a systemd unit, --ulimit memlock=-1 for a container",
        )
    ]


def _check_numa(tree: Tree, gpus: list[Gpu], nics: list[Nic]) -> list[Finding]:
    balancing = tree.number("/proc/sys/kernel/numa_balancing")
    nodes = [name for name in tree.names("/sys/devices/system/node") if name[4:].isdigit()]
    if balancing is None:
        return []
    if not balancing:
        return [Finding("host.numa_balancing", "NUMA balancing", "off")]
    hurts = len(nodes) > 1 and bool(gpus or nics)
    return [
        Finding(
            "host.numa_balancing",
            "NUMA balancing",
            f"on, with {len(nodes)} nodes",
            State.WARN if hurts else State.INFO,
            "the kernel takes memory away to see who uses it, and moves it: stalls in GPU and "
            "RDMA work",
            "sysctl -w kernel.numa_balancing=0, and the same in /etc/sysctl.d/ for good",
        )
    ]


def _check_files(tree: Tree) -> list[Finding]:
    limit = _limit(tree, "Max open files")
    if limit is None:
        return []
    what = "open files (ulimit -n)"
    if limit < 0 or limit >= _FEW_FILES:
        return [Finding("host.open_files", what, "unlimited" if limit < 0 else str(limit))]
    return [
        Finding(
            "host.open_files",
            what,
            str(limit),
            State.INFO,
            "a peer takes some ten descriptors: enough for tests, little for a fleet",
            "ulimit -n 65536",
        )
    ]


def _check_quota(tree: Tree) -> list[Finding]:
    words = (tree.text("/sys/fs/cgroup/cpu.max") or "").split()
    if len(words) != 2 or not all(re.fullmatch("[1-9][0-9]*", word) for word in words):
        return []
    cores = int(words[0]) / int(words[1])
    return [
        Finding(
            "host.cpu_quota",
            "processor quota",
            f"{cores:g} cores of this container",
            State.INFO if cores >= 2 else State.WARN,
            "threads that pack and send are stopped when it is used up, for up to 100 ms",
            "raise the container's CPU limit, or leave it out and use requests",
        )
    ]


def _check_interfaces(tree: Tree) -> list[Finding]:
    findings = []
    for name in tree.names("/sys/class/net"):
        folder = f"/sys/class/net/{name}"
        if tree.real(f"{folder}/device") is None:
            continue
        speed = tree.number(f"{folder}/speed") or 0
        rate = f"{speed / 1000:g} Gbit/s" if speed > 0 else "speed not known"
        state = tree.text(f"{folder}/operstate") or "unknown"
        findings.append(
            Finding(
                "host.interface",
                f"interface {name}",
                f"{state}, {rate}, MTU {tree.number(f'{folder}/mtu')}",
            )
        )
    return findings


def _check_environment(
    tree: Tree, environment: Mapping[str, str], nics: list[Nic]
) -> list[Finding]:
    if not tree.live:
        return []
    findings = []
    ours = sorted(name for name in environment if name.startswith("KVXFER_"))
    try:
        Config()
    except ConfigError as error:
        findings.append(
            Finding(
                "host.settings",
                "KVXFER_ variables",
                str(error),
                State.BAD,
                "no agent starts with them",
                "correct or unset it",
            )
        )
    else:
        shown = ", ".join(
            name if name == "KVXFER_SECRET" else f"{name}={environment[name]}" for name in ours
        )
        findings.append(Finding("host.settings", "KVXFER_ variables", shown or "none set"))
    tls = environment.get("UCX_TLS", "")
    if nics and tls and not set(re.split(r"[,^]", tls)) & {"all", "rc", "rc_x", "rc_v", "dc", "ib"}:
        findings.append(
            Finding(
                "host.ucx_tls",
                "UCX_TLS",
                tls,
                State.WARN,
                "UCX, and NIXL over it, is kept from the RDMA adapters and says nothing",
                "unset UCX_TLS",
            )
        )
    return findings
