"""Copies for vLLM's OffloadingConnector, whose own need a GPU. Its scheduler's half is real."""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult


class Copies(OffloadingWorker):
    """Keeps chunks of one block; a job ends a few looks later."""

    LOOKS = 3

    def __init__(self, kv_caches: Any) -> None:
        self._tensors = [each.tensor for each in kv_caches.tensors]
        self._chunks: dict[int, list[torch.Tensor]] = {}
        self._jobs: dict[int, int] = {}
        self.stored = self.loaded = 0

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        for block, chunk in zip(src_spec.block_ids, dst_spec.block_ids, strict=True):
            self._chunks[int(chunk)] = [each[int(block)].clone() for each in self._tensors]
            self.stored += 1
        self._jobs[job_id] = self.LOOKS
        return True

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        for chunk, block in zip(src_spec.block_ids, dst_spec.block_ids, strict=True):
            for each, kept in zip(self._tensors, self._chunks[int(chunk)], strict=True):
                each[int(block)] = kept
            self.loaded += 1
        self._jobs[job_id] = self.LOOKS
        return True

    def get_finished(self) -> list[TransferResult]:
        self._jobs = {job: looks - 1 for job, looks in self._jobs.items()}
        ended = [job for job, looks in self._jobs.items() if looks <= 0]
        for job in ended:
            del self._jobs[job]
        return [TransferResult(job_id=job, success=True) for job in ended]

    def wait(self, job_ids: set[int]) -> None:
        for job in job_ids & self._jobs.keys():
            self._jobs[job] = 0
