"""Caches on GPUs that are none: tests/gpu/fake_*.cc, where streams really run late."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvxfer
from kvtest.agents import until
from kvtest.caches import Geometry, Paged
from kvxfer import _core

_WAVE = 64
DEVICES = 2
HOST = -1  # no device


def _path() -> Path | None:
    root = Path(__file__).resolve().parents[2]
    name = f"libkvxfer_fake_gpu_{_WAVE}.so"
    found = Path(os.environ.get("KVXFER_FAKE_GPU", root / "build" / "release" / name))
    return found if found.exists() else None


def missing() -> str | None:
    """Return why there are no fake GPUs, if so."""
    if kvxfer._core.build_info()["sanitize"]:
        return "ASan does not follow fibers between libraries; the C++ tests of GPUs run"
    if _path() is None:
        return "libkvxfer_fake_gpu_64.so is not built (make build-tests): set KVXFER_FAKE_GPU"
    return None


def environment(folder: Path, vendor: str = "cuda") -> dict[str, str]:
    """Return what tells a process where fake GPUs are: those of "cuda", or of "hip"."""
    code = folder / "code"
    code.write_bytes(b"fake code\0")
    library = str(_path())
    return {
        "KVXFER_GPU_CODE": str(code),
        "KVXFER_CUDA_LIBRARY": library if vendor == "cuda" else "libnone.so",
        "KVXFER_HIP_LIBRARY": library if vendor == "hip" else "libnone.so",
        "KVXFER_HSA_LIBRARY": library,
    }


@contextlib.contextmanager
def runtimes(folder: Path, patch: pytest.MonkeyPatch) -> Iterator[Gpus]:
    """Let kvxfer find the fake GPUs; skip where they are not built. Nothing may be left on them."""
    if _path() is None:
        pytest.skip("libkvxfer_fake_gpu_64.so is not built (make build-tests): set KVXFER_FAKE_GPU")
    for name, value in environment(folder).items():
        patch.setenv(name, value)
    gpus().given_up = 0  # those of other modules are there before
    yield gpus()


@contextlib.contextmanager
def without_leaks(folder: Path) -> Iterator[Gpus]:
    """As `runtimes`, for a module of tests; skip where sanitizers can't follow."""
    if _core.build_info()["sanitize"]:
        pytest.skip("ASan does not follow fibers between libraries; the C++ tests of GPUs run")
    with pytest.MonkeyPatch.context() as patch, runtimes(folder, patch) as found:
        before = found.open_handles() - found.given_up
        yield found
        gc.collect()
        # What close() did not wait for any longer is given back behind it. So may be what was given
        # up by the tests before.
        until(lambda: found.open_handles() <= before + found.given_up)


@functools.cache
def gpus() -> Gpus:
    return Gpus()


class Gpus:
    """The driver's calls that tests make, and what they have to make go wrong."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL(str(_path()))
        self._library.fake_gpu_open_handles.restype = ctypes.c_size_t
        for name in ("fake_gpu_calls", "fake_gpu_opened", "fake_gpu_early_frees"):
            getattr(self._library, name).restype = ctypes.c_uint64
        assert self._library.cuInit(0) == 0
        self.given_up = 0  # handles that nothing frees any more

    @contextlib.contextmanager
    def on(self, device: int) -> Iterator[None]:
        self.call("cuCtxPushCurrent_v2", ctypes.c_void_p(device + 1))
        yield
        self.call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))

    def call(self, name: str, *arguments: Any) -> None:  # noqa: ANN401 - of ctypes
        result = getattr(self._library, name)(*arguments)
        assert result == 0, f"{name} says {result}"

    @property
    def peer_memory(self) -> object:
        """What a peer-memory module asks about addresses."""
        return self._library.fake_gpu_peer_memory

    def on_flush(self, hook: object | None) -> None:
        """Have a function of ctypes called when adapters' writes are flushed."""
        self._library.fake_gpu_on_flush(hook)

    @contextlib.contextmanager
    def adjacent(self) -> Iterator[None]:
        """Let allocations follow each other without a gap, as those of pools do."""
        self._library.fake_gpu_adjacent(1)
        try:
            yield
        finally:
            self._library.fake_gpu_adjacent(0)

    def open_handles(self) -> int:
        return int(self._library.fake_gpu_open_handles())

    def hdp_flushed(self) -> bool:
        """Whether a host data path was flushed since this was asked last."""
        return bool(self._library.fake_gpu_hdp_flushed())

    def fail(self, call: str, nth: int = 0) -> None:
        """Let the nth call of that name from now on run out of memory."""
        self._library.fake_gpu_fail(call.encode(), 4, nth)

    def fail_often(self, call: str, nth: int, times: int) -> None:
        """The same for so many calls, from the nth on."""
        self._library.fake_gpu_fail_often(call.encode(), 4, nth, times)

    def forget_faults(self) -> None:
        """Let nothing go wrong that would from here on."""
        self._library.fake_gpu_forget_faults()

    def lose(self) -> None:
        """Let every call fail, and what devices have not done yet never be done."""
        self._library.fake_gpu_lose_devices(1)

    def calls(self, call: str) -> int:
        """How often the driver was called so."""
        return int(self._library.fake_gpu_calls(call.encode()))

    def opened(self) -> int:
        """How often memory of another process was opened here."""
        return int(self._library.fake_gpu_opened())

    def early_frees(self) -> int:
        """How often memory was freed that another process had open."""
        return int(self._library.fake_gpu_early_frees())

    def open_wrongly(self, wrong: bool) -> None:
        """Let what is opened be other memory than what was asked for."""
        self._library.fake_gpu_open_wrongly(int(wrong))

    def lose_writes(self, lose: bool) -> None:
        """Let what is written into memory that is opened from now on not arrive there."""
        self._library.fake_gpu_lose_writes(int(lose))

    def repeat_handles(self, repeat: bool) -> None:
        """Let each export answer the last one's handle."""
        self._library.fake_gpu_repeat_handles(int(repeat))

    def damage(self) -> None:
        """Flip bits all over the largest allocation."""
        self._library.fake_gpu_damage()

    def damage_shared(self, bits: int) -> None:
        """Flip so many bits in each piece of memory that processes share."""
        self._library.fake_gpu_damage_shared(bits)

    def lose_copied(self, times: int) -> None:
        """Let so many copies of more than a KiB to the host leave the last 16 bytes out."""
        self._library.fake_gpu_lose_copied(times)

    def hold(self, held: bool) -> None:
        """Let nothing happen on any stream, until they are let go."""
        self._library.fake_gpu_hold(None, int(held))

    def stall(self, call: str | None) -> None:
        """Let calls of that name not return; none lets them go."""
        self._library.fake_gpu_stall(call and call.encode())

    @contextlib.contextmanager
    def stalled(self, call: str) -> Iterator[None]:
        """Let calls of that name not return."""
        self.stall(call)
        try:
            yield
        finally:
            self.stall(None)

    @contextlib.contextmanager
    def held(self, stream: int = 0) -> Iterator[None]:
        """Let nothing happen on a stream, or on none at all."""
        self._library.fake_gpu_hold(ctypes.c_void_p(stream), 1)
        try:
            yield
        finally:
            self._library.fake_gpu_hold(ctypes.c_void_p(stream), 0)

    @contextlib.contextmanager
    def capture(self, device: int, stream: int) -> Iterator[None]:
        """Capture a graph in the mode "global", and demand that nobody disturbs that."""
        with self.on(device):
            self.call("cuStreamBeginCapture_v2", ctypes.c_void_p(stream), 0)
        yield
        with self.on(device):
            graph = ctypes.c_void_p()
            self.call("cuStreamEndCapture", ctypes.c_void_p(stream), ctypes.byref(graph))

    @contextlib.contextmanager
    def held_device(self, device: int) -> Iterator[None]:
        """Let nothing happen on a device."""
        self._library.fake_gpu_hold_device(device, 1)
        try:
            yield
        finally:
            self._library.fake_gpu_hold_device(device, 0)

    @contextlib.contextmanager
    def lost(self) -> Iterator[None]:
        self.lose()
        try:
            yield
        finally:
            self._library.fake_gpu_lose_devices(0)

    @contextlib.contextmanager
    def stream(self, device: int) -> Iterator[int]:
        made = ctypes.c_void_p()
        with self.on(device):
            self.call("cuStreamCreate", ctypes.byref(made), 1)
            yield made.value or 0
            self.call("cuStreamDestroy_v2", made)

    def make_event(self, device: int) -> None:
        """Make one that nobody destroys."""
        with self.on(device):
            self.call("cuEventCreate", ctypes.byref(ctypes.c_void_p()), 2)

    def copy(self, to: int, source: int, size: int, device: int, stream: int) -> None:
        """Copy to or from a device, some time later."""
        with self.on(device):
            arguments = (ctypes.c_uint64(to), ctypes.c_uint64(source), ctypes.c_size_t(size))
            self.call("cuMemcpyAsync", *arguments, ctypes.c_void_p(stream))

    def wait(self, device: int, stream: int) -> None:
        with self.on(device):
            event = ctypes.c_void_p()
            self.call("cuEventCreate", ctypes.byref(event), 2)
            self.call("cuEventRecord", event, ctypes.c_void_p(stream))
            until(lambda: self._library.cuEventQuery(event) == 0)
            self.call("cuEventDestroy_v2", event)


class DeviceArray:
    """Memory of a fake GPU, of the shape and type of an array."""

    def __init__(self, like: np.ndarray, device: int) -> None:
        self._like, self.device = like, device
        address = ctypes.c_uint64()
        hip = os.environ.get("KVXFER_HIP_LIBRARY") == os.environ.get("KVXFER_HSA_LIBRARY")
        with gpus().on(device):
            allocate = "hipMalloc" if hip else "cuMemAlloc_v2"
            gpus().call(allocate, ctypes.byref(address), ctypes.c_size_t(like.nbytes))
        self.address = address.value

    @property
    def __cuda_array_interface__(self) -> dict[str, object]:
        return {
            "shape": self._like.shape,
            "typestr": self._like.dtype.str,
            "data": (self.address, False),
            "strides": None,
            "version": 3,
        }

    def free(self) -> None:
        with gpus().on(self.device):
            gpus().call("cuMemFree_v2", ctypes.c_uint64(self.address))


class GpuPaged(Paged):
    """A cache on a fake GPU: `arrays` is what the host knows of it."""

    def __init__(self, geometry: Geometry, device: int = 0, seed: int | None = None) -> None:
        super().__init__(geometry, seed)
        self.device = device
        self.memory = [[DeviceArray(array, device) for array in arrays] for arrays in self.arrays]
        g = geometry
        self.cache = kvxfer.Cache(
            {
                layer: made[0] if len(made) == 1 else tuple(made)
                for layer, made in zip(g.layers, self.memory, strict=True)
            },
            axes=g.axes,
            planes=g.planes,
            packed=g.packed,
            model=g.model,
            first_head=g.heads[0],
            dtype=g.dtype,
            scales=g.scales,
        )
        self.store()

    def store(self) -> None:
        """Copy all to the device, and wait until it is there."""
        with gpus().stream(self.device) as stream:
            self.upload(stream)
            gpus().wait(self.device, stream)

    def upload(self, stream: int) -> None:
        """Copy all to the device, some time later."""
        self._move(stream, to_device=True)

    def download(self) -> None:
        with gpus().stream(self.device) as stream:
            self._move(stream, to_device=False)
            gpus().wait(self.device, stream)

    def _move(self, stream: int, *, to_device: bool) -> None:
        for memory, arrays in zip(self.memory, self.arrays, strict=True):
            for made, array in zip(memory, arrays, strict=True):
                places = (made.address, array.ctypes.data)
                to, source = places if to_device else places[::-1]
                gpus().copy(to, source, array.nbytes, self.device, stream)

    def free(self) -> None:
        for memory in self.memory:
            for made in memory:
                made.free()


@contextlib.contextmanager
def made(geometry: Geometry, device: int, seed: int | None = None) -> Iterator[Paged]:
    """A cache on a device or, as HOST, in the host's memory."""
    if device == HOST:
        yield Paged(geometry, seed)
        return
    paged = GpuPaged(geometry, device, seed)
    try:
        yield paged
    finally:
        paged.free()


def look(paged: Paged) -> Paged:
    """Let the host know what is in a cache."""
    if isinstance(paged, GpuPaged):
        paged.download()
    return paged
