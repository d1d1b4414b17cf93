"""A request on its way through the simulated fleet."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvxfer.serving.workload import Job

if TYPE_CHECKING:
    from kvxfer.serving.decide import Decision
    from kvxfer.serving.sim.engine import Engine
    from kvxfer.serving.sim.network import Flow


class Task:
    """State of one request. What it holds of an engine's memory stands in a `Hold`."""

    __slots__ = (
        "arrived",
        "awaits_kv",
        "decision",
        "decode",
        "finish_step",
        "finished",
        "first",
        "flow",
        "index",
        "job",
        "joined_step",
        "kv_hold",
        "last",
        "prefill",
        "prefill_done",
        "prefill_hold",
        "preemptions",
        "produced",
        "tail",
        "to_prefill",
        "start_context",
    )

    def __init__(self, index: int, job: Job, arrived: float) -> None:
        self.index = index
        self.job = job
        self.arrived = arrived
        self.decision: Decision | None = None
        self.decode: Engine | None = None
        self.prefill: Engine | None = None
        self.awaits_kv = False
        self.to_prefill = 0
        """Tokens still to be computed where it is being prefilled."""
        self.prefill_hold: Hold | None = None
        self.kv_hold: Hold | None = None
        self.flow: Flow | None = None
        self.tail = 0.0
        """Bytes that are sent only when the prefill has ended."""
        self.prefill_done = False
        self.produced = 0
        self.joined_step = 0
        self.start_context = 0
        self.finish_step = 0
        self.first = -1.0
        self.last = -1.0
        self.finished = False
        self.preemptions = 0


class Hold:
    """Blocks that a task has pinned in one engine's memory."""

    __slots__ = ("cached", "ids", "private")

    def __init__(self, ids: tuple[int, ...], private: int, cached: int) -> None:
        self.ids = ids
        self.private = private
        self.cached = cached
        """Tokens that were there before."""
