"""An engine whose scheduler, connector and KV memory are real, and whose model is arithmetic.

What it writes for a token depends on all tokens before it, and in each step it reads what the step
builds on. So one wrong, missing or stale element shows, and a thousand requests take seconds.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from vllm import SamplingParams
from vllm import _custom_ops as ops
from vllm.config import (
    CacheConfig,
    DeviceConfig,
    KVTransferConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    VllmConfig,
)
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    SlidingWindowSpec,
)
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from kvxfer.integrations.vllm_connector import register
from rig.arithmetic import HEAD_SIZE, HEADS, LAYERS, Numbers, chain_of, kv_of

DEAD = {"do_remote_decode": True, "do_remote_prefill": False}
_numbers = itertools.count()
torch.set_num_threads(1)  # tiny tensors: handing them to other threads takes longer than they do


class Layer:
    isa = "vec"

    def __init__(self, scales: tuple[float, float], backend: str) -> None:
        self._k_scale_float, self._v_scale_float = scales
        self._k_scale = torch.tensor(scales[0])
        self._backend = SimpleNamespace(get_name=lambda: backend)

    def get_attn_backend(self) -> Any:
        return self._backend


def prefill_params(**more: Any) -> dict[str, Any]:
    """What a proxy that knows NIXL's connector sends to the prefill side."""
    nothing = dict.fromkeys(
        ("remote_engine_id", "remote_block_ids", "remote_host", "remote_port"), None
    )
    return {**DEAD, **nothing, **more}


class Rank:
    """A tensor parallel rank of a pipeline stage: its connector and its share of the KV memory."""

    backend = "CPU_ATTN"

    def __init__(
        self,
        config: VllmConfig,
        kv_cache: KVCacheConfig,
        numbers: Numbers,
        rank: int,
        tp: int,
    ) -> None:
        config = copy.copy(config)
        config.parallel_config = copy.copy(config.parallel_config)
        config.parallel_config.rank = rank
        each = HEADS // tp
        self.heads = slice(rank % tp * each, (rank % tp + 1) * each)
        self._block_size, self._numbers = config.cache_config.block_size, numbers
        shape = (kv_cache.num_blocks, each, self._block_size, 2 * HEAD_SIZE)
        self.kv = {}
        for name in itertools.chain(*(group.layer_names for group in kv_cache.kv_cache_groups)):
            layers = config.compilation_config.static_forward_context
            layers[name] = Layer(numbers.scales, self.backend)
            # Poison: nobody may use what was never written.
            poison = torch.full(shape, -7.0).to(numbers.held)
            self.kv[name] = self.place(poison.view(numbers.stored), kv_cache.kv_cache_layout)
        self.worker = KVConnectorFactory.create_connector(config, KVConnectorRole.WORKER, kv_cache)
        self.worker.register_kv_caches(self.kv)

    def place(self, kv: torch.Tensor, layout: str | None) -> torch.Tensor:
        """Return a layer's memory, filled like this."""
        return kv

    def finish(self, finished: set[str]) -> KVConnectorOutput:
        """Call the hooks that come after the forward."""
        self.worker.start_load_kv(None)
        self.worker.wait_for_save()
        results = self.worker.get_transfer_results(finished)
        stats = self.worker.get_kv_connector_stats()
        meta = self.worker.build_connector_worker_meta()
        self.worker.clear_connector_metadata()
        return KVConnectorOutput(
            finished_sending=results.finished_sending,
            finished_recving=results.finished_recving,
            failed_recving=results.failed_recving,
            kv_connector_stats=stats,
            kv_connector_worker_meta=meta,
        )

    def write(self, name: str, key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor) -> None:
        """Write K and V ``[token, head, content]`` of all heads: this rank's go into its blocks."""
        kv = self.kv[name]
        keys, values = kv.view(*kv.shape[:2], 2 * self._block_size, HEAD_SIZE).chunk(2, dim=2)
        model = getattr(torch, self._numbers.model)
        mine = (each[:, self.heads].to(model).contiguous() for each in (key, value))
        k_scale, v_scale = self._numbers.scales
        ops.cpu_attn_reshape_and_cache(
            *mine, keys, values, slots, "vec", k_scale, v_scale, self._numbers.cache
        )

    def read(self, name: str, block: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return K and V ``[token, head, content]`` of a block, as the kernel "vec" packs them."""
        heads = self.kv[name].shape[1]
        flat = self.kv[name][block].view(self._numbers.held).reshape(heads, -1).to(torch.float32)
        half = self._block_size * HEAD_SIZE
        keys = flat[:, :half].view(heads, HEAD_SIZE, self._block_size)
        values = flat[:, half:].view(heads, self._block_size, HEAD_SIZE)
        k_scale, v_scale = self._numbers.scales
        return keys.permute(2, 0, 1) * k_scale, values.permute(1, 0, 2) * v_scale


class Engine:
    """One engine, stepped by hand."""

    rank_type = Rank

    def __init__(
        self,
        model: Path,
        role: str,
        *,
        block_size: int = 32,
        num_blocks: int = 64,
        extra: dict[str, Any] | None = None,
        policy: str = "recompute",
        prefix_caching: bool = True,
        max_batched_tokens: int = 512,
        windows: tuple[int | None, ...] = (None,),
        tp: int = 1,
        pp: int = 1,
        dp: int = 1,
        numbers: Numbers = Numbers(),  # noqa: B008 - it is frozen
        lookahead: int = 0,
        engine_id: str | None = None,
        layout: str | None = None,
        transfer: KVTransferConfig | None = None,
    ) -> None:
        register()
        model_config = ModelConfig(
            model=str(model), dtype=numbers.model, seed=0, max_model_len=4096
        )
        engine_id = engine_id or f"{role}-{next(_numbers)}"
        self.config = VllmConfig(
            model_config=model_config,
            cache_config=CacheConfig(
                block_size=block_size,
                cache_dtype=numbers.cache,
                enable_prefix_caching=prefix_caching,
            ),
            scheduler_config=SchedulerConfig(
                max_num_seqs=16,
                max_num_batched_tokens=max_batched_tokens,
                max_model_len=4096,
                enable_chunked_prefill=True,
                is_encoder_decoder=False,
                async_scheduling=False,
            ),
            parallel_config=ParallelConfig(),
            device_config=DeviceConfig("cpu"),
            kv_transfer_config=transfer
            or KVTransferConfig(
                kv_connector="KvxferConnector",
                kv_role=role,
                engine_id=engine_id,
                kv_load_failure_policy=policy,
                kv_connector_extra_config=extra or {},
            ),
        )
        self.config.cache_config.num_gpu_blocks = num_blocks
        self.config.parallel_config.tensor_parallel_size = tp
        self.config.parallel_config.pipeline_parallel_size = pp
        self.config.parallel_config.data_parallel_size = dp
        self.block_size, self.windows, self.numbers = block_size, windows, numbers
        self.layers = [
            [f"model.layers.{group * LAYERS + layer}.attn" for layer in range(LAYERS)]
            for group in range(len(windows))
        ]
        shape = {
            "block_size": block_size,
            "num_kv_heads": HEADS // tp,
            "head_size": HEAD_SIZE,
            "dtype": numbers.stored,
        }
        kv_cache = KVCacheConfig(
            num_blocks=num_blocks,
            kv_cache_tensors=[],
            kv_cache_layout=layout,
            kv_cache_groups=[
                KVCacheGroupSpec(
                    names,
                    FullAttentionSpec(**shape)
                    if window is None
                    else SlidingWindowSpec(**shape, sliding_window=window),
                )
                for names, window in zip(self.layers, windows, strict=True)
            ],
        )
        self.scheduler = Scheduler(
            vllm_config=self.config,
            kv_cache_config=kv_cache,
            structured_output_manager=StructuredOutputManager(self.config),
            block_size=block_size,
            log_stats=True,
        )
        self.scheduler.num_lookahead_tokens = lookahead
        self.connector = self.scheduler.connector
        self._kv_cache, self._tp, self._pp = kv_cache, tp, pp
        self.ranks: list[Rank] = []
        self.start_workers()
        self._aggregator = KVOutputAggregator(tp * pp)
        init_none_hash(sha256)
        self._hasher = get_request_block_hasher(block_size, sha256)
        self.wrong: list[str] = []
        self.answers: dict[str, dict[str, Any]] = {}
        self.stats: dict[str, Any] = {}

    def start_workers(self) -> None:
        """Make the ranks, and introduce them to the scheduler."""
        each = LAYERS // self._pp
        for rank in range(self._tp * self._pp):
            first = rank // self._tp * each
            groups = [
                dataclasses.replace(group, layer_names=group.layer_names[first : first + each])
                for group in self._kv_cache.kv_cache_groups
            ]
            kv_cache = dataclasses.replace(self._kv_cache, kv_cache_groups=groups)
            self.ranks.append(self.rank_type(self.config, kv_cache, self.numbers, rank, self._tp))
        self.worker, self.kv = self.ranks[0].worker, self.ranks[0].kv
        self.connector.set_xfer_handshake_metadata_pp_aware(
            {
                divmod(at, self._tp): rank.worker.get_handshake_metadata()
                for at, rank in enumerate(self.ranks)
            }
        )

    # --- requests ---

    def add(
        self,
        tokens: list[int],
        *,
        params: dict[str, Any] | None = None,
        max_tokens: int = 4,
        name: str | None = None,
        **more: Any,
    ) -> str:
        name = name or f"r{next(_numbers)}"
        sampling = SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)
        if params is not None:
            sampling.extra_args = {"kv_transfer_params": params}
        request = Request(
            request_id=name,
            prompt_token_ids=list(tokens),
            sampling_params=sampling,
            pooling_params=None,
            block_hasher=self._hasher,
            **more,
        )
        self.answers[name] = {"tokens": [], "finish": None, "params": None}
        self.scheduler.add_request(request)
        return name

    def abort(self, name: str) -> None:
        from vllm.v1.request import RequestStatus

        self.scheduler.finish_requests([name], RequestStatus.FINISHED_ABORTED)

    def status(self, name: str) -> str | None:
        request = self.scheduler.requests.get(name)
        return None if request is None else request.status.name

    @property
    def free_blocks(self) -> int:
        return self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()

    @property
    def idle(self) -> bool:
        return not self.scheduler.requests and not self.scheduler.has_requests()

    # --- one step, in the order of vLLM's model runner ---

    def step(self) -> None:
        output = self.scheduler.schedule()
        meta = output.kv_connector_metadata
        for rank in self.ranks:
            rank.worker.handle_preemptions(meta)
            rank.worker.bind_connector_metadata(meta)
        sampled = self._forward(output)
        names = list(sampled)
        outputs = [
            ModelRunnerOutput(
                req_ids=names,
                req_id_to_index={name: at for at, name in enumerate(names)},
                sampled_token_ids=[sampled[name] for name in names],
                kv_connector_output=rank.finish(output.finished_req_ids),
            )
            for rank in self.ranks
        ]
        merged = self._aggregator.aggregate(outputs, 0)
        stats = merged.kv_connector_output.kv_connector_stats
        outputs = self.scheduler.update_from_output(output, merged)
        if stats is not None:
            self._count(stats.data)
        for each in outputs.values():
            for out in each.outputs:
                answer = self.answers[out.request_id]
                answer["tokens"] += out.new_token_ids
                if out.finish_reason is not None:
                    assert answer["finish"] is None, f"{out.request_id} ended twice"
                    answer["finish"] = str(out.finish_reason)
                if out.kv_transfer_params is not None:
                    answer["params"] = out.kv_transfer_params
            if each.scheduler_stats is not None and each.scheduler_stats.kv_connector_stats:
                self._count({})

    def _count(self, data: dict[str, Any]) -> None:
        for name, value in data.items():
            if hasattr(value, "data"):  # MultiConnector's: by connector
                self._count(value.data if name == "KvxferConnector" else {})
            elif isinstance(value, dict):
                ours = self.stats.setdefault(name, {})
                for reason, count in value.items():
                    ours[reason] = ours.get(reason, 0) + count
            elif isinstance(value, (int, float)):
                self.stats[name] = self.stats.get(name, 0) + value

    def _forward(self, output: Any) -> dict[str, list[int]]:
        work = []
        for name, count in output.num_scheduled_tokens.items():
            request = self.scheduler.requests[name]
            # The scheduler has counted this step's tokens already.
            begin = request.num_computed_tokens - count
            tokens = list(request.all_token_ids)
            chain = chain_of(tokens)
            blocks = self.scheduler.kv_cache_manager.get_block_ids(name)
            work.append((name, begin, begin + count, chain, blocks, len(tokens)))
        for group, names in enumerate(self.layers):
            for (layer, name), rank in itertools.product(enumerate(names), self.ranks):
                if not work or name not in rank.kv:
                    continue
                for _, begin, end, chain, blocks, _ in work:
                    positions = torch.arange(begin, end)
                    slots = torch.tensor(blocks[group])[positions // self.block_size]
                    slots = slots * self.block_size + positions % self.block_size
                    key, value = (
                        kv_of(chain[begin:end], layer, plane, self.numbers.levels)
                        for plane in range(2)
                    )
                    rank.write(name, key, value, slots)
                rank.worker.save_kv_layer(name, rank.kv[name], None)
        # Attention reads when all of the batch have written: one's prefix may be another's work.
        for name, begin, _, chain, blocks, _ in work:
            self._check(name, chain, blocks, begin)
        return {
            name: [int(chain[end - 1]) % 509 + 3] if end == total else []
            for name, _, end, chain, _, total in work
        }

    def _check(
        self, request: str, chain: torch.Tensor, blocks: tuple[list[int], ...], end: int
    ) -> None:
        for group, names in enumerate(self.layers):
            window = self.windows[group]
            first = 0 if window is None else max(0, end - window + 1)
            for at in range(first // self.block_size, -(-end // self.block_size)):
                begin = max(first, at * self.block_size)
                stop = min(end, (at + 1) * self.block_size)
                inside = slice(begin - at * self.block_size, stop - at * self.block_size)
                for (layer, name), rank in itertools.product(enumerate(names), self.ranks):
                    if name not in rank.kv:
                        continue
                    for plane, found in enumerate(rank.read(name, blocks[group][at])):
                        wanted = kv_of(chain[begin:stop], layer, plane, self.numbers.levels)
                        wanted = wanted[:, rank.heads]
                        if not torch.equal(found[inside], wanted):
                            self.wrong.append(
                                f"{request}: {'kv'[plane]} of {name}, tokens {begin} to {stop}"
                            )

    def close(self) -> None:
        for rank in self.ranks:
            rank.worker.shutdown()
        self.scheduler.shutdown()
