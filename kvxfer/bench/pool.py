"""The caches of both sides, and what they hold.

A block's contents follow from its layer, plane and id alone, so the fetching side computes what it
must have got without having been told. They are numbers in (-1, -0.5] and [0.5, 1), so that codecs
have something to encode.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
from numpy import random  # loaded now: numpy would on first use, and lose a Ctrl-C meanwhile

from kvxfer.bench.case import BenchError, Case, WrongBytesError

if TYPE_CHECKING:
    from kvxfer import Cache
    from kvxfer._gpu_memory import GpuArray

Words = npt.NDArray[np.uint64]
Bytes = npt.NDArray[np.uint8]

_POISON = 0xA5
_PIECE = 8 << 20  # bytes that are compared at once
# Bits that vary, and bits that are set, in each element of a type; the rest is zero.
_BITS = {
    "bfloat16": (0x807F, 0x3F00),
    "float16": (0x83FF, 0x3800),
    "float8_e4m3fn": (0x87, 0x30),
}
# Largest error of a sound codec, of numbers below 1. Wrong data are off by more than 1.
TOLERANCE = {"raw": 0.0, "int8": 0.02, "fp8_e4m3": 0.07, "fp8_e5m2": 0.14}


def block_tables(case: Case) -> tuple[list[int], list[int]]:
    """Return the block ids of the serving and of the fetching side, at random."""
    drawn = [
        random.default_rng(seed).permutation(case.pool_blocks)[: case.blocks].tolist()
        for seed in (11, 22)
    ]
    return drawn[0], drawn[1]


class Pool:
    """One side's cache: an array for each layer and plane, [block, kv head, token, content]."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self._words = case.block_bytes // 8
        # One array, as an engine has it; 2 MiB behind each other in the address space at least.
        try:
            self._arrays = {
                f"layers.{layer}": [
                    np.empty((case.pool_blocks, self._words), np.uint64) for _ in case.planes
                ]
                for layer in range(case.layers)
            }
        except MemoryError:
            raise BenchError(
                f"{case.name}: no memory for a cache of {case.pool_bytes >> 20} MiB: choose fewer "
                "blocks or tokens"
            ) from None
        self._gpu: list[GpuArray] = []
        if case.memory == "gpu":
            from kvxfer._gpu_memory import GpuArray, open_gpu

            driver = open_gpu()
            views = [self._view(array) for _, _, array in self._planes()]
            self._gpu = [GpuArray(driver, view.shape, view.itemsize) for view in views]

    def cache(self) -> Cache:
        """Return it as agents know it."""
        import kvxfer

        case = self.case
        held: list[object] = list(self._gpu)
        held = held or [self._view(array) for _, _, array in self._planes()]
        planes = len(case.planes)
        tensors = {
            layer: held[number * planes : (number + 1) * planes]
            for number, layer in enumerate(self._arrays)
        }
        return kvxfer.Cache(
            tensors, axes="BHNC", planes=case.planes, dtype=case.dtype, model=case.name
        )

    def fill(self) -> None:
        """Put the serving side's contents in."""
        for layer, plane, array in self._planes():
            np.bitwise_xor(_row(self.case), _keys(self.case, layer, plane)[:, None], out=array)
        self._upload()

    def poison(self) -> None:
        for _, _, array in self._planes():
            array.view(np.uint8).fill(_POISON)
        self._upload()

    def addresses(self) -> Iterator[tuple[int, int]]:
        """Yield where the memory lies: address, bytes."""
        for _, _, array in self._planes():
            yield array.ctypes.data, array.nbytes

    def check(self, codec: str) -> None:
        """Compare with what a transfer into the poisoned cache must have made of it.

        Raises
        ------
        WrongBytesError
            A token, the rest of the last block, or a block that nobody asked for is wrong.
        """
        for held, (_, _, array) in zip(self._gpu, self._planes(), strict=False):
            held.download(array.ctypes.data)
        case = self.case
        source, target = block_tables(case)
        unused = np.setdiff1d(np.arange(case.pool_blocks), target)
        step = max(1, _PIECE // case.block_bytes)
        for layer, plane, array in self._planes():
            where = f"{case.name}, layer {layer}, plane {case.planes[plane]}"
            row, keys = _row(case), _keys(case, layer, plane)
            for begin in range(0, case.blocks, step):
                end = min(begin + step, case.blocks)
                expected = row ^ keys[source[begin:end], None]
                if end == case.blocks:
                    _clear_rest(expected[-1], case)
                self._compare(array[target[begin:end]], expected, codec, where)
            if unused.size and (array[unused].view(np.uint8) != _POISON).any():
                raise WrongBytesError(f"{where}: a block that nobody asked for was written")

    def _compare(self, got: Words, expected: Words, codec: str, where: str) -> None:
        # Loss is not looked for in 8-bit floats: what a codec does to them is another matter.
        tolerance = TOLERANCE.get(codec, max(TOLERANCE.values()))
        if tolerance == 0.0 or self.case.dtype == "float8_e4m3fn":
            wrong = int(np.count_nonzero(got != expected))
            if wrong:
                raise WrongBytesError(f"{where}: {wrong} words of 8 bytes differ")
            return
        error = np.abs(_floats(got, self.case.dtype) - _floats(expected, self.case.dtype))
        worst = float(np.max(error, initial=0.0)) if not np.isnan(error).any() else float("nan")
        if not worst <= tolerance:
            raise WrongBytesError(
                f"{where}: an element is off by {worst:.3g}, where {codec} may be by {tolerance}"
            )

    def _upload(self) -> None:
        for held, (_, _, array) in zip(self._gpu, self._planes(), strict=False):
            held.upload(array.ctypes.data)

    def _view(self, array: Words) -> npt.NDArray[np.uint16] | Bytes:
        case = self.case
        shape = (case.pool_blocks, case.heads, case.block_size, case.content)
        if case.dtype == "float8_e4m3fn":
            return array.view(np.uint8).reshape(shape)
        return array.view(np.uint16).reshape(shape)

    def _planes(self) -> Iterator[tuple[int, int, Words]]:
        for layer, planes in enumerate(self._arrays.values()):
            for plane, array in enumerate(planes):
                yield layer, plane, array


def _pattern(case: Case) -> tuple[np.uint64, np.uint64]:
    vary, fixed = _BITS[case.dtype]
    bits = 16 if case.dtype != "float8_e4m3fn" else 8
    repeat = sum(1 << shift for shift in range(0, 64, bits))
    return np.uint64(vary * repeat), np.uint64(fixed * repeat)


def _row(case: Case) -> Words:
    """Return what all blocks hold before their own key is mixed in."""
    vary, fixed = _pattern(case)
    raw: Words = random.SFC64([case.block_bytes]).random_raw(case.block_bytes // 8)
    return (raw & vary) | fixed


def _keys(case: Case, layer: int, plane: int) -> Words:
    raw: Words = random.SFC64([1, layer, plane]).random_raw(case.pool_blocks)
    return raw & _pattern(case)[0]


def _clear_rest(block: Words, case: Case) -> None:
    used = case.tokens - (case.blocks - 1) * case.block_size
    block.view(np.uint8).reshape(case.heads, case.block_size, -1)[:, used:] = 0


def _floats(words: Words, dtype: str) -> npt.NDArray[np.float32]:
    if dtype == "float16":
        return words.view(np.float16).astype(np.float32)
    return (words.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
