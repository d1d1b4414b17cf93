"""A connector that notes when layers are written and when bytes arrive, on the host's clock."""

from __future__ import annotations

import json
import os
import threading
import time
from pathlib import Path
from typing import Any

from kvxfer.integrations.vllm_connector.connector import KvxferConnector as Plain

FILE = "KVXFER_RIG_TRACE"
"""Names the file that events are added to, one JSON object a line."""
_LOOK = 0.001  # seconds


class KvxferConnector(Plain):
    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        super().register_kv_caches(kv_caches)
        self._file = Path(os.environ[FILE]).open("a", buffering=1)  # noqa: SIM115 - for good
        threading.Thread(target=self._sample, daemon=True).start()

    def handle_preemptions(self, kv_connector_metadata: Any) -> None:
        for send in getattr(kv_connector_metadata, "send", ()):
            self._note("offer", request=send.request, early=not send.ready)
        super().handle_preemptions(kv_connector_metadata)

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kw: Any) -> None:
        self._note("layer", layer=layer_name)
        super().save_kv_layer(layer_name, kv_layer, attn_metadata, **kw)

    def _note(self, what: str, **more: Any) -> None:
        self._file.write(json.dumps({"at": time.monotonic(), "what": what, **more}) + "\n")

    def _sample(self) -> None:
        """Note each change of what has arrived and was verified."""
        agent = self.worker._agent
        before = 0
        while True:
            received = agent.stats.bytes_received
            if received != before:
                self._note("received", bytes=received - before)
                before = received
            time.sleep(_LOOK)
