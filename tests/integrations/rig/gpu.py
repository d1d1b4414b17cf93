"""Fake engines with their KV on fake GPUs, whose streams do late what they are told."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from kvtest.fake_gpu import gpus
from vllm.v1.kv_cache_layout import KVCacheLayout

from rig.arithmetic import HEAD_SIZE
from rig.fake import Engine, Rank


class CudaTensor(torch.Tensor):
    """Says that it lies on a GPU, and is as good as its strides and its address."""

    index = 0

    @property
    def device(self) -> torch.device:
        return torch.device("cuda", self.index)


class OtherCudaTensor(CudaTensor):
    index = 1


KINDS = (CudaTensor, OtherCudaTensor)


class GpuRank(Rank):
    """Its writes and reads are work on the engine's stream, done some time later."""

    backend = "FLASH_ATTN"
    engine: GpuEngine
    seen: dict[str, torch.Tensor]
    """What its stream has read, by layer."""

    def place(self, kv: torch.Tensor, layout: str | None) -> torch.Tensor:
        assert layout in ("LBHNC", "LBNHC")
        order = KVCacheLayout[layout].layer_view_order
        packed = kv.permute(order).contiguous()
        address = ctypes.c_uint64()
        device = self.engine.device
        with gpus().on(device):
            gpus().call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(packed.nbytes))
        self.engine.allocated.append(address)
        self._copy(address.value, packed.data_ptr(), packed.nbytes)
        gpus().wait(device, self.engine.stream)
        memory = (ctypes.c_byte * packed.nbytes).from_address(address.value)
        found = torch.frombuffer(memory, dtype=kv.dtype).as_subclass(KINDS[device])
        return found.view(packed.shape).permute(*(order.index(axis) for axis in range(4)))

    def _copy(self, to: int, source: int, size: int) -> None:
        gpus().copy(to, source, size, self.engine.device, self.engine.stream)

    def write(self, name: str, key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor) -> None:
        kv, numbers = self.kv[name], self._numbers
        pairs = [
            (each[:, self.heads].to(getattr(torch, numbers.model)).float() / scale).to(numbers.held)
            for each, scale in zip((key, value), numbers.scales, strict=True)
        ]
        # K and then V of each token and head, as reshape_and_cache_flash has it; in memory's order.
        rows = torch.cat(pairs, dim=2).view(numbers.stored)
        tokens = [divmod(slot, self._block_size) for slot in slots.tolist()]
        if kv.stride(1) < kv.stride(2):
            places = [kv[block, head, at] for block, at in tokens for head in range(kv.shape[1])]
        else:
            places = [kv[block, head, at] for head in range(kv.shape[1]) for block, at in tokens]
            rows = rows.transpose(0, 1)
        rows = rows.contiguous()
        self.engine.kept.append(rows)
        source, size, begin = rows.data_ptr(), places[0].nbytes, 0
        for end in range(1, len(places) + 1):
            first = places[begin].data_ptr()
            if end < len(places) and places[end].data_ptr() == first + (end - begin) * size:
                continue
            self._copy(first, source + begin * size, (end - begin) * size)
            begin = end

    def zero(self, blocks: list[int]) -> None:
        for kv in self.kv.values():
            zeros = torch.zeros(kv[0].numel(), dtype=kv.dtype)
            self.engine.kept.append(zeros)
            for block in blocks:
                self._copy(kv[block].data_ptr(), zeros.data_ptr(), zeros.nbytes)

    def look(self, name: str) -> torch.Tensor:
        """Return a layer's memory as it will be when the stream has got there."""
        kv = self.kv[name]
        flat = torch.empty(kv.numel(), dtype=kv.dtype)
        self._copy(flat.data_ptr(), kv.data_ptr(), flat.nbytes)
        return flat.as_strided(kv.shape, kv.stride())

    def read(self, name: str, block: int) -> tuple[torch.Tensor, torch.Tensor]:
        seen = self.seen[name][block].contiguous().view(self._numbers.held).to(torch.float32)
        key, value = seen.transpose(0, 1).split(HEAD_SIZE, dim=-1)
        k_scale, v_scale = self._numbers.scales
        return key * k_scale, value * v_scale


class GpuEngine(Engine):
    """What its model reads is compared in `verify` only."""

    rank_type = GpuRank

    def __init__(
        self,
        *given: Any,
        device: int,
        stream: int,
        zeroing: bool = False,
        micro_batches: bool = False,
        **options: Any,
    ) -> None:
        self.device, self.stream = device, stream
        self.zeroing, self.micro_batches = zeroing, micro_batches
        self.allocated: list[ctypes.c_uint64] = []
        self.kept: list[torch.Tensor] = []  # sources of copies that may be under way
        self._reads: list[tuple[Any, ...]] = []
        super().__init__(*given, num_blocks=24, **options)

    def start_workers(self) -> None:
        GpuRank.engine = self
        self.config.parallel_config.enable_dbo = self.micro_batches
        super().start_workers()
        for rank in self.ranks:
            rank.engine = self

    def _forward(self, output: Any) -> dict[str, list[int]]:
        if self.zeroing:  # what blocks to load into go through that were others' a step before
            for load in output.kv_connector_metadata.load:
                for part in load.parts:
                    for rank in self.ranks:
                        rank.zero(part.blocks)
        return super()._forward(output)

    def _check(
        self, request: str, chain: torch.Tensor, blocks: tuple[list[int], ...], end: int
    ) -> None:
        seen = [{name: rank.look(name) for name in rank.kv} for rank in self.ranks]
        self._reads.append((seen, request, chain, blocks, end))

    def verify(self) -> list[str]:
        """Return what was read and is wrong, when all has happened."""
        gpus().wait(self.device, self.stream)
        self.kept.clear()
        for seen, *read in self._reads:
            for rank, found in zip(self.ranks, seen, strict=True):
                rank.seen = found
            super()._check(*read)
        self._reads.clear()
        return self.wrong

    def close(self) -> None:
        super().close()
        gpus().wait(self.device, self.stream)
        for address in self.allocated:
            with gpus().on(self.device):
                gpus().call("cuMemFree_v2", address)
