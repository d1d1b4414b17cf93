"""What is done to GPUs: each kind of fault, and what fetches may come to because of it."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Collection

from kvtest import fake_gpu, fake_verbs

PATIENCE = 6.0  # `gpu_timeout`: above what a process is stopped for, whose GPU then stops, too


@dataclasses.dataclass(frozen=True)
class GpuFault:
    """A kind of fault. Where it has `calls`, by vendor, some of them fail.

    `ends`: with what fetches may end because of it. Without any they have to go on, perhaps in
    another way.
    """

    calls: dict[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    ends: tuple[str, ...] = ("NO_RESOURCES",)
    only: tuple[str, ...] = ()  # over these transports
    often: float = 1.0
    renews: bool = False  # until the process, or its agents, begin anew, nothing works


_EVENTS = {
    "cuda": ("cuEventCreate", "cuEventRecord", "cuEventQuery"),
    "hip": ("hipEventCreateWithFlags", "hipEventRecord", "hipEventQuery"),
}
_SHARING = {
    "cuda": (
        *("cuIpcGetMemHandle", "cuIpcOpenMemHandle", "cuDeviceGetUuid"),
        *("cuDeviceCanAccessPeer", "cuMemGetAddressRange"),
    ),
    "hip": (
        *("hipIpcGetMemHandle", "hipIpcOpenMemHandle", "hipDeviceGetUuid"),
        *("hipDeviceCanAccessPeer", "hipMemGetAddressRange"),
    ),
}
KINDS: dict[str, GpuFault] = {
    "launches fail": GpuFault({"cuda": ("cuLaunchKernel",), "hip": ("hipModuleLaunchKernel",)}),
    "copies fail": GpuFault({"cuda": ("cuMemcpyAsync",), "hip": ("hipMemcpyAsync",)}),
    "zeroing fails": GpuFault(
        {
            "cuda": ("cuMemsetD8Async", "cuMemsetD2D8Async"),
            "hip": ("hipMemsetAsync", "hipMemset2DAsync"),
        },
        often=0.5,
    ),
    "events fail": GpuFault(_EVENTS),
    "no memory": GpuFault(
        {"cuda": ("cuMemAlloc", "cuMemHostAlloc"), "hip": ("hipMalloc", "hipHostMalloc")}
    ),
    "memory is not known": GpuFault(
        {"cuda": ("cuPointerGetAttributes",), "hip": ("hipPointerGetAttribute",)}, often=0.5
    ),
    "sharing fails": GpuFault(_SHARING, ends=(), only=("shm",), often=3.0),
    "other memory is opened": GpuFault(ends=(), only=("shm",)),
    "shared memory goes bad": GpuFault(ends=("CORRUPT",), only=("shm",), often=2.0),
    "no dma-bufs": GpuFault(
        {
            "cuda": ("cuMemGetHandleForAddressRange",),
            "hip": ("hsa_amd_portable_export_dmabuf",),
        },
        ends=(),
        only=("verbs",),
    ),
    "flushes fail": GpuFault({"cuda": ("cuFlushGPUDirectRDMAWrites",), "hip": ()}, only=("verbs",)),
    "writes to GPUs are lost": GpuFault(ends=("CORRUPT",), only=("verbs",)),
    "slow": GpuFault(ends=(), often=2.0),
    "a call hangs for a while": GpuFault(
        {
            "cuda": ("cuMemcpyAsync", "cuLaunchKernel", *_EVENTS["cuda"], *_SHARING["cuda"]),
            "hip": ("hipMemcpyAsync", "hipModuleLaunchKernel", *_EVENTS["hip"], *_SHARING["hip"]),
        },
        ends=(),
    ),
    "hangs": GpuFault(often=0.3, renews=True),
    "lost": GpuFault(often=0.3, renews=True),
}
# Of a device that was given up, or did not get somewhere in time.
_HUNG = re.compile(r"has not finished a chunk within|was given up|did not get there in time")
_FAILED = re.compile(r"\b((?:cu[A-Z]|hip[A-Z]|hsa_)\w+) failed")
# Other faults that leave processes without what drivers need, and that damage bytes.
_SHORTAGES = ("no more descriptors", "no more memory", "no more disk", "no more threads")
_DAMAGES = ("memory gone bad", "corrupt", "truncate", "duplicate", "repeat", "swap", "late")


def fits(name: str, vendor: str, transport: str) -> bool:
    """Whether a kind of fault can be had there."""
    kind = KINDS[name]
    calls = not kind.calls or kind.calls[vendor]
    return bool(calls) and (not kind.only or transport in kind.only)


def begin(name: str, call: str, nth: int, times: int) -> None:
    """Let it happen to the GPUs of this process. `call` is one of the kind's, for some."""
    gpus = fake_gpu.gpus()
    if name == "other memory is opened":
        gpus.open_wrongly(True)
    elif name == "shared memory goes bad":
        gpus.damage_shared(20 * times)
    elif name == "writes to GPUs are lost":
        fake_verbs.lose_gpu_writes(True)
    elif name in ("slow", "hangs"):
        gpus.hold(True)
    elif name == "a call hangs for a while":
        gpus.stall(call)
    elif name == "lost":
        gpus.lose()
    else:
        gpus.fail_often(call, nth, times)


def end() -> None:
    """Let nothing of it happen any more."""
    fake_gpu.gpus().forget_faults()
    if "KVXFER_VERBS_LIBRARY" in os.environ:
        fake_verbs.lose_gpu_writes(False)


def unexplained(status: str, message: str, happened: Collection[str], vendor: str) -> str | None:
    """Say what in the end of a fetch nothing that has happened so far explains.

    `happened`: the names of all faults of the round. A fetch that is OK says why its path is not
    another, as `message`.
    """
    gpu = [KINDS[name[5:]] for name in happened if name.startswith("GPU: ")]
    broken = any(kind.renews for kind in gpu)
    short = any(name in happened for name in _SHORTAGES)
    allowed = {
        call
        for kind in gpu
        if status == "OK" or status in kind.ends
        for call in kind.calls.get(vendor, ())
    }
    named = set(_FAILED.findall(message)) - allowed
    if named and not broken and not short:
        return f"nobody let {', '.join(sorted(named))} fail"
    hung = _HUNG.search(message)
    if hung and not broken:
        return f"no GPU hangs: {hung[0]}"
    if status == "NO_RESOURCES" and not (broken or short or _FAILED.search(message) or hung):
        return "nothing was missing"
    damaged = any(word in name for name in happened for word in _DAMAGES) or any(
        "CORRUPT" in kind.ends for kind in gpu
    )
    if status == "CORRUPT" and not damaged:
        return "nothing was damaged"
    return None
