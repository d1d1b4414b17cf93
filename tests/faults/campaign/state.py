"""What a node knows: its agents, their caches, what they have under way."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable
from typing import Any

from faults.campaign.gpu_cache import WatchedCache
from faults.campaign.schedule import AgentPlan, OfferPlan
from kvtest.caches import Geometry, Paged

import kvxfer


class AwakeClock(threading.Thread):
    """Seconds in which this process could run: it stands still while the process is stopped."""

    def __init__(self) -> None:
        super().__init__(daemon=True, name="campaign-clock")
        self.seconds = 0.0
        self._actions: list[tuple[float, Callable[[], None]]] = []

    def run(self) -> None:
        before = time.monotonic()
        while True:
            time.sleep(0.02)
            now = time.monotonic()
            self.seconds += min(now - before, 0.1)
            before = now
            for entry in [entry for entry in self._actions if entry[0] <= now]:
                entry[1]()
                self._actions.remove(entry)

    def after(self, seconds: float, action: Callable[[], None]) -> None:
        """Do something then, by the usual clock, whatever other threads are waiting for."""
        self._actions.append((time.monotonic() + seconds, action))

    @property
    def pending(self) -> int:
        return len(self._actions)


@dataclasses.dataclass
class Place:
    """An agent with its cache."""

    plan: AgentPlan
    agent: kvxfer.Agent
    paged: Paged
    free: list[int]
    held: list[tuple[Fetching, str]] = dataclasses.field(default_factory=list)

    @property
    def late(self) -> WatchedCache | None:
        """The cache, if a stream writes into it."""
        paged = self.paged
        return paged if isinstance(paged, WatchedCache) and paged.stream is not None else None

    @property
    def stream(self) -> int | None:
        return self.late and self.late.stream


@dataclasses.dataclass
class Fetching:
    place: Place
    fetch: kvxfer.Fetch
    number: int
    blocks: list[int]
    tokens: tuple[int, int]
    first_slot: int
    timeout: float
    deadline: float  # the same by the awake clock
    shared: bool = False  # its block belongs to a burst
    reported: bool = False
    judged: bool = False


@dataclasses.dataclass
class Offering:
    place: Place
    offer: kvxfer.Offer
    blocks: list[int]


@dataclasses.dataclass
class State:
    """`say` sends an event to the driver, `sabotage` is what to do wrong, see `Node`."""

    say: Callable[[dict[str, Any]], None]
    sabotage: str | None
    # A GPU was given up: what it was told it may do late, in blocks of fetches that have failed.
    doubtful: bool = False
    clock: AwakeClock = dataclasses.field(default_factory=AwakeClock)
    places: dict[str, Place] = dataclasses.field(default_factory=dict)
    plans: dict[int, OfferPlan] = dataclasses.field(default_factory=dict)
    sources: dict[int, Geometry] = dataclasses.field(default_factory=dict)
    offers: dict[tuple[int, str], Offering] = dataclasses.field(default_factory=dict)
    fetches: dict[int, Fetching] = dataclasses.field(default_factory=dict)
    bursts: dict[int, list[Fetching]] = dataclasses.field(default_factory=dict)

    def say_fault(self, what: str, why: str) -> None:
        self.say({"event": "fault", "what": what, "why": why})
