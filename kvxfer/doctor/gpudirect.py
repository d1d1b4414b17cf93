"""Whether adapters can reach GPU memory directly, and what stands in the way."""

from __future__ import annotations

from typing import Any

from kvxfer.doctor.affinity import Affinity
from kvxfer.doctor.findings import Finding, State
from kvxfer.doctor.gpus import Gpu
from kvxfer.doctor.pci import DEVICES, redirecting
from kvxfer.doctor.tree import Tree

_OPTIONS = ("CONFIG_PCI_P2PDMA", "CONFIG_DMABUF_MOVE_NOTIFY")
_PEER_CLIENTS = (
    "/sys/kernel/mm/memory_peers/amdkfd/version",
    "/sys/kernel/memory_peers/amdkfd/version",
    "/sys/memory_peers/amdkfd/version",
)
_MOST_NAMED = 3
_BOUNCE = "GPU memory goes through CPU memory, at a fraction of the speed"


def check_gpudirect(
    tree: Tree, gpus: list[Gpu], affinity: Affinity | None, answers: dict[str, dict[str, Any]]
) -> list[Finding]:
    """Return what stands in the way of GPUDirect RDMA."""
    if affinity is None:
        return [
            Finding(
                "gpudirect.none",
                "GPUDirect RDMA",
                "does not apply: it takes a GPU and an RDMA adapter",
                State.INFO,
            )
        ]
    return [
        *_check_ways(tree, gpus, answers),
        *_check_acs(tree, affinity),
        *_check_iommu(tree, affinity),
        *_check_guest(tree),
    ]


def kernel_options(tree: Tree) -> dict[str, bool] | None:
    """Return which of the options that dmabuf needs the kernel was built with; None: not known."""
    release = tree.text("/proc/sys/kernel/osrelease") or ""
    pattern = f"^({'|'.join(_OPTIONS)})="
    for path in (f"/boot/config-{release}", f"/lib/modules/{release}/config", "/proc/config.gz"):
        lines = tree.lines(path, pattern)
        if lines is not None:
            return {option: f"{option}=y" in lines for option in _OPTIONS}
    return None


def _check_ways(tree: Tree, gpus: list[Gpu], answers: dict[str, dict[str, Any]]) -> list[Finding]:
    """There are two ways, and one of them is enough."""
    findings = []
    dmabuf, against = _dmabuf(tree, gpus, answers)
    peer = _peer_memory(tree, gpus)
    if dmabuf:
        findings.append(Finding("gpudirect.dmabuf", "dmabuf", "kernel, driver and library have it"))
    else:
        findings.append(
            Finding(
                "gpudirect.dmabuf",
                "dmabuf",
                f"not usable: {'; '.join(against)}",
                State.INFO if peer else State.WARN,
                "" if peer else _BOUNCE,
                "a kernel with CONFIG_PCI_P2PDMA=y and CONFIG_DMABUF_MOVE_NOTIFY=y (5.12 or newer; "
                "Ubuntu 22.04's HWE and RHEL 9 have both), NVIDIA's open kernel modules, rdma-core "
                "34 or newer",
            )
        )
    if peer:
        findings.append(Finding("gpudirect.peermem", "peer memory", peer))
    else:
        nvidia = any(gpu.vendor == "NVIDIA" for gpu in gpus)
        findings.append(
            Finding(
                "gpudirect.peermem",
                "peer memory",
                "no client is loaded",
                State.INFO if dmabuf else State.WARN,
                "" if dmabuf else _BOUNCE,
                "modprobe nvidia-peermem"
                if nvidia
                else "the adapter vendor's driver package (MLNX_OFED and the like), which amdgpu "
                "registers with; or dmabuf",
            )
        )
    return findings


def _dmabuf(
    tree: Tree, gpus: list[Gpu], answers: dict[str, dict[str, Any]]
) -> tuple[bool, list[str]]:
    against = []
    options = kernel_options(tree)
    if options is None:
        against.append("the kernel's configuration is not readable (/boot/config-*)")
    else:
        against += [f"the kernel lacks {option}" for option, there in options.items() if not there]
    if answers["verbs"].get("dmabuf") is False:
        against.append("libibverbs has no ibv_reg_dmabuf_mr")
    cuda = answers["cuda"].get("devices", [])
    if cuda and not all(one.get("dmabuf") for one in cuda):
        against.append("NVIDIA's driver does not export dmabufs")
    elif any(gpu.vendor == "NVIDIA" for gpu in gpus) and not cuda:
        version = tree.text("/proc/driver/nvidia/version") or ""
        if version and "Open Kernel Module" not in version:
            against.append("NVIDIA's kernel modules are not the open ones")
    if answers["hip"].get("devices") and answers["hip"].get("dmabuf") is False:
        against.append("ROCm's runtime has no hsa_amd_portable_export_dmabuf")
    return not against, against


def _peer_memory(tree: Tree, gpus: list[Gpu]) -> str:
    """Return what the other way works with, or ''."""
    vendors = {gpu.vendor for gpu in gpus}
    if "NVIDIA" in vendors and tree.names("/sys/module/nvidia_peermem"):
        return "nvidia-peermem is loaded"
    if "AMD" in vendors:
        for path in _PEER_CLIENTS:
            if version := tree.text(path):
                return f"amdkfd is registered with the adapters' driver, version {version}"
    return ""


def _check_acs(tree: Tree, affinity: Affinity) -> list[Finding]:
    found: dict[str, None] = {}
    hidden = False
    for gpu, row in zip(affinity.gpus, affinity.levels, strict=True):
        for nic, at in zip(affinity.nics, row, strict=True):
            assert nic.device is not None
            if at not in ("PIX", "PXB"):
                continue  # what goes through the CPU goes there with and without ACS
            bridges = redirecting(tree, gpu.device, nic.device)
            if bridges is None:
                hidden = True
            else:
                found.update(dict.fromkeys(bridges))
    if found:
        named = list(found)
        some = ", ".join(named[:_MOST_NAMED])
        more = f" and {len(named) - _MOST_NAMED} more" if len(named) > _MOST_NAMED else ""
        return [
            Finding(
                "gpudirect.acs",
                "ACS",
                f"on at bridges between GPUs and adapters: {some}{more}",
                State.WARN,
                "what a GPU and an adapter under one switch send each other goes up to the CPU "
                "and back, at half the speed or less",
                "; ".join(f"setpci -s {bridge} ECAP_ACS+6.w=0" for bridge in named[:_MOST_NAMED])
                + (f"; the same for {', '.join(named[_MOST_NAMED:])}" if more else "")
                + "; or turn ACS off in the firmware's set-up",
            )
        ]
    if hidden:
        return [
            Finding(
                "gpudirect.acs",
                "ACS",
                "not known: the bridges' registers are for root to read",
                State.INFO,
                fix="sudo kvxfer doctor",
            )
        ]
    return [Finding("gpudirect.acs", "ACS", "off at all bridges between GPUs and adapters")]


def _check_iommu(tree: Tree, affinity: Affinity) -> list[Finding]:
    devices = {gpu.address: gpu.device for gpu in affinity.gpus}
    devices |= {nic.name: nic.device for nic in affinity.nics if nic.device is not None}
    translated = []
    known = False
    for name, device in devices.items():
        group = tree.real(f"{DEVICES}/{device.address}/iommu_group")
        kind = tree.text(f"{group}/type") if group else None
        known = known or kind is not None
        if kind is not None and kind.startswith("DMA"):
            translated.append(name)
    if translated:
        some = ", ".join(translated[:_MOST_NAMED])
        more = len(translated) - _MOST_NAMED
        return [
            Finding(
                "gpudirect.iommu",
                "IOMMU",
                f"translates for {some}{f' and {more} more' if more > 0 else ''}",
                State.WARN,
                "each access to another device's memory is translated at the CPU: slow, and on "
                "some hosts it fails or reads wrong data",
                "boot with iommu=pt (and on Intel intel_iommu=on), or with the IOMMU off: "
                "GRUB_CMDLINE_LINUX in /etc/default/grub, then update-grub and reboot",
            )
        ]
    found = "passes through" if known or tree.names("/sys/class/iommu") else "off"
    return [Finding("gpudirect.iommu", "IOMMU", found)]


def _check_guest(tree: Tree) -> list[Finding]:
    flags = tree.lines("/proc/cpuinfo", r"^flags\s.*\bhypervisor\b")
    if not flags:
        return []
    return [
        Finding(
            "gpudirect.guest",
            "virtual machine",
            "GPUs and adapters are passed through to a guest",
            State.INFO,
            "the guest's IOMMU may not translate what they send each other under one switch: "
            "that has given wrong data without an error",
            "kvxfer verifies each chunk; check with kvxfer doctor --peer before trusting it",
        )
    ]
