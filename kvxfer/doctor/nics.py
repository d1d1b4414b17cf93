"""RDMA adapters: their ports, limits and connections."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from kvxfer.doctor.pci import Device, Width, device_at, width
from kvxfer.doctor.tree import Tree

CLASS = "/sys/class/infiniband"
_GIDS = 16  # entries of the table that are looked at
_GBIT = re.compile(r"([0-9.]+) Gb/sec")


@dataclass(frozen=True)
class Port:
    """A port of an adapter."""

    number: int
    state: str
    """``ACTIVE``, ``DOWN``, ``INIT``, ..."""
    physical: str
    gbits: float
    rate: str
    link_layer: str
    gids: tuple[tuple[str, str], ...]
    """Type and value of those that are set."""

    @property
    def active(self) -> bool:
        return self.state == "ACTIVE"

    @property
    def best_gid(self) -> tuple[str, str] | None:
        """RoCE v2 before v1, and routable before link-local."""

        def rank(gid: tuple[str, str]) -> tuple[bool, bool]:
            return (gid[0] != "RoCE v2", gid[1].startswith("fe80:"))

        return min(self.gids, key=rank, default=None)


@dataclass(frozen=True)
class Nic:
    """An RDMA adapter."""

    name: str
    device: Device | None
    """None for soft-RoCE and the like."""
    driver: str
    firmware: str
    board: str
    ports: tuple[Port, ...]
    width: Width | None
    mtu: int
    """Of the Ethernet interface; 0 where there is none."""
    interface: str
    limits: dict[str, Any]
    """What libibverbs says, empty where it was not asked or does not know the adapter."""

    @property
    def active(self) -> bool:
        return any(port.active for port in self.ports)

    @property
    def gbits(self) -> float:
        return max((port.gbits for port in self.ports if port.active), default=0.0)


def find_nics(tree: Tree, answers: dict[str, dict[str, Any]]) -> list[Nic]:
    """Return the adapters that the kernel knows."""
    limits = answers["verbs"].get("devices", {})
    nics = []
    for name in tree.names(CLASS):
        folder = f"{CLASS}/{name}"
        device = device_at(tree, f"{folder}/device")
        interfaces = tree.names(f"{folder}/device/net")
        interface = interfaces[0] if interfaces else tree.text(f"{folder}/parent") or ""
        numbers = [int(number) for number in tree.names(f"{folder}/ports") if number.isdigit()]
        driver = tree.real(f"{folder}/device/driver") or ""
        nics.append(
            Nic(
                name,
                device,
                driver.rpartition("/")[2] or ("soft-RoCE" if device is None else ""),
                tree.text(f"{folder}/fw_ver") or "",
                tree.text(f"{folder}/board_id") or "",
                tuple(_port(tree, f"{folder}/ports/{number}", number) for number in numbers),
                None if device is None else width(tree, device.address),
                (tree.number(f"/sys/class/net/{interface}/mtu") or 0) if interface else 0,
                interface,
                dict(limits.get(name, {})),
            )
        )
    return nics


def _port(tree: Tree, folder: str, number: int) -> Port:
    rate = tree.text(f"{folder}/rate") or ""
    gbits = _GBIT.match(rate)
    gids = []
    for index in range(_GIDS):
        gid = tree.text(f"{folder}/gids/{index}") or ""
        if gid.strip("0:"):
            kind = tree.text(f"{folder}/gid_attrs/types/{index}") or ""
            gids.append((kind, gid))
    return Port(
        number,
        _word(tree.text(f"{folder}/state")),
        _word(tree.text(f"{folder}/phys_state")),
        float(gbits[1]) if gbits else 0.0,
        rate,
        tree.text(f"{folder}/link_layer") or "",
        tuple(gids),
    )


def _word(text: str | None) -> str:
    """``4: ACTIVE`` is ``ACTIVE``."""
    return (text or "unknown").rpartition(":")[2].strip()
