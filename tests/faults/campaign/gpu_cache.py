"""Caches on fake GPUs, as the campaign needs them: with a judge who sees what is in them."""

from __future__ import annotations

import ctypes
import dataclasses
import mmap
import os
from collections.abc import Iterator, Sequence

import numpy as np
from faults.campaign import content
from faults.campaign.schedule import OfferPlan
from kvtest.caches import POISON, Geometry, Paged
from kvtest.fake_gpu import DeviceArray, GpuPaged, gpus


class GpuRefusedError(Exception):
    """The GPU did not take a call of the campaign's own: it was told to fail."""


class WatchedCache(GpuPaged):
    """A cache on a GPU. `arrays` is its very memory, seen by another way than the GPU's.

    So what is in there at a moment is looked at, and written, without asking the GPU; while its
    kernels, and adapters, work on it. Or, with a stream, the campaign writes as engines do: later.
    """

    def __init__(self, geometry: Geometry, device: int, *, streams: bool) -> None:
        super().__init__(geometry, device)
        self.arrays = [
            [_window(made, array) for made, array in zip(memory, arrays, strict=True)]
            for memory, arrays in zip(self.memory, self.arrays, strict=True)
        ]
        self.stream: int | None = None
        if streams:
            made = ctypes.c_void_p()
            with gpus().on(device):
                gpus().call("cuStreamCreate", ctypes.byref(made), 1)
            self.stream = made.value
        # What the stream reads from: contents, a one, and where it writes that at the end.
        self._kept: list[tuple[Paged, np.ndarray, np.ndarray]] = []

    def fill_late(self, blocks: Sequence[int], number: int, plan: OfferPlan) -> None:
        """Let the stream write the content of an offer, some time later."""
        self._kept = [kept for kept in self._kept if not kept[2].any()]
        scratch = Paged(dataclasses.replace(self.geometry, num_blocks=len(blocks)))
        content.fill(scratch, range(len(blocks)), number, plan)
        one, done = np.ones(1, np.uint64), np.zeros(1, np.uint64)
        self._kept.append((scratch, one, done))
        for at, block in enumerate(blocks):
            sources = _pieces(scratch, _addresses(scratch), at)
            for (to, size), (source, _) in zip(self._pieces(block), sources, strict=True):
                self._call("cuMemcpyAsync", to, source, size)
        self._call("cuMemcpyAsync", done.ctypes.data, one.ctypes.data, one.nbytes)

    def poison_late(self, blocks: Sequence[int]) -> None:
        """Let the stream overwrite blocks, some time later, as engines zero them."""
        for block in blocks:
            for to, size in self._pieces(block):
                self._call("cuMemsetD8Async", to, POISON, size)

    def _pieces(self, block: int) -> Iterator[tuple[int, int]]:
        addresses = [[made.address for made in memory] for memory in self.memory]
        return _pieces(self, addresses, block)

    def _call(self, name: str, to: int, value: int, size: int) -> None:
        library = gpus()._library
        if library.cuCtxPushCurrent_v2(ctypes.c_void_p(self.device + 1)) != 0:
            raise GpuRefusedError(name)
        words = (ctypes.c_uint64(to), ctypes.c_uint64(value), ctypes.c_size_t(size))
        result = getattr(library, name)(*words, ctypes.c_void_p(self.stream))
        library.cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p()))
        if result != 0:
            raise GpuRefusedError(f"{name} says {result}")


def _addresses(paged: Paged) -> list[list[int]]:
    return [[array.ctypes.data for array in arrays] for arrays in paged.arrays]


def _pieces(paged: Paged, addresses: list[list[int]], block: int) -> Iterator[tuple[int, int]]:
    """Yield where the memory of a block begins, and its size."""
    axis = paged.geometry.axes.index("B")
    for starts, arrays in zip(addresses, paged.arrays, strict=True):
        for start, array in zip(starts, arrays, strict=True):
            outer = range(array.shape[0] if axis == 1 else 1)
            for i in outer:
                place = i * array.strides[0] * axis + block * array.strides[axis]
                yield start + place, array.strides[axis]


def _window(made: DeviceArray, like: np.ndarray) -> np.ndarray:
    """Map the memory of a device for the judge."""
    descriptor, offset = ctypes.c_int(), ctypes.c_size_t()
    found = gpus()._library.fake_gpu_peer_memory(
        ctypes.c_size_t(made.address),
        ctypes.c_size_t(like.nbytes),
        ctypes.byref(descriptor),
        ctypes.byref(offset),
    )
    assert found == 0
    before = offset.value % mmap.PAGESIZE
    try:
        mapped = mmap.mmap(descriptor.value, before + like.nbytes, offset=offset.value - before)
    finally:
        os.close(descriptor.value)
    return np.frombuffer(mapped, like.dtype, like.size, before).reshape(like.shape)
