"""The class that vLLM loads: hands each hook to the half of its process.

The frontend loads it too, so importing it loads neither worker nor core.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from .compat import check_supported
from .messages import StepOrders
from .scheduler import Scheduler
from .settings import Settings
from .stats import PromMetrics, Stats

if TYPE_CHECKING:
    from .worker import Worker


class KvxferConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """Disaggregated prefill over kvxfer. See docs/vllm.md."""

    _cache_hit_source = CacheHitSource.P2P

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        settings = Settings.of(self._kv_transfer_config.kv_connector_extra_config)
        check_supported(vllm_config, kv_cache_config)
        self._scheduler: Scheduler | None = None
        self._worker: Worker | None = None
        self._done: object = None  # the orders that were carried out last
        if role == KVConnectorRole.SCHEDULER:
            self._scheduler = Scheduler(vllm_config, kv_cache_config, settings)
        else:
            from .worker import Worker

            self._worker = Worker(vllm_config, kv_cache_config, settings)

    @property
    def scheduler(self) -> Scheduler:
        assert self._scheduler is not None, "a hook of the scheduler was called on a worker"
        return self._scheduler

    @property
    def worker(self) -> Worker:
        assert self._worker is not None, "a hook of the worker was called on the scheduler"
        return self._worker

    # --- worker ---

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        self.worker.register(kv_caches)

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        return self.worker.handshake()

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        # The first hook of a step: what is withdrawn here ends before its blocks are overwritten.
        if isinstance(kv_connector_metadata, StepOrders):
            self._done = kv_connector_metadata
            self.worker.step(kv_connector_metadata)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        orders = self._connector_metadata
        if isinstance(orders, StepOrders):
            if orders is not self._done:
                self.handle_preemptions(orders)
            # Only here has the stream been told of this step's zeroing of blocks, and of all steps
            # whose requests had the blocks before.
            self.worker.start_loads()

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Loads end before vLLM schedules their requests: there is nothing to wait for."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any
    ) -> None:
        self.worker.layer_written(layer_name)

    def wait_for_save(self) -> None:
        self.worker.step_written()

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        results = self.worker.results()
        return KVConnectorTransferResults(
            finished_sending=results.sent,
            finished_recving=results.loaded,
            failed_recving=results.failed,
        )

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        results = self.get_transfer_results(finished_req_ids)
        return results.finished_sending or None, results.finished_recving or None

    def get_kv_connector_stats(self) -> Stats | None:
        return (self._worker or self.scheduler).stats.take()

    # --- scheduler ---

    def set_xfer_handshake_metadata(
        self, metadata: dict[int, KVConnectorHandshakeMetadata]
    ) -> None:
        self.scheduler.set_handshakes({(0, rank): each for rank, each in metadata.items()})

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        self.scheduler.set_handshakes(metadata)

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        super().bind_kv_cache_manager(kv_cache_manager)
        self.scheduler.logs = not kv_cache_manager.log_stats

    def on_new_request(self, request: Any) -> None:
        self.scheduler.on_new_request(request)

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        return self.scheduler.num_new_matched_tokens(request, num_computed_tokens)

    def get_loaded_kv_cache_group_ids(self, request: Any) -> tuple[int, ...]:
        groups: tuple[int, ...] = self._kv_cache_config.transfer_group_ids
        return groups

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self.scheduler.after_alloc(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        return self.scheduler.build(scheduler_output)

    def update_connector_output(self, connector_output: Any) -> None:
        self.scheduler.update(connector_output)

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.scheduler.finished(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.scheduler.finished(request, block_ids)

    def has_pending_block_frees(self) -> bool:
        return self.scheduler.sending

    # --- both ---

    def shutdown(self) -> None:
        if self._worker is not None:
            self._worker.close()

    # --- any process ---

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        return bool(extra_config.get("concurrent", True))

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> Stats | None:
        return Stats(data)

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> PromMetrics | None:
        return PromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)
