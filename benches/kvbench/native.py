"""The compiled baselines, built on the fly with the system's C compiler."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

Offsets = npt.NDArray[np.uint64]

SOURCE = Path(__file__).parent / "native" / "baselines.c"
LIBRARY_VARIABLE = "KVBENCH_NATIVE"  # set for children, so that one build serves all of a run


class Native:
    """Calls into native/baselines.c. Addresses are plain integers; every call releases the GIL."""

    def __init__(self) -> None:
        self._directory: tempfile.TemporaryDirectory[str] | None = None
        path = os.environ.get(LIBRARY_VARIABLE)
        if not path:
            path = self._build()
        self.path = path
        lib = ctypes.CDLL(path)
        address, size, i64 = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int64
        lib.kvb_copy.argtypes = [address, address, size]
        lib.kvb_copy.restype = None
        lib.kvb_scattered_copy.argtypes = [address, address, address, address, size, size]
        lib.kvb_scattered_copy.restype = None
        lib.kvb_scattered_mismatch.argtypes = [address, address, address, address, size, size]
        lib.kvb_scattered_mismatch.restype = i64
        lib.kvb_scattered_not_value.argtypes = [address, address, size, size, ctypes.c_int]
        lib.kvb_scattered_not_value.restype = i64
        for name in ("kvb_send_all", "kvb_recv_all"):
            function = getattr(lib, name)
            function.argtypes = [ctypes.POINTER(ctypes.c_int), size, address, size, size]
            function.restype = ctypes.c_int
        self._lib = lib

    def _build(self) -> str:
        compiler = next(
            (
                c
                for c in (os.environ.get("CC"), "cc", "gcc", "clang")
                if c and shutil.which(c.split()[0])
            ),
            None,
        )
        if compiler is None:
            raise RuntimeError(
                "the baselines need a C compiler and none of cc, gcc, clang was "
                "found; install one (apt-get install gcc) or set CC"
            )
        self._directory = tempfile.TemporaryDirectory(prefix="kvbench-")
        path = os.path.join(self._directory.name, "baselines.so")
        command = [
            *compiler.split(),
            "-O3",
            "-std=gnu11",
            "-Wall",
            "-Wextra",
            "-shared",
            "-fPIC",
            "-pthread",
            str(SOURCE),
            "-o",
            path,
        ]
        built = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        if built.returncode != 0:
            raise RuntimeError(f"{' '.join(command)} failed:\n{built.stderr}")
        return path

    def copy(self, dst: int, src: int, nbytes: int) -> None:
        """One memcpy."""
        self._lib.kvb_copy(dst, src, nbytes)

    def scattered_copy(
        self, dst: int, dst_offsets: Offsets, src: int, src_offsets: Offsets, run_bytes: int
    ) -> None:
        """One memcpy a run."""
        self._lib.kvb_scattered_copy(
            dst, dst_offsets.ctypes.data, src, src_offsets.ctypes.data, len(dst_offsets), run_bytes
        )

    def scattered_mismatch(
        self, a: int, a_offsets: Offsets, b: int, b_offsets: Offsets, run_bytes: int
    ) -> int:
        """Index of the first run that differs, or -1."""
        return int(
            self._lib.kvb_scattered_mismatch(
                a, a_offsets.ctypes.data, b, b_offsets.ctypes.data, len(a_offsets), run_bytes
            )
        )

    def scattered_not_value(self, a: int, offsets: Offsets, run_bytes: int, value: int) -> int:
        """Index of the first run that holds another byte than `value`, or -1."""
        return int(
            self._lib.kvb_scattered_not_value(
                a, offsets.ctypes.data, len(offsets), run_bytes, value
            )
        )

    def send_all(self, fds: Sequence[int], src: int, nbytes: int, call_bytes: int) -> None:
        """Send an equal share over each socket, a thread each."""
        self._move(self._lib.kvb_send_all, fds, src, nbytes, call_bytes)

    def recv_all(self, fds: Sequence[int], dst: int, nbytes: int, call_bytes: int) -> None:
        """Receive an equal share over each socket, a thread each."""
        self._move(self._lib.kvb_recv_all, fds, dst, nbytes, call_bytes)

    @staticmethod
    def _move(
        function: ctypes._NamedFuncPointer,
        fds: Sequence[int],
        address: int,
        nbytes: int,
        call_bytes: int,
    ) -> None:
        array = (ctypes.c_int * len(fds))(*fds)
        error = function(array, len(fds), address, nbytes, call_bytes)
        if error:
            raise OSError(error, f"plain sockets, {len(fds)} streams: {os.strerror(error)}")
