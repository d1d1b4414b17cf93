"""GPUs: which there are, and whether their drivers and memory can be reached."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvxfer.doctor.findings import Finding, State
from kvxfer.doctor.pci import DEVICES, Device, device_at, width
from kvxfer.doctor.tree import Tree

_NVIDIA, _AMD = 0x10DE, 0x1002
_VENDORS = {_NVIDIA: "NVIDIA", _AMD: "AMD"}
_CLASSES = (0x0300, 0x0302, 0x0380, 0x1200)  # display, 3D, other display, accelerator
_SMALL_BAR = 1 << 30
_MIB = 1 << 20


@dataclass(frozen=True)
class Gpu:
    """A GPU that the PCI bus shows, whether it has a driver or not."""

    name: str
    vendor: str
    device: Device
    driver: str
    bar: int
    """Largest window through which others reach its memory, in bytes."""
    memory: int
    """In bytes; 0 where only the vendor's library knows."""

    @property
    def address(self) -> str:
        return self.device.address


def find_gpus(tree: Tree, answers: dict[str, dict[str, Any]]) -> list[Gpu]:
    """Return the GPUs of the PCI bus, in its order."""
    told = {
        str(one["pci"]): one
        for answer in (answers["cuda"], answers["hip"])
        for one in answer.get("devices", ())
    }
    found = []
    for address in tree.names(DEVICES):
        folder = f"{DEVICES}/{address}"
        vendor = tree.number(f"{folder}/vendor")
        if vendor not in _VENDORS:
            continue
        if (tree.number(f"{folder}/class") or 0) >> 8 not in _CLASSES:
            continue
        device = device_at(tree, folder)
        if device is None:
            continue
        driver = (tree.real(f"{folder}/driver") or "").rpartition("/")[2]
        known = told.get(address, {})
        memory = tree.number(f"{folder}/mem_info_vram_total") or int(known.get("memory", 0))
        visible = tree.number(f"{folder}/mem_info_vis_vram_total")
        name = known.get("name") or _name(tree, address, vendor)
        bar = visible if visible is not None else _largest_bar(tree, folder)
        found.append(Gpu(str(name), _VENDORS[vendor], device, driver, bar, memory))
    return found


def _name(tree: Tree, address: str, vendor: int) -> str:
    lines = tree.lines(f"/proc/driver/nvidia/gpus/{address}/information", "^Model:") or [":"]
    named = lines[0].partition(":")[2].strip()
    named = named or tree.text(f"{DEVICES}/{address}/product_name") or ""
    number = tree.text(f"{DEVICES}/{address}/device") or ""
    return named or f"{_VENDORS[vendor]} GPU {number}".strip()


def _largest_bar(tree: Tree, folder: str) -> int:
    sizes = [0]
    for line in (tree.text(f"{folder}/resource") or "").splitlines():
        words = line.split()
        if len(words) == 3 and words[1] != "0x0000000000000000":
            sizes.append(int(words[1], 16) - int(words[0], 16) + 1)
    return max(sizes)


def check_gpus(tree: Tree, gpus: list[Gpu], answers: dict[str, dict[str, Any]]) -> list[Finding]:
    """Return what there is to say of each GPU and its vendor's library."""
    if not gpus:
        return [
            Finding(
                "gpu.none",
                "GPUs",
                "none on the PCI bus: caches in CPU memory only",
                State.INFO,
            )
        ]
    findings = [_check(tree, gpu) for gpu in gpus]
    for gpu in gpus:
        found = width(tree, gpu.address)
        # Its speed goes down while it has nothing to do; its lanes don't.
        if found is not None and found.lanes < found.max_lanes:
            findings.append(
                Finding(
                    "gpu.pcie",
                    f"{gpu.name} {gpu.address}",
                    f"{found}, of x{found.max_lanes}",
                    State.WARN,
                    "copies to and from it take the longer by as much as lanes are missing",
                    "reseat it, look at the slot's width and at riser cards, and at dmesg for "
                    "PCIe errors",
                )
            )
    findings += _check_library(gpus, "NVIDIA", answers["cuda"], "libcuda.so.1 (NVIDIA's driver)")
    findings += _check_library(gpus, "AMD", answers["hip"], "libamdhip64 (ROCm)")
    findings += _check_devices(tree, gpus)
    return findings


def _check(tree: Tree, gpu: Gpu) -> Finding:
    what = f"{gpu.name} {gpu.address}"
    node = f", NUMA node {gpu.device.numa_node}" if gpu.device.numa_node >= 0 else ""
    if not gpu.driver:
        module = "amdgpu" if gpu.vendor == "AMD" else "nvidia"
        return Finding(
            "gpu.no_driver",
            what,
            f"no driver{node}",
            State.BAD,
            "nothing can use it",
            f"install {gpu.vendor}'s driver and load it: modprobe {module}",
        )
    small = gpu.bar < _SMALL_BAR or (gpu.vendor == "AMD" and gpu.bar < gpu.memory)
    if gpu.driver in ("vfio-pci", "pci-stub"):
        small = False  # it belongs to a guest
    if gpu.bar and small:
        return Finding(
            "gpu.small_bar",
            what,
            f"driver {gpu.driver}{node}; {gpu.bar // _MIB} MiB of its memory can be reached"
            + (f", of {gpu.memory // _MIB} MiB" if gpu.memory else ""),
            State.WARN,
            "NICs reach no more of its memory than that window, so registering caches fails or "
            "goes through CPU memory",
            "turn on 'Above 4G Decoding' and 'Resizable BAR' in the firmware's set-up",
        )
    reach = f", window of {gpu.bar >> 30} GiB" if gpu.bar else ""
    return Finding("gpu.found", what, f"driver {gpu.driver}{node}{reach}")


def _check_library(
    gpus: list[Gpu], vendor: str, answer: dict[str, Any], library: str
) -> list[Finding]:
    count = sum(gpu.vendor == vendor and bool(gpu.driver) for gpu in gpus)
    if not count:
        return []
    what = f"{vendor}'s library"
    why = f"without it no program, kvxfer among them, reaches the {count} {vendor} GPUs"
    fix = (
        "install the driver's user-space part (nvidia-smi must work); in a container start it "
        "with --gpus all"
        if vendor == "NVIDIA"
        else "install ROCm's HIP runtime (rocminfo must work); in a container pass --device "
        "/dev/kfd --device /dev/dri"
    )
    if missing := answer.get("missing"):
        if missing == "it was not asked":
            return [Finding("gpu.library", what, "not asked: this is another host", State.INFO)]
        return [Finding("gpu.library", what, f"{library}: {missing}", State.WARN, why, fix)]
    if error := answer.get("error"):
        return [Finding("gpu.library", what, f"{library}: {error}", State.BAD, why, fix)]
    seen = len(answer.get("devices", ()))
    found = f"{answer['library']}, version {answer.get('version')}, {seen} GPUs"
    if seen >= count:
        return [Finding("gpu.library", what, found)]
    return [
        Finding(
            "gpu.hidden",
            what,
            f"{found}; the PCI bus shows {count}",
            State.INFO,
            fix="CUDA_VISIBLE_DEVICES, HIP_VISIBLE_DEVICES or the container leave some out",
        )
    ]


def _check_devices(tree: Tree, gpus: list[Gpu]) -> list[Finding]:
    wanted = {
        "AMD": ("/dev/kfd", "usermod -aG render,video $USER and log in again; in a container "
                "--device /dev/kfd --device /dev/dri"),
        "NVIDIA": ("/dev/nvidiactl", "nvidia-modprobe; in a container --gpus all"),
    }  # fmt: skip
    findings = []
    for vendor, (path, fix) in wanted.items():
        if not any(gpu.vendor == vendor and gpu.driver in ("amdgpu", "nvidia") for gpu in gpus):
            continue
        usable = tree.usable(path)
        if usable:
            findings.append(Finding("gpu.device_file", path, "readable and writable"))
        else:
            found = "not there" if usable is None else "no permission"
            why = "processes open the GPU through it"
            findings.append(Finding("gpu.device_file", path, found, State.BAD, why, fix))
    return findings
