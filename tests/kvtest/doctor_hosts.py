"""Hosts that we don't have, as files of /sys and /proc and answers of libraries."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path
from typing import Any

import pytest

from kvxfer.doctor.examine import Examination
from kvxfer.doctor.findings import Finding

KERNEL = "6.8.0-45-generic"
GIB = 1 << 30
ROOT_BUSES = {0: "pci0000:00", 1: "pci0000:80"}


SCHEMA = json.loads(
    (Path(__file__).parents[2] / "docs" / "schemas" / "doctor.json").read_text(encoding="utf-8")
)


def validate(record: object) -> None:
    """Check what ``--json`` prints against the schema."""
    jsonschema = pytest.importorskip("jsonschema", reason="jsonschema is not installed")
    jsonschema.validate(record, SCHEMA)


def one(examination: Examination, identity: str) -> Finding:
    """Return the only finding with an id."""
    found = [finding for finding in examination.findings if finding.id == identity]
    assert len(found) == 1, f"{identity}: {found}"
    return found[0]


class Host:
    """A tree that is described, changed as a test wants it, and written to a folder."""

    def __init__(self, cores: int = 4, nodes: int = 2, guest: bool = False) -> None:
        self.files: dict[str, str | bytes] = {}
        self.links: dict[str, str] = {}
        self.answers: dict[str, Any] = {
            "verbs": {"library": "libibverbs.so.1", "devices": {}, "dmabuf": True},
            "cuda": {"missing": "libcuda.so.1: cannot open shared object file"},
            "hip": {"missing": "libamdhip64.so.7: cannot open shared object file"},
        }
        flags = "fpu vme avx2" + (" hypervisor" if guest else "")
        self.files["/proc/cpuinfo"] = "".join(
            f"processor\t: {core}\nmodel name\t: Some CPU\nflags\t\t: {flags}\n\n"
            for core in range(cores)
        )
        self.files["/proc/sys/kernel/hostname"] = "node7\n"
        self.files["/proc/sys/kernel/osrelease"] = f"{KERNEL}\n"
        self.files["/proc/self/status"] = "Name:\tkvxfer\nCapEff:\t0000000000000000\n"
        self.kernel_options("CONFIG_PCI_P2PDMA", "CONFIG_DMABUF_MOVE_NOTIFY")
        self.limits()
        self.numa_balancing(0)
        for node in range(nodes):
            self.files[f"/sys/devices/system/node/node{node}/cpulist"] = "0-1\n"

    def kernel_options(self, *options: str) -> None:
        lines = ["CONFIG_64BIT=y", *(f"{option}=y" for option in options), "# CONFIG_X is not set"]
        self.files[f"/boot/config-{KERNEL}"] = "\n".join(lines) + "\n"

    def limits(self, memlock: str = "unlimited", files: str = "1048576") -> None:
        self.files["/proc/self/limits"] = (
            "Limit                     Soft Limit           Hard Limit           Units\n"
            f"Max open files            {files:<20} {files:<20} files\n"
            f"Max locked memory         {memlock:<20} {memlock:<20} bytes\n"
        )

    def numa_balancing(self, value: int) -> None:
        self.files["/proc/sys/kernel/numa_balancing"] = f"{value}\n"

    def device(self, path: str, vendor: int, kind: int, **files: str | bytes) -> str:
        """Add a PCI device at a path below /sys/devices; return its folder."""
        folder, address = f"/sys/devices/{path}", path.rpartition("/")[2]
        node = "1" if path.startswith(ROOT_BUSES[1]) else "0"
        usual: dict[str, str | bytes] = {
            "vendor": f"0x{vendor:04x}\n",
            "class": f"0x{kind:04x}00\n",
            "device": "0x1234\n",
            "numa_node": f"{node}\n",
        }
        for name, content in {**usual, **files}.items():
            self.files[f"{folder}/{name}"] = content
        self.links[f"/sys/bus/pci/devices/{address}"] = folder
        return folder

    def bridge(self, path: str, acs: int | None = 0, readable: bool = True) -> str:
        """Add a port of a switch; `acs` is its control register, None where it has none."""
        config = bytearray(4096)
        struct.pack_into("<I", config, 0, 0x12345678)
        if acs is not None:
            # Behind another capability, as it often is.
            struct.pack_into("<I", config, 0x100, 0x0001 | 1 << 16 | 0x148 << 20)
            struct.pack_into("<I", config, 0x148, 0x000D | 1 << 16)
            struct.pack_into("<HH", config, 0x148 + 4, 0x5F, acs)
        else:
            struct.pack_into("<I", config, 0x100, 0x0001 | 1 << 16)
        content = bytes(config if readable else config[:64])
        return self.device(path, 0x1000, 0x0604, config=content)

    def link(self, folder: str, lanes: int = 16, most: int = 16, speed: float = 32.0) -> None:
        for name, value in (("current", lanes), ("max", most)):
            self.files[f"{folder}/{name}_link_width"] = f"{value}\n"
            of = speed if name == "current" else 32.0
            self.files[f"{folder}/{name}_link_speed"] = f"{of:.1f} GT/s PCIe\n"

    def iommu(self, folder: str, group: int, kind: str) -> None:
        self.links[f"{folder}/iommu_group"] = f"/sys/kernel/iommu_groups/{group}"
        self.files[f"/sys/kernel/iommu_groups/{group}/type"] = f"{kind}\n"

    def gpu(self, path: str, vendor: str, name: str, memory: int, bar: int | None = None) -> str:
        bar = memory if bar is None else bar
        driver = "amdgpu" if vendor == "AMD" else "nvidia"
        resource = f"0x{1 << 40:016x} 0x{(1 << 40) + bar - 1:016x} 0x000000000014220c\n"
        resource += f"0x{0:016x} 0x{0:016x} 0x{0:016x}\n"
        kind, number = (0x1200, 0x1002) if vendor == "AMD" else (0x0302, 0x10DE)
        folder = self.device(path, number, kind, resource=resource)
        self.links[f"{folder}/driver"] = f"/sys/bus/pci/drivers/{driver}"
        self.files[f"/sys/bus/pci/drivers/{driver}/bind"] = ""
        self.link(folder)
        address = path.rpartition("/")[2]
        known: dict[str, Any] = {"name": name, "pci": address}
        if vendor == "AMD":
            self.files[f"{folder}/mem_info_vram_total"] = f"{memory}\n"
            self.files[f"{folder}/mem_info_vis_vram_total"] = f"{bar}\n"
            self.files["/dev/kfd"] = ""
            answer = {"library": "libamdhip64.so.7", "version": 70_000_000, "dmabuf": True}
            question = "hip"
        else:
            known |= {"memory": memory, "arch": "sm_90", "rdma": True, "dmabuf": True}
            self.files["/dev/nvidiactl"] = ""
            answer = {"library": "libcuda.so.1", "version": 12080}
            question = "cuda"
        if "missing" in self.answers[question]:
            self.answers[question] = {**answer, "devices": []}
        self.answers[question]["devices"].append(known)
        return folder

    def nic(
        self,
        path: str,
        name: str,
        *,
        driver: str = "mlx5_core",
        link_layer: str = "InfiniBand",
        interface: str = "",
        mtu: int = 9000,
        firmware: str = "28.39.1002",
        state: str = "4: ACTIVE",
        physical: str = "5: LinkUp",
        rate: str = "400 Gb/sec (4X NDR)",
        gids: tuple[tuple[str, str], ...] = (),
        board: str = "MT_0000000838",
        **limits: int,
    ) -> str:
        folder = self.device(path, 0x15B3, 0x0207)
        self.links[f"{folder}/driver"] = f"/sys/bus/pci/drivers/{driver}"
        self.files[f"/sys/bus/pci/drivers/{driver}/bind"] = ""
        self.link(folder)
        own = f"{folder}/infiniband/{name}"
        self.links[f"/sys/class/infiniband/{name}"] = own
        self.links[f"{own}/device"] = folder
        self.files[f"{own}/fw_ver"] = f"{firmware}\n"
        self.files[f"{own}/board_id"] = f"{board}\n"
        port = f"{own}/ports/1"
        self.port(name, folder, state=state, physical=physical, rate=rate, link_layer=link_layer)
        ip = ("RoCE v2", f"0000:0000:0000:0000:0000:ffff:0a00:{len(self.links):04x}")
        default = (ip,) if link_layer == "Ethernet" else (("IB/RoCE v1", "fe80::1"),)
        for index, (kind, gid) in enumerate(gids or default):
            self.files[f"{port}/gids/{index}"] = f"{gid}\n"
            self.files[f"{port}/gid_attrs/types/{index}"] = f"{kind}\n"
        self.files[f"{port}/gids/9"] = "0000:0000:0000:0000:0000:0000:0000:0000\n"
        if interface:
            self.files[f"{folder}/net/{interface}/mtu"] = f"{mtu}\n"
            self.files[f"{folder}/net/{interface}/operstate"] = "up\n"
            self.files[f"{folder}/net/{interface}/speed"] = "400000\n"
            self.links[f"{folder}/net/{interface}/device"] = folder
            self.links[f"/sys/class/net/{interface}"] = f"{folder}/net/{interface}"
        usual = {"max_mr_size": (1 << 64) - 1, "max_srq": 8192, "max_qp_wr": 32768, "max_sge": 30}
        self.answers["verbs"]["devices"][name] = {**usual, **limits}
        self.files[f"/dev/infiniband/uverbs{len(self.answers['verbs']['devices']) - 1}"] = ""
        return folder

    def port(self, name: str, folder: str, **values: str) -> None:
        """Change what the first port of an adapter says."""
        names = {"physical": "phys_state"}
        for key, value in values.items():
            path = f"{folder}/infiniband/{name}/ports/1/{names.get(key, key)}"
            self.files[path] = f"{value}\n"

    def write(self, root: Path) -> Path:
        """Write it all below a folder, with relative links as /sys has them."""
        for path, content in self.files.items():
            target = root / path.lstrip("/")
            target.parent.mkdir(parents=True, exist_ok=True)
            if isinstance(content, bytes):
                target.write_bytes(content)
            else:
                target.write_text(content)
        for path, to in self.links.items():
            target = root / path.lstrip("/")
            target.parent.mkdir(parents=True, exist_ok=True)
            there = root / to.lstrip("/")
            there.mkdir(parents=True, exist_ok=True)
            target.symlink_to(os.path.relpath(there, target.parent))
        (root / "answers.json").write_text(json.dumps(self.answers))
        return root


def switched(node: int, number: int) -> tuple[str, str, str]:
    """Return paths of a switch's upstream port and of its two downstream ports."""
    root = ROOT_BUSES[node]
    bus = int(root[-2:], 16) + 1 + 4 * number
    prefix = root[3:7]
    up = f"{root}/{prefix}:{root[-2:]}:{1 + number:02x}.0/{prefix}:{bus:02x}:00.0"
    return up, f"{up}/{prefix}:{bus + 1:02x}:00.0", f"{up}/{prefix}:{bus + 1:02x}:01.0"


def _pairs(host: Host, count: int, acs: int) -> list[tuple[str, str]]:
    """Add switches with a GPU and an adapter each; return the paths for these."""
    pairs = []
    for index in range(count):
        node, number = divmod(index, count // 2)
        up, first, second = switched(node, number)
        root_port = up.rpartition("/")[0]
        host.bridge(root_port, acs=None)
        for path in (up, first, second):
            host.bridge(path, acs=acs)
        bus = int(up.rpartition("/")[2][5:7], 16)
        prefix = up.rpartition("/")[2][:5]
        pairs.append(
            (f"{first}/{prefix}{bus + 2:02x}:00.0", f"{second}/{prefix}{bus + 3:02x}:00.0")
        )
    return pairs


def mi300x(count: int = 4, acs: int = 0, **changes: Any) -> tuple[Host, list[str], list[str]]:
    """MI300X with a RoCE adapter each; returns the folders of GPUs and adapters too."""
    host = Host(cores=192)
    gpus, nics = [], []
    for index, (gpu, nic) in enumerate(_pairs(host, count, acs)):
        gpus.append(host.gpu(gpu, "AMD", "AMD Instinct MI300X", 192 * GIB))
        usual: dict[str, Any] = {
            "driver": "bnxt_re",
            "link_layer": "Ethernet",
            "interface": f"eth{index}",
            "firmware": "231.2.63.0",
            "board": "BCM957608",
            "rate": "400 Gb/sec (4X NDR)",
        }
        nics.append(host.nic(nic, f"bnxt_re{index}", **{**usual, **changes}))
    return host, gpus, nics


def h100(count: int = 4, acs: int = 0, **changes: Any) -> tuple[Host, list[str], list[str]]:
    """H100 with a ConnectX-7 on InfiniBand each."""
    host = Host(cores=112)
    gpus, nics = [], []
    for index, (gpu, nic) in enumerate(_pairs(host, count, acs)):
        gpus.append(host.gpu(gpu, "NVIDIA", "NVIDIA H100 80GB HBM3", 80 * GIB, 128 * GIB))
        nics.append(host.nic(nic, f"mlx5_{index}", **changes))
    host.files["/sys/module/nvidia_peermem/refcnt"] = "1\n"
    return host, gpus, nics
