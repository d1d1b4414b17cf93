"""Memory of the first GPU for caches, by the calls of its driver: torch is not needed.

The libraries are those that the core would load, named by the same environment variables.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import time
import weakref
from collections.abc import Iterator, Sequence

from kvxfer.errors import ResourceError

_NOT_READY = 600
_NON_BLOCKING, _NO_TIMING, _ANY_DIRECTION = 1, 2, 4
_PATIENCE = 60.0  # seconds that a copy may take


class GpuArray:
    """Memory of the GPU, as an array of whole numbers; freed with this object."""

    def __init__(self, driver: Cuda | Hip, shape: Sequence[int], itemsize: int) -> None:
        self._driver, self._bytes = driver, math.prod(shape) * itemsize
        self._address = driver.allocate(self._bytes)
        # At the process's end the driver frees it: nothing may be called any more by then.
        weakref.finalize(self, driver.free, self._address).atexit = False
        self.__cuda_array_interface__: dict[str, object] = {
            "shape": tuple(shape),
            "typestr": f"<u{itemsize}",
            "data": (self._address, False),
            "strides": None,
            "version": 3,
        }

    def upload(self, address: int) -> None:
        """Copy all of it from the host's memory at an address."""
        self._driver.copy(self._address, address, self._bytes)

    def download(self, address: int) -> None:
        """Copy all of it to the host's memory at an address."""
        self._driver.copy(address, self._address, self._bytes)


class _Driver:
    """What CUDA and HIP have in common. Every call names itself where it fails."""

    name: str

    def __init__(self, variable: str, names: tuple[str, ...]) -> None:
        named = os.environ.get(variable)
        error = ""
        for name in (named,) if named else names:
            try:
                self._library = ctypes.CDLL(name)
                return
            except OSError as failure:
                error = error or str(failure)
        raise ResourceError(error)

    def call(self, name: str, *arguments: object) -> None:
        """Raise ResourceError where it does not return 0."""
        if result := self.result(name, *arguments):
            raise ResourceError(f"{name} says {result}")

    def result(self, name: str, *arguments: object) -> int:
        try:
            return int(getattr(self._library, name)(*arguments))
        except AttributeError:
            raise ResourceError(f"{self._library._name} has no {name}") from None

    def made(self, name: str, *arguments: object) -> ctypes.c_void_p:
        """Return what a call writes to its first argument."""
        handle = ctypes.c_void_p()
        self.call(name, ctypes.byref(handle), *arguments)
        return handle

    def count(self, name: str) -> None:
        """Raise ResourceError where there is no GPU."""
        count = ctypes.c_int(0)
        self.call(name, ctypes.byref(count))
        if count.value < 1:
            raise ResourceError(f"{name} finds none")

    def wait(self, name: str, event: ctypes.c_void_p) -> None:
        end = time.monotonic() + _PATIENCE
        while (result := self.result(name, event)) == _NOT_READY:
            if time.monotonic() > end:
                raise ResourceError(
                    f"a copy to or from the GPU takes longer than {_PATIENCE:.0f} s"
                )
            time.sleep(0.0002)
        if result:
            raise ResourceError(f"{name} says {result}")


class Cuda(_Driver):
    """CUDA's driver."""

    name = "CUDA"

    def __init__(self) -> None:
        super().__init__("KVXFER_CUDA_LIBRARY", ("libcuda.so.1",))
        self.call("cuInit", 0)
        self.count("cuDeviceGetCount")
        self._context = self.made("cuDevicePrimaryCtxRetain", 0)
        with self._current():
            self._stream = self.made("cuStreamCreate", _NON_BLOCKING)
            self._event = self.made("cuEventCreate", _NO_TIMING)

    @contextlib.contextmanager
    def _current(self) -> Iterator[None]:
        self.call("cuCtxPushCurrent_v2", self._context)
        try:
            yield
        finally:
            self.result("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))

    def allocate(self, nbytes: int) -> int:
        with self._current():
            return self.made("cuMemAlloc_v2", ctypes.c_size_t(nbytes)).value or 0

    def free(self, address: int) -> None:
        with self._current():
            self.result("cuMemFree_v2", ctypes.c_uint64(address))

    def copy(self, to: int, source: int, nbytes: int) -> None:
        """Copy, and wait until it is done."""
        ends = ctypes.c_uint64(to), ctypes.c_uint64(source)
        with self._current():
            self.call("cuMemcpyAsync", *ends, ctypes.c_size_t(nbytes), self._stream)
            self.call("cuEventRecord", self._event, self._stream)
            self.wait("cuEventQuery", self._event)


class Hip(_Driver):
    """HIP's runtime."""

    name = "HIP"

    def __init__(self) -> None:
        names = tuple(f"libamdhip64.so.{number}" for number in (7, 6, 5))
        super().__init__("KVXFER_HIP_LIBRARY", names)
        self.call("hipInit", 0)
        self.count("hipGetDeviceCount")
        self.call("hipSetDevice", 0)
        self._stream = self.made("hipStreamCreateWithFlags", _NON_BLOCKING)
        self._event = self.made("hipEventCreateWithFlags", _NO_TIMING)

    def allocate(self, nbytes: int) -> int:
        return self.made("hipMalloc", ctypes.c_size_t(nbytes)).value or 0

    def free(self, address: int) -> None:
        self.result("hipFree", ctypes.c_void_p(address))

    def copy(self, to: int, source: int, nbytes: int) -> None:
        """Copy, and wait until it is done."""
        ends = ctypes.c_void_p(to), ctypes.c_void_p(source)
        self.call("hipMemcpyAsync", *ends, ctypes.c_size_t(nbytes), _ANY_DIRECTION, self._stream)
        self.call("hipEventRecord", self._event, self._stream)
        self.wait("hipEventQuery", self._event)


def open_gpu() -> Cuda | Hip:
    """Return the driver of the first GPU.

    Raises
    ------
    ResourceError
        There is none; it says what CUDA and HIP say.
    """
    reasons = []
    for kind in (Cuda, Hip):
        try:
            return kind()
        except ResourceError as error:
            reasons.append(f"{kind.name}: {error}")
    raise ResourceError(f"no GPU can be used here: {'; '.join(reasons)}")
