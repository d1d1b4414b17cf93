"""A second connector for MultiConnector: keeps the blocks of each finished request for a while."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorTransferResults,
    SupportsHMA,
)

STEPS = 3


@dataclass
class Kept(KVConnectorMetadata):
    requests: list[str] = field(default_factory=list)


class KeepingConnector(KVConnectorBase_V1, SupportsHMA):
    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._finished: list[str] = []
        self._kept: dict[str, int] = {}

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, None]:
        kept = request.num_computed_tokens > 0 and request.status.name != "FINISHED_ABORTED"
        if kept:
            self._finished.append(request.request_id)
        return kept, None

    def build_connector_meta(self, scheduler_output: Any) -> Kept:
        kept, self._finished = Kept(self._finished), []
        return kept

    def bind_connector_metadata(self, connector_metadata: Kept) -> None:
        super().bind_connector_metadata(connector_metadata)
        self._kept.update(dict.fromkeys(connector_metadata.requests, STEPS))

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        results = KVConnectorTransferResults()
        for name in list(self._kept):
            self._kept[name] -= 1
            if not self._kept[name]:
                del self._kept[name]
                results.finished_sending.add(name)
        return results

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Any:
        return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        pass

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        pass

    def wait_for_layer_load(self, layer_name: str) -> None:
        pass

    def save_kv_layer(self, *given: Any, **kwargs: Any) -> None:
        pass

    def wait_for_save(self) -> None:
        pass
