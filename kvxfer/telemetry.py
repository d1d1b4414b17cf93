"""Counters, histograms and the flight recorder of an agent, and Prometheus' view of them."""

from __future__ import annotations

import json
import os
import platform
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

if TYPE_CHECKING:
    from kvxfer import _core
    from kvxfer.agent import Agent

TRACE_VERSION = 1
_NO_CHUNK = (1 << 32) - 1
# What an agent holds now, and what it has counted since it began: fields of `Agent.stats`.
GAUGES = {
    "offers": "offers that are open",
    "serving": "fetches that are being answered",
    "fetches": "fetches under way",
    "peers": "connections, in both directions",
    "slots": "slots of the staging arena",
    "free_slots": "slots that nobody holds",
    "quarantined_slots": "slots of cancelled fetches that a peer may still write into",
    "held_bytes": "bytes that peers' layouts and open fetches take, bounded by peer_bytes",
}
COUNTERS = {
    "bytes_sent": "bytes of KV that were packed and sent",
    "bytes_received": "bytes of KV that arrived and were verified",
    "wire_bytes_sent": "the same bytes sent, as they were encoded",
    "wire_bytes_received": "the same bytes received, as they were encoded",
    "digest_errors": "chunks whose digest did not fit",
}
ENDS = {
    "fetch_ends": "fetches that have ended, by status",
    "offer_ends": "offers that have ended, by status",
    "refusals": "fetches of peers that were refused, by status",
}
HISTOGRAMS = {
    "fetch_seconds": "from fetch() to its end",
    "offer_seconds": "from offer() to its end",
    "pack_seconds": "packing one chunk, digest included",
    "write_seconds": "until a transport has taken one chunk",
    "verify_seconds": "unpacking one chunk, digest included",
}


class HistogramDict(TypedDict):
    """How often something took how long."""

    bounds: list[float]
    """Upper bounds of the buckets, in seconds; the last bucket has none."""
    counts: list[int]
    """One more than there are bounds. Not cumulative."""
    sum: float
    """Seconds, all together."""
    count: int


class Metrics(TypedDict):
    """What `Agent.metrics` returns."""

    gauges: dict[str, int]
    counters: dict[str, int]
    events: dict[str, int]
    """How often each kind of event of the flight recorder has been noted."""
    ends: dict[str, dict[str, int]]
    histograms: dict[str, HistogramDict]


def metrics_of(core: _core.Agent) -> Metrics:
    """Return everything that an agent counts."""
    stats, metrics = core.stats(), core.metrics()
    return {
        "gauges": {name: getattr(stats, name) for name in GAUGES},
        "counters": {name: getattr(stats, name) for name in COUNTERS},
        "events": metrics.counts,
        "ends": {name: getattr(metrics, name) for name in ENDS},
        "histograms": {name: _histogram(getattr(metrics, name)) for name in HISTOGRAMS},
    }


def _histogram(found: tuple[list[float], list[int], float]) -> HistogramDict:
    bounds, counts, total = found
    return {"bounds": bounds, "counts": counts, "sum": total, "count": sum(counts)}


def write_trace(core: _core.Agent, name: str, path: str | os.PathLike[str], reason: str) -> None:
    """Write what the flight recorder holds as JSON lines: about the agent, then its events."""
    unix_nanos, dropped, events = core.trace()
    header = {
        "kind": "trace",
        "version": TRACE_VERSION,
        "agent": name,
        "host": platform.node(),
        "pid": os.getpid(),
        "unix_nanos": unix_nanos,
        "dropped": dropped,
        "reason": reason,
    }
    with Path(path).open("w", encoding="utf-8") as file:
        file.write(json.dumps(header) + "\n")
        for event in events:
            file.write(json.dumps(_event(*event)) + "\n")


def _event(
    nanos: int,
    duration: int,
    kind: str,
    request: int,
    offer: str,
    peer: int,
    chunk: int,
    nbytes: int,
    status: str,
) -> dict[str, Any]:
    event: dict[str, Any] = {"nanos": nanos, "event": kind, "request": f"{request:016x}"}
    optional = {
        "took": duration,
        "offer": offer,
        "peer": peer,
        "chunk": None if chunk == _NO_CHUNK else chunk,
        "bytes": nbytes,
        "status": "" if status == "OK" else status,
    }
    # A chunk may be number 0; the others say nothing when they are.
    event |= {
        key: value for key, value in optional.items() if value or (key, value) == ("chunk", 0)
    }
    return event


class FailureTraces:
    """Writes traces of failures into a folder: one a second at most, and only so many."""

    _MOST = 20

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)
        self._lock = threading.Lock()
        self._written = 0
        self._next = 0.0

    def note(self, core: _core.Agent, name: str, reason: str) -> None:
        """Write one, unless there were too many. Never raises: the failure is what matters."""
        with self._lock:
            now = time.monotonic()
            if self._written >= self._MOST or now < self._next:
                return
            self._next = now + 1.0
            self._written += 1
            number = self._written
        safe = "".join(letter if letter.isalnum() or letter in "-_." else "_" for letter in name)
        safe = safe.encode()[:80].decode(errors="ignore")  # names of files have 255 bytes at most
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            target = self._folder / f"kvxfer-{safe}-{os.getpid()}-{number:02}.jsonl"
            write_trace(core, name, target, reason)
        except OSError:
            pass  # a full disk must not make two failures of one


class AgentCollector:
    """An agent's counters as Prometheus collects them. Needs prometheus-client.

    Ends of fetches and offers have a label ``status``; everything has a label ``agent``.

    Parameters
    ----------
    agent
        It is not kept alive; once it is gone nothing is collected any more.

    Examples
    --------
    >>> from prometheus_client import REGISTRY, start_http_server
    >>> REGISTRY.register(kvxfer.telemetry.AgentCollector(agent))
    >>> start_http_server(9400)
    """

    def __init__(self, agent: Agent) -> None:
        from prometheus_client import core  # says now that it is missing

        self._families = core
        self._agent = weakref.ref(agent)
        self._name = agent.name

    def describe(self) -> list[Any]:
        """Return nothing: two agents of one process have the same metrics."""
        return []

    def collect(self) -> Iterator[Any]:
        """Yield the metric families."""
        from kvxfer.errors import ClosedError

        agent = self._agent()
        if agent is None:
            return
        try:
            metrics = agent.metrics()
        except ClosedError:  # after a fork, in the child
            return
        make, name = self._families, self._name
        for field, about in GAUGES.items():
            gauge = make.GaugeMetricFamily(f"kvxfer_{field}", about, labels=["agent"])
            gauge.add_metric([name], metrics["gauges"][field])
            yield gauge
        for field, about in COUNTERS.items():
            counter = make.CounterMetricFamily(f"kvxfer_{field}", about, labels=["agent"])
            counter.add_metric([name], metrics["counters"][field])
            yield counter
        for field, about in ENDS.items():
            ends = make.CounterMetricFamily(f"kvxfer_{field}", about, labels=["agent", "status"])
            for status, count in sorted(metrics["ends"][field].items()):
                ends.add_metric([name, status], count)
            yield ends
        for field, about in HISTOGRAMS.items():
            family = make.HistogramMetricFamily(f"kvxfer_{field}", about, labels=["agent"])
            found = metrics["histograms"][field]
            total, buckets = 0, []
            for bound, count in zip([*found["bounds"], None], found["counts"], strict=True):
                total += count
                buckets.append(("+Inf" if bound is None else f"{bound:g}", total))
            family.add_metric([name], buckets, found["sum"])
            yield family
