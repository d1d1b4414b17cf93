"""What there is to say of RDMA adapters."""

from __future__ import annotations

import ipaddress
from typing import Any

from kvxfer.doctor.findings import Finding, State
from kvxfer.doctor.nics import Nic, Port
from kvxfer.doctor.pci import DEVICES
from kvxfer.doctor.tree import Tree

_MELLANOX = 0x15B3
_ROCE_MTU = 4200  # Ethernet frames that hold the largest RoCE packet, 4096 and headers
_SEND_DEPTH = 128
_REGISTRATION = 1 << 30
_BITS_PER_BYTE = 8


def check_nics(
    tree: Tree, nics: list[Nic], answers: dict[str, dict[str, Any]], verbs_works: bool
) -> list[Finding]:
    """Return the findings; `verbs_works` is whether kvxfer's own RDMA transport can be used."""
    if not nics:
        return [_no_nics(tree)]
    findings: list[Finding] = []
    for nic in nics:
        findings += _check_nic(tree, nic, nics, verbs_works)
    if not any(nic.active for nic in nics):
        findings.append(
            Finding(
                "nic.none_active",
                "RDMA",
                f"{len(nics)} adapters, and no active port",
                State.BAD,
                "transfers between hosts go over tcp",
                "see the ports above: cables, switch, and on InfiniBand a subnet manager",
            )
        )
    findings += _check_alike(nics)
    findings += _check_library(tree, nics, answers["verbs"])
    return findings


def _no_nics(tree: Tree) -> Finding:
    for address in tree.names(DEVICES):
        folder = f"{DEVICES}/{address}"
        if tree.number(f"{folder}/vendor") == _MELLANOX and tree.real(f"{folder}/driver") is None:
            return Finding(
                "nic.no_driver",
                f"adapter {address}",
                "an NVIDIA/Mellanox adapter without a driver",
                State.BAD,
                "transfers between hosts go over tcp and another interface",
                "modprobe mlx5_ib (package linux-modules-extra or the vendor's)",
            )
    return Finding(
        "nic.none",
        "RDMA adapters",
        "none: transfers between hosts go over tcp",
        State.INFO,
    )


def _check_nic(tree: Tree, nic: Nic, nics: list[Nic], verbs_works: bool) -> list[Finding]:
    findings = [_check_port(nic, port, nics) for port in nic.ports]
    if nic.device is None:
        return findings
    if nic.width is not None:
        findings += _check_width(nic)
    for port in nic.ports:
        if port.active and port.link_layer == "Ethernet":
            findings += _check_roce(nic, port)
    if nic.device.numa_node < 0 and len(tree.names("/sys/devices/system/node")) > 0:
        nodes = [n for n in tree.names("/sys/devices/system/node") if n[4:].isdigit()]
        if len(nodes) > 1:
            findings.append(
                Finding(
                    "nic.numa",
                    nic.name,
                    "its NUMA node is not known",
                    State.INFO,
                    fix="the firmware's tables lack it: see for a newer firmware of the host",
                )
            )
    return findings + _check_limits(nic, verbs_works)


def _check_port(nic: Nic, port: Port, nics: list[Nic]) -> Finding:
    what = f"{nic.name} port {port.number}"
    parts = [f"{port.state}, {port.rate}, {port.link_layer}"]
    if nic.device is None:
        parts.append(f"soft-RoCE over {nic.interface}: for tests, not for speed")
    if port.link_layer == "Ethernet" and (gid := port.best_gid):
        parts.append(f"{gid[0] or 'GID'} {_address(gid[1])}")
    if nic.device is not None:
        parts.append(f"driver {nic.driver}" if nic.driver else "no driver")
    parts += [f"firmware {nic.firmware}"] * bool(nic.firmware)
    parts += [str(nic.width)] * bool(nic.width)
    if nic.device is not None and nic.device.numa_node >= 0:
        parts.append(f"NUMA node {nic.device.numa_node}")
    for key in ("max_mr_size", "max_srq", "max_qp_wr"):
        if key in nic.limits:
            parts.append(f"{key} {_plain(nic.limits[key])}")
    found = ", ".join(parts)
    if port.active:
        return Finding("nic.port", what, found, State.INFO if nic.device is None else State.OK)
    reasons = {
        "Disabled": f"it is switched off: ip link set {nic.interface or 'DEV'} up",
        "Polling": "no signal: look at cable, transceiver and the switch's port",
        "LinkUp": "the link is there but not in use: on InfiniBand no subnet manager has set it "
        "up (systemctl start opensm on one host, or the switch's)",
    }
    return Finding(
        "nic.port_down",
        what,
        found,
        State.WARN if any(other.active for other in nics) else State.BAD,
        "a rail less: transfers go over the others, or over tcp",
        reasons.get(port.physical, f"its physical state is {port.physical}: look at the cable"),
    )


def _check_width(nic: Nic) -> list[Finding]:
    assert nic.width is not None
    assert nic.device is not None
    found = nic.width
    if found.lanes >= found.max_lanes and found.speed >= found.max_speed:
        if nic.gbits * 1e9 / _BITS_PER_BYTE <= found.bytes_per_second:
            return []
        reason = f"carries {found.bytes_per_second / 1e9:.1f} GB/s, its ports {nic.gbits:g} Gbit/s"
    else:
        reason = f"could be {found.max_speed:g} GT/s x{found.max_lanes}"
    return [
        Finding(
            "nic.pcie",
            nic.name,
            f"{found}; {reason}",
            State.WARN,
            "its PCIe connection is slower than it could be, and all that it moves goes there",
            f"lspci -vv -s {nic.device.address} | grep LnkSta; reseat it, try another slot",
        )
    ]


def _check_roce(nic: Nic, port: Port) -> list[Finding]:
    findings = []
    gid = port.best_gid
    if gid is None or gid[0] != "RoCE v2" or gid[1].startswith("fe80:"):
        findings.append(
            Finding(
                "nic.gid",
                f"{nic.name} port {port.number}",
                "no routable RoCE v2 address" if port.gids else "no GID at all",
                State.WARN,
                "peers in other subnets can't be reached",
                f"give its interface an address: ip addr add ADDRESS/PREFIX dev {nic.interface}",
            )
        )
    if 0 < nic.mtu < _ROCE_MTU:
        findings.append(
            Finding(
                "nic.mtu",
                f"{nic.name}, interface {nic.interface}",
                f"MTU {nic.mtu}",
                State.WARN,
                "RoCE packets carry 1024 bytes instead of 4096: more packets, and less of the "
                "line for data",
                f"ip link set {nic.interface} mtu 9000, and the same on switches and peers",
            )
        )
    return findings


def _check_limits(nic: Nic, verbs_works: bool) -> list[Finding]:
    findings = []
    if error := nic.limits.get("error"):
        findings.append(
            Finding(
                "nic.open",
                nic.name,
                str(error),
                State.BAD,
                "no program can use it",
                "in a container --device /dev/infiniband; else chmod a+rw /dev/infiniband/uverbs*",
            )
        )
    if nic.limits.get("max_srq") == 0:
        findings.append(
            Finding(
                "nic.no_srq",
                nic.name,
                "max_srq is 0: it has no shared receive queues",
                State.INFO if verbs_works else State.WARN,
                "UCX's RDMA transports ask for one, so nothing over UCX can use it",
                "use transport verbs, which needs none",
            )
        )
    if 0 < nic.limits.get("max_qp_wr", _SEND_DEPTH) < _SEND_DEPTH:
        findings.append(
            Finding(
                "nic.queue_depth",
                nic.name,
                f"max_qp_wr is {nic.limits['max_qp_wr']}",
                State.INFO,
                f"queues are shorter than the usual {_SEND_DEPTH}; writes wait for room",
            )
        )
    if 0 < nic.limits.get("max_mr_size", _REGISTRATION) < _REGISTRATION:
        findings.append(
            Finding(
                "nic.registration",
                nic.name,
                f"max_mr_size is {nic.limits['max_mr_size']}",
                State.INFO,
                "memory is registered in many small pieces",
            )
        )
    return findings


def _check_alike(nics: list[Nic]) -> list[Finding]:
    """Rails are as fast as the slowest, and adapters of one kind should have one firmware."""
    findings = []
    active = [nic for nic in nics if nic.active and nic.device is not None]
    best = max((nic.gbits for nic in active), default=0.0)
    for nic in active:
        if nic.gbits < best and nic.board and any(
            other.board == nic.board and other.gbits == best for other in active
        ):  # fmt: skip
            findings.append(
                Finding(
                    "nic.slow",
                    nic.name,
                    f"{nic.gbits:g} Gbit/s, where others of its kind have {best:g}",
                    State.WARN,
                    "a transfer over several rails ends when the slowest does",
                    "look at its cable, transceiver and the speed that its switch port is set to",
                )
            )
    versions: dict[str, dict[str, list[str]]] = {}
    for nic in nics:
        if nic.board and nic.firmware:
            versions.setdefault(nic.board, {}).setdefault(nic.firmware, []).append(nic.name)
    for board, found in versions.items():
        if len(found) > 1:
            listed = "; ".join(f"{version}: {', '.join(names)}" for version, names in found.items())
            findings.append(
                Finding(
                    "nic.firmware",
                    f"adapters {board}",
                    f"several firmware versions: {listed}",
                    State.WARN,
                    "what works on one rail may not on the next",
                    "bring them to one version (mlxfwmanager, niccli or nicctl, by vendor)",
                )
            )
    return findings


def _check_library(tree: Tree, nics: list[Nic], answer: dict[str, Any]) -> list[Finding]:
    findings = []
    seen = answer.get("devices")
    install = "apt install libibverbs1 ibverbs-providers (dnf install libibverbs)"
    if missing := answer.get("missing"):
        if missing == "it was not asked":
            return [Finding("nic.library", "libibverbs", "not asked: another host", State.INFO)]
        why = "kvxfer and all others use RDMA adapters through it"
        return [Finding("nic.library", "libibverbs", str(missing), State.BAD, why, install)]
    if error := answer.get("error"):
        why = "kvxfer and all others use RDMA adapters through it"
        return [Finding("nic.library", "libibverbs", str(error), State.BAD, why, install)]
    hidden = [nic.name for nic in nics if nic.name not in (seen or {})]
    if hidden:
        findings.append(
            Finding(
                "nic.provider",
                "libibverbs",
                f"it does not see {', '.join(hidden)}",
                State.BAD,
                "the kernel knows these adapters, programs can't use them",
                f"install the provider that belongs to this libibverbs: {install}; one from "
                "another release does not load; in a container --device /dev/infiniband",
            )
        )
    else:
        findings.append(Finding("nic.library", "libibverbs", f"{answer.get('library')} sees all"))
    for path in [f"/dev/infiniband/{n}" for n in tree.names("/dev/infiniband") if "uverbs" in n]:
        if tree.usable(path) is False:
            findings.append(
                Finding(
                    "nic.device_file",
                    path,
                    "no permission",
                    State.BAD,
                    "processes open the adapter through it",
                    "chmod a+rw /dev/infiniband/uverbs*, or a udev rule that does",
                )
            )
    if not any("uverbs" in name for name in tree.names("/dev/infiniband")):
        findings.append(
            Finding(
                "nic.device_file",
                "/dev/infiniband",
                "no uverbs files",
                State.BAD,
                "processes open the adapters through them",
                "modprobe ib_uverbs; in a container --device /dev/infiniband",
            )
        )
    return findings


def _address(gid: str) -> str:
    """Return a GID as people write the IP address that it is."""
    try:
        address = ipaddress.IPv6Address(gid)
    except ValueError:
        return gid
    return str(address.ipv4_mapped or address)


def _plain(value: object) -> str:
    if not isinstance(value, int):
        return str(value)
    return "unlimited" if value >= 1 << 63 else str(value)
