"""Schedules in which an agent is killed, or stopped, at each kind of message in turn."""

from __future__ import annotations

from typing import Any

from faults.campaign.outcome import Finding, Outcome
from faults.campaign.schedule import (
    CONTENT,
    HEADS,
    LAYERS,
    AgentPlan,
    OfferPlan,
    Schedule,
    Step,
)
from faults.campaign.watch import FIRST, KINDS
from kvtest.caches import Geometry

AGENTS = ("prefill", "decode")
# How, and for how many seconds: a stopped process is missed by its peer after one second.
WAYS = (("kill", 0.0), ("stop", 0.2), ("stop", 1.5))

_SIDE = Geometry(layers=LAYERS, content=CONTENT, heads=HEADS, num_blocks=64)
# More chunks than slots, and no fetch so small that it goes another way.
_KNOBS: dict[str, Any] = {
    "arena_bytes": 24 << 10,
    "chunk_bytes": 8 << 10,
    "tcp_chunk_bytes": 8 << 10,
    "window": 1,
    "inline_bytes": 0,
    "heartbeat_interval": 0.1,
    "heartbeat_timeout": 1.0,
    "handshake_timeout": 2.0,
}


class _Drawing:
    def __init__(self) -> None:
        self.offers: list[OfferPlan] = []
        self.steps: list[Step] = []
        self.fetches = 0

    def offer(self) -> int:
        self.offers.append(OfferPlan(("prefill",), 64, consumers=2, ready=False))
        return len(self.offers) - 1

    def step(self, kind: str, after: float = 0.0, **args: Any) -> None:
        self.steps.append(Step(after, kind, args))

    def ask(self, kind: str, number: int, after: float = 0.0, **args: Any) -> int:
        asked, self.fetches = self.fetches, self.fetches + 1
        args = {"id": asked, "number": number, "consumer": "decode", "timeout": 3.0, **args}
        self.step(kind, after, **args)
        return asked

    def fetch(self, number: int, after: float = 0.0) -> int:
        return self.ask("fetch", number, after, skip=0, codec="raw")


def sweep_schedule(
    agent: str, how: str, seconds: float, kinds: tuple[str, ...] = KINDS
) -> Schedule:
    """Return a round in which that happens to an agent once for each kind of message."""
    drawing = _Drawing()
    for kind in kinds:
        strike = {"agent": agent, "producer": "prefill", "how": how, "at": kind}
        drawing.step("strike", **strike, seconds=seconds)
        offered, rejected, never = (drawing.offer() for _ in range(3))
        drawing.step("reject", number=rejected)
        drawing.fetch(rejected)
        drawing.step("offer", number=offered)
        drawing.fetch(offered)
        waiting = drawing.fetch(never)
        drawing.ask("decline", rejected)
        drawing.step("renew", 0.05, number=offered, consumer="decode")
        for layer in LAYERS:
            drawing.step("ready", 0.01, number=offered, layer=layer)
        drawing.step("cancel", 0.05, id=waiting)
        if kind == "BYE":
            drawing.step("close", agent=agent)
        elif kind in FIRST:  # by then it is known that the connection is gone
            drawing.fetch(rejected, after=0.2)
        drawing.step("rest")
    agents = tuple(
        AgentPlan(name, role, _SIDE, tuple(_KNOBS.items()))
        for name, role in zip(AGENTS, ("producer", "consumer"), strict=True)
    )
    return Schedule(0, "tcp", agents, tuple(drawing.offers), tuple(drawing.steps))


def missed(outcome: Outcome, how: str, kinds: tuple[str, ...] = KINDS) -> list[Finding]:
    """Say which kinds of messages nothing happened at."""
    return [
        Finding("unexplained", f"no {kind} passed at which to {how}")
        for kind in kinds
        if not outcome.faults[f"{how} at {kind}"]
    ]
