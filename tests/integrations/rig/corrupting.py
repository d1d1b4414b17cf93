"""A connector that breaks what it has loaded, for the negative control of the engine tests."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from kvxfer.integrations.vllm_connector.connector import KvxferConnector as Sound

SWITCH = "KVXFER_RIG_BREAK"
"""Names a file; the connector breaks what it loads as long as that is there."""


class KvxferConnector(Sound):
    """Zeroes the first block of each request that it loads, while it is told to."""

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        super().register_kv_caches(kv_caches)
        self._tensors = list(kv_caches.values())
        self._first: dict[str, int] = {}

    def handle_preemptions(self, kv_connector_metadata: Any) -> None:
        for load in kv_connector_metadata.load:
            if load.parts:
                self._first[load.request] = load.parts[0].blocks[0]
        super().handle_preemptions(kv_connector_metadata)

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        results = super().get_transfer_results(finished_req_ids)
        broken = Path(os.environ[SWITCH]).exists()
        for request in results.finished_recving if broken else ():
            for tensor in self._tensors:
                tensor[self._first.get(request, 0)] = 0
        return results
