"""What happens in one round of a campaign: who is there, what they do, what is done to them.

A schedule is data, drawn from a seed in `draw`, so that a round can be repeated, cut down and
printed. A step whose subject is not there (any more) does nothing, which is what makes
cutting down possible.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

from kvtest import ucx
from kvtest.caches import Geometry
from kvtest.fake_gpu import HOST

LAYERS = ("a", "b", "c")
HEADS = (0, 4)
CONTENT = 16
PROBES = 1_000_000  # numbers from here on are of fetches that see whether all works
# "namespaces" is tcp between network namespaces, where those can be made; "verbs" takes adapters
# that exist in one process only, "rdma" those that KVXFER_TEST_VERBS names.
TRANSPORTS = ("loopback", "shm", "tcp", "namespaces", "verbs", "rdma", *ucx.LANES)
# The same with caches on GPUs that are made up, in each process some of its own.
GPU_LANES = tuple(f"gpu-{name}" for name in ("shm", "verbs", "tcp", "loopback", *ucx.LANES))
CODECS = ("raw", "raw", "raw", "int8", "fp8_e4m3", "fp8_e5m2", "auto")


@dataclasses.dataclass(frozen=True)
class AgentPlan:
    """An agent of the fleet. A `rank` holds some of the heads, a `producer` all, both offer."""

    name: str
    role: str  # "producer", "rank" or "consumer"
    geometry: Geometry
    knobs: tuple[tuple[str, Any], ...] = ()
    device: int = HOST  # the GPU that its cache is on
    streams: bool = False  # blocks are filled, and emptied, by a stream that does so late


@dataclasses.dataclass(frozen=True)
class OfferPlan:
    """An offer that may be made in the round; its number is its place in `Schedule.offers`."""

    owners: tuple[str, ...]  # one producer, or the ranks
    tokens: int
    first_token: int = 0
    lease: float = 30.0
    consumers: int = 1
    ready: bool = True
    heads: tuple[int, int] = HEADS
    names_incarnation: bool = True


@dataclasses.dataclass(frozen=True)
class Step:
    """Something that happens `after` so many seconds have passed since the step before."""

    after: float
    kind: str
    args: dict[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Schedule:
    seed: int
    transport: str
    agents: tuple[AgentPlan, ...]
    offers: tuple[OfferPlan, ...]
    steps: tuple[Step, ...]
    calm: bool = False  # nothing goes wrong, so every fetch must deliver
    secret: str | None = None
    tls: bool = False
    gpus: str = ""  # whose they are, "cuda" or "hip", if there are any
    environment: tuple[tuple[str, str], ...] = ()  # of the processes

    def keep(self, steps: Sequence[int]) -> Schedule:
        """Return this schedule with some of its steps alone."""
        return dataclasses.replace(self, steps=tuple(self.steps[i] for i in steps))

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), separators=(",", ":"))

    @staticmethod
    def from_json(text: str) -> Schedule:
        raw = json.loads(text)
        return Schedule(
            raw["seed"],
            raw["transport"],
            tuple(
                AgentPlan(
                    agent["name"],
                    agent["role"],
                    _geometry(agent["geometry"]),
                    tuple((name, value) for name, value in agent["knobs"]),
                    agent.get("device", HOST),
                    agent.get("streams", False),
                )
                for agent in raw["agents"]
            ),
            tuple(
                OfferPlan(
                    **{
                        name: tuple(value) if isinstance(value, list) else value
                        for name, value in offer.items()
                    }
                )
                for offer in raw["offers"]
            ),
            tuple(Step(step["after"], step["kind"], step["args"]) for step in raw["steps"]),
            raw["calm"],
            raw["secret"],
            raw.get("tls", False),
            raw.get("gpus", ""),
            tuple((name, value) for name, value in raw.get("environment", ())),
        )


def _geometry(raw: dict[str, Any]) -> Geometry:
    fields = {n: tuple(v) if isinstance(v, list) else v for n, v in raw.items()}
    return Geometry(**fields)
