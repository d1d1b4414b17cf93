"""Buffers with a chosen page size, and runs scattered in them at random."""

from __future__ import annotations

import contextlib
import mmap
from typing import Literal

import numpy as np
import numpy.typing as npt

Offsets = npt.NDArray[np.uint64]
Bytes = npt.NDArray[np.uint8]
Pages = Literal["thp", "4k"]

HUGE_PAGE = 2 << 20
POISON = 0xA5


class Pool:
    """Private anonymous memory, aligned to a huge page, touched once, and not inherited by forks.

    numpy asks for huge pages for its own large arrays ("thp"); torch does not ("4k").
    """

    def __init__(self, nbytes: int, pages: Pages = "thp") -> None:
        self.nbytes = nbytes
        self.pages = pages
        self._map = mmap.mmap(-1, nbytes + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with contextlib.suppress(OSError):  # a kernel that has no huge pages
            self._map.madvise(mmap.MADV_HUGEPAGE if pages == "thp" else mmap.MADV_NOHUGEPAGE)
        # Without this a fork makes the next writes here pay for copy-on-write.
        self._map.madvise(mmap.MADV_DONTFORK)
        whole = np.frombuffer(self._map, dtype=np.uint8)
        start = -whole.ctypes.data % HUGE_PAGE
        self.bytes: Bytes = whole[start : start + nbytes]
        self.bytes[:] = 0
        self.address: int = self.bytes.ctypes.data

    def fill_random(self, seed: int) -> None:
        """Fill with bytes that depend on the seed alone, the same in every process."""
        words = self.bytes.view(np.uint64)
        rng = np.random.default_rng(seed)
        step = 1 << 20
        for begin in range(0, len(words), step):
            part = words[begin : begin + step]
            part[:] = rng.integers(0, 1 << 64, len(part), dtype=np.uint64)

    def fill(self, value: int) -> None:
        """Set every byte."""
        self.bytes[:] = value


def scattered_slots(run_bytes: int, runs: int, pool_bytes: int, seed: int) -> npt.NDArray[np.int64]:
    """Distinct random slots of `run_bytes`, in an order that lets nothing merge but by chance."""
    return np.random.default_rng(seed).permutation(pool_bytes // run_bytes)[:runs].astype(np.int64)


def offsets_of(slots: npt.NDArray[np.int64], run_bytes: int) -> Offsets:
    """Byte offsets of slots."""
    return slots.astype(np.uint64) * np.uint64(run_bytes)


def other_slots(
    slots: npt.NDArray[np.int64], run_bytes: int, pool_bytes: int
) -> npt.NDArray[np.int64]:
    """The slots of the pool that `slots` does not name."""
    return np.setdiff1d(np.arange(pool_bytes // run_bytes, dtype=np.int64), slots)
