"""PCI devices: where they are, how they are connected, and what their bridges do to transfers."""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass

from kvxfer.doctor.tree import Tree

DEVICES = "/sys/bus/pci/devices"
_ADDRESS = re.compile(r"[0-9a-f]{4,}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
_ACS = 0x0D
# What an ACS-capable bridge may do to a request from one device to another: send it up.
_REDIRECTS = 0x04 | 0x08 | 0x10

LEVELS = ("PIX", "PXB", "PHB", "NODE", "SYS")
LEVEL_MEANING = {
    "PIX": "under one PCIe switch",
    "PXB": "under one tree of PCIe switches",
    "PHB": "under one host bridge, through the CPU",
    "NODE": "on one NUMA node, through the CPU",
    "SYS": "through the link between CPUs",
}


@dataclass(frozen=True)
class Device:
    """A PCI device."""

    address: str
    path: tuple[str, ...]
    """From the root (``pci0000:00``) over the bridges to the device itself."""
    numa_node: int

    @property
    def bridges(self) -> tuple[str, ...]:
        return self.path[1:-1]


def device_at(tree: Tree, link: str) -> Device | None:
    """Return the PCI device that a path of /sys leads to, or lies in."""
    real = tree.real(link)
    if real is None:
        return None
    parts = real.split("/")
    roots = [index for index, part in enumerate(parts) if part.startswith("pci")]
    addresses = [part for part in parts if _ADDRESS.fullmatch(part)]
    if not addresses:
        return None
    root = parts[roots[0]] if roots else "pci"
    node = tree.number(f"{DEVICES}/{addresses[-1]}/numa_node")
    return Device(addresses[-1], (root, *addresses), -1 if node is None else node)


def level(one: Device, other: Device) -> str:
    """Return how far apart two devices are, in the words of ``nvidia-smi topo``."""
    common = 0
    for ours, theirs in zip(one.path[:-1], other.path[:-1], strict=False):
        if ours != theirs:
            break
        common += 1
    if common > 1:  # a bridge, and not the root alone
        # Between a switch and its devices lies one bridge for each, its port.
        hops = max(len(one.bridges), len(other.bridges)) - (common - 1)
        return "PIX" if hops <= 1 else "PXB"
    if common == 1:
        return "PHB"
    return "NODE" if one.numa_node == other.numa_node >= 0 else "SYS"


def redirecting(tree: Tree, one: Device, other: Device) -> list[str] | None:
    """Return the bridges between two devices that send what passes from one to the other up.

    None where that can't be known: their registers are for root to read.
    """
    found: list[str] = []
    for bridge in dict.fromkeys(one.bridges + other.bridges):
        if bridge in one.bridges and bridge in other.bridges and bridge != _last_common(one, other):
            continue  # above the switch that they share
        registers = tree.data(f"{DEVICES}/{bridge}/config")
        control = _acs_control(registers)
        if control is None:
            return None
        if control & _REDIRECTS:
            found.append(bridge)
    return found


def _last_common(one: Device, other: Device) -> str:
    return [bridge for bridge in one.bridges if bridge in other.bridges][-1]


def _acs_control(registers: bytes) -> int | None:
    """Return the ACS control register, 0 where there is none; None if it can't be read."""
    if len(registers) <= 64:
        return None
    registers = registers.ljust(4096, b"\0")
    offset = 0x100
    for _ in range(64):  # a list that leads nowhere or in circles ends too
        (header,) = struct.unpack_from("<I", registers, offset)
        if header & 0xFFFF == _ACS:
            return int(struct.unpack_from("<H", registers, offset + 6)[0])
        offset = header >> 20
        if offset < 0x100 or offset > 4088:
            break
    return 0


@dataclass(frozen=True)
class Width:
    """A PCIe connection as it is, and as the device could have it."""

    speed: float
    """GT/s, a lane."""
    lanes: int
    max_speed: float
    max_lanes: int

    @property
    def bytes_per_second(self) -> float:
        """What it carries, but for the headers of packets."""
        coding = 8 / 10 if self.speed < 8 else 128 / 130
        return self.speed * 1e9 * coding * self.lanes / 8

    def __str__(self) -> str:
        return f"PCIe {self.speed:g} GT/s x{self.lanes}"


def width(tree: Tree, address: str) -> Width | None:
    """Return a device's connection; None where it has none, as in many virtual machines."""
    folder = f"{DEVICES}/{address}"
    found: list[float] = []
    for name in ("current_link_speed", "current_link_width", "max_link_speed", "max_link_width"):
        words = (tree.text(f"{folder}/{name}") or "").split()
        try:
            found.append(float(words[0]))
        except (IndexError, ValueError):
            return None
    if not found[0] or not 0 < found[1] < 64:
        return None
    return Width(found[0], int(found[1]), found[2], int(found[3]))
