"""Counts of transfers, for vLLM's log line and Prometheus."""

from __future__ import annotations

import copy
from typing import Any

from prometheus_client import Counter, Histogram
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)
from vllm.v1.metrics.utils import create_metric_per_engine

_COUNTERS = {
    "loads": "Requests whose KV was fetched from a prefill engine.",
    "loaded_bytes": "Bytes of KV that were fetched and verified.",
    "wire_bytes": "Bytes that these were on their way, after encoding.",
    "loaded_tokens": "Prompt tokens whose KV was fetched.",
    "chunks": "Chunks that fetches were made of.",
    "recomputed_tokens": "Prompt tokens that were to be fetched and were not.",
    "sends": "Requests whose KV was fetched by decode engines.",
    "sent_bytes": "Bytes of KV that decode engines fetched.",
    "sent_wire_bytes": "Bytes that these were on their way, after encoding.",
    "leases_expired": "Requests whose KV nobody fetched in time.",
    "sends_ended": "Requests whose KV was given up before it was fetched.",
    "declined": "Offers that this decode engine gave back without fetching them.",
    "stale_tickets": "Loads that were refused because what they asked for is gone.",
    "stale_refused": "Fetches that a prefill engine refused because what they asked for is gone.",
    "prefills_without_params": "Requests that came to a decode engine without kv_transfer_params.",
}
_TIMES = {
    "load_seconds": "From the order to load a request's KV to its end.",
    "send_seconds": "From the offer of a request's KV to its release.",
}
_BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60)


class Stats(KVConnectorStats):  # type: ignore[misc]
    """Counters by name, times as lists, and failures by reason; plain types only."""

    data: dict[str, Any]

    def __init__(self, data: dict[str, Any] | None = None) -> None:
        super().__init__(data=data if data is not None else {})

    def add(self, **counts: float) -> None:
        for name, count in counts.items():
            self.data[name] = self.data.get(name, 0) + count

    def took(self, name: str, seconds: float) -> None:
        self.data.setdefault(name, []).append(seconds)

    def failed(self, reason: str) -> None:
        failures = self.data.setdefault("failures", {})
        failures[reason] = failures.get(reason, 0) + 1

    def take(self) -> Stats | None:
        """Return what was counted since the last call, None if nothing was."""
        if self.is_empty():
            return None
        taken = Stats(self.data)
        self.data = {}
        return taken

    def reset(self) -> None:
        self.data = {}

    def is_empty(self) -> bool:
        return not self.data

    def aggregate(self, other: KVConnectorStats) -> Stats:
        for name, value in other.data.items():
            if isinstance(value, dict):
                ours = self.data.setdefault(name, {})
                for reason, count in value.items():
                    ours[reason] = ours.get(reason, 0) + count
            elif name in self.data:
                self.data[name] = self.data[name] + value
            else:
                self.data[name] = copy.copy(value)
        return self

    def reduce(self) -> dict[str, int | float]:
        reduced: dict[str, int | float] = {}
        for name, value in self.data.items():
            if isinstance(value, list):
                ordered = sorted(value)
                reduced[f"{name} median"] = round(ordered[len(ordered) // 2], 4)
                reduced[f"{name} max"] = round(ordered[-1], 4)
            elif isinstance(value, dict):
                reduced.update({f"{name} {reason}": count for reason, count in value.items()})
            else:
                reduced[name] = value
        seconds = sum(self.data.get("load_seconds", ()))
        if seconds:
            reduced["GB/s"] = round(self.data.get("loaded_bytes", 0) / seconds / 1e9, 3)
        if self.data.get("wire_bytes"):
            reduced["codec ratio"] = round(self.data["loaded_bytes"] / self.data["wire_bytes"], 2)
        return reduced


class PromMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """The same as Prometheus metrics, ``vllm:kvxfer_...``."""

    def __init__(
        self,
        vllm_config: Any,  # noqa: ANN401 - as vLLM declares them
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        labels = per_engine_labelvalues
        self._counters = {
            name: create_metric_per_engine(
                metric_types[Counter](
                    name=f"vllm:kvxfer_{name}", documentation=about, labelnames=labelnames
                ),
                labels,
            )
            for name, about in _COUNTERS.items()
        }
        self._times = {
            name: create_metric_per_engine(
                metric_types[Histogram](
                    name=f"vllm:kvxfer_{name}",
                    documentation=about,
                    buckets=_BUCKETS,
                    labelnames=labelnames,
                ),
                labels,
            )
            for name, about in _TIMES.items()
        }
        self._failures = metric_types[Counter](
            name="vllm:kvxfer_failures",
            documentation="Loads that failed, by reason.",
            labelnames=[*labelnames, "reason"],
        )

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for name, value in transfer_stats_data.items():
            if name in self._counters:
                self._counters[name][engine_idx].inc(value)
            elif name in self._times:
                for seconds in value:
                    self._times[name][engine_idx].observe(seconds)
            elif name == "failures":
                for reason, count in value.items():
                    values = [*self.per_engine_labelvalues[engine_idx], reason]
                    self._failures.labels(*values).inc(count)
