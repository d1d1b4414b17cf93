"""Draws schedules: everything random in a campaign comes from here."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from typing import Any

from faults.campaign import gpu_faults
from faults.campaign.proxy import MET
from faults.campaign.schedule import (
    CODECS,
    CONTENT,
    HEADS,
    LAYERS,
    AgentPlan,
    OfferPlan,
    Schedule,
    Step,
)
from faults.campaign.shortage import ADAPTER_FAULTS
from faults.campaign.watch import HANDSHAKE, KINDS
from kvtest import fake_verbs, ucx
from kvtest.caches import Geometry
from kvtest.fake_gpu import HOST

# Where there are GPUs, their kernels run as fibers and take their time.
_LEASES = ((0.05, 0.3, 1.0, 2.0, 30.0), (0.05, 1.0, 3.0, 30.0, 30.0))
_TIMEOUTS = ((0.01, 0.3, 1.0, 3.0, 3.0), (0.05, 1.0, 3.0, 5.0, 8.0))


def _draw_geometry(
    draw: random.Random, heads: tuple[int, int], dtype: str, num_blocks: int
) -> Geometry:
    axes, packed = draw.choice(
        [("BHNC", False), ("BNHC", False), ("PBNHC", False), ("BPHNC", False), ("BNHC", True)]
    )
    return Geometry(
        axes=axes,
        packed=packed,
        layers=LAYERS,
        content=CONTENT,
        heads=heads,
        block_size=draw.choice([8, 16]),
        num_blocks=num_blocks,
        dtype=dtype,
    )


def _draw_knobs(draw: random.Random, transport: str) -> tuple[tuple[str, Any], ...]:
    chunk = draw.choice([8, 16, 32]) << 10
    knobs: dict[str, Any] = {
        "arena_bytes": chunk * draw.choice([3, 8, 16]),
        "chunk_bytes": chunk,
        "tcp_chunk_bytes": chunk,
        "window": draw.choice([1, 4, 8]),
        "threads": draw.choice([1, 2]),
        "heartbeat_interval": 0.1,
        "heartbeat_timeout": 1.0,
        "handshake_timeout": 2.0,
        "inline_bytes": draw.choice([0, 16 << 10, 128 << 10]),
    }
    if transport in ("tcp", "namespaces"):
        knobs["tcp_streams"] = draw.choice([1, 2, 3])
    return tuple(knobs.items())


def _draw_fleet(draw: random.Random, transport: str) -> tuple[AgentPlan, ...]:
    dtype = draw.choice(["bfloat16", "bfloat16", "float16"])

    def plan(name: str, role: str, heads: tuple[int, int] = HEADS) -> AgentPlan:
        kind = dtype
        if role == "consumer" and draw.random() < 0.2:
            kind = "float32"
        geometry = _draw_geometry(draw, heads, kind, draw.choice([64, 128]))
        return AgentPlan(name, role, geometry, _draw_knobs(draw, transport))

    agents = [plan(f"prefill-{i}", "producer") for i in range(draw.choice([1, 2]))]
    if draw.random() < 0.4:
        agents += [plan("rank-0", "rank", (0, 2)), plan("rank-1", "rank", (2, 4))]
    agents += [plan(f"decode-{i}", "consumer") for i in range(draw.choice([1, 2, 2]))]
    if transport in ("verbs", "rdma"):
        path = draw.choice(["direct", "direct", "auto", "staged"])
        agents = [dataclasses.replace(a, knobs=(*a.knobs, ("path", path))) for a in agents]
        if draw.random() < 0.6:  # caches of one kind, for which it is
            agents = [_like(agents[0].geometry, agent) for agent in agents]
    return tuple(agents)


def _like(geometry: Geometry, agent: AgentPlan) -> AgentPlan:
    mine = dataclasses.replace(geometry, heads=agent.geometry.heads)
    return dataclasses.replace(agent, geometry=mine)


class _Drawing:
    """Draws the steps of one schedule."""

    def __init__(
        self,
        draw: random.Random,
        agents: tuple[AgentPlan, ...],
        transport: str,
        vendor: str = "",
        hang: bool = False,
    ) -> None:
        self.draw, self.agents, self.transport, self.vendor = draw, agents, transport, vendor
        self.hang = hang
        self.names_incarnation = draw.random() < 0.7
        self.offers: list[OfferPlan] = []
        self.made: set[int] = set()
        self.fetches = 0

    def names(self, *roles: str) -> list[str]:
        return [agent.name for agent in self.agents if agent.role in roles]

    def producer(self) -> str:
        return self.draw.choice(self.names("producer", "rank"))

    def anyone(self) -> str:
        return self.draw.choice(self.agents).name

    def chance(self, of: float) -> bool:
        return self.draw.random() < of

    def new_offer(self, calm: bool) -> int:
        draw, ranks = self.draw, self.names("rank")
        owners = tuple(ranks) if ranks and draw.random() < 0.4 else None
        self.offers.append(
            OfferPlan(
                owners=owners or (draw.choice(self.names("producer")),),
                tokens=draw.choice([1, 7, 16, 40, 64, 100]),
                first_token=draw.choice([0, 0, 0, 5, 32]),
                lease=30.0 if calm else draw.choice(_LEASES[bool(self.vendor)]),
                consumers=draw.choice([1, 1, 1, 2, 3]),
                ready=draw.random() < 0.6,
                names_incarnation=self.names_incarnation,
            )
        )
        return len(self.offers) - 1

    def recent(self) -> int:
        return self.draw.randrange(max(0, len(self.offers) - 6), len(self.offers))

    def offer(self) -> list[tuple[str, dict[str, Any]]]:
        pending = [n for n in range(len(self.offers)) if n not in self.made]
        number = pending[0] if pending else self.new_offer(False)
        self.made.add(number)
        return [("offer", {"number": number})]

    def fetch(self) -> list[tuple[str, dict[str, Any]]]:
        draw = self.draw
        # Now and then before the offer is there.
        number = self.new_offer(False) if not self.offers or draw.random() < 0.15 else self.recent()
        plan = self.offers[number]
        first = draw.randrange(plan.tokens) if draw.random() < 0.3 else 0
        args = {
            "id": self.fetches,
            "number": number,
            "consumer": draw.choice(self.names("consumer")),
            "skip": first,
            "timeout": draw.choice(_TIMEOUTS[bool(self.vendor)]),
            "codec": draw.choice(CODECS),
        }
        self.fetches += 1
        return [("fetch", args)]

    def ready(self) -> list[tuple[str, dict[str, Any]]]:
        if not self.offers:
            return []
        number = self.recent()
        if self.draw.random() < 0.5:
            return [("ready", {"number": number, "layer": layer}) for layer in LAYERS]
        return [("ready", {"number": number, "layer": self.draw.choice(LAYERS)})]

    def release(self) -> list[tuple[str, dict[str, Any]]]:
        return [("release", {"number": self.recent()})] if self.offers else []

    def cancel(self) -> list[tuple[str, dict[str, Any]]]:
        if not self.fetches:
            return []
        return [("cancel", {"id": self.draw.randrange(max(0, self.fetches - 8), self.fetches)})]

    def give_up(self) -> list[tuple[str, dict[str, Any]]]:
        return [("give_up", args) for _, args in self.cancel()]

    def decline(self) -> list[tuple[str, dict[str, Any]]]:
        number = self.new_offer(False) if not self.offers or self.chance(0.2) else self.recent()
        args = {
            "id": self.fetches,
            "number": number,
            "consumer": self.draw.choice(self.names("consumer")),
            "timeout": self.draw.choice([0.1, 1.0, 3.0]),
        }
        self.fetches += 1
        return [("decline", args)]

    def renew(self) -> list[tuple[str, dict[str, Any]]]:
        if not self.offers:
            return []
        consumer = self.draw.choice(self.names("consumer"))
        return [("renew", {"number": self.recent(), "consumer": consumer})]

    def reject(self) -> list[tuple[str, dict[str, Any]]]:
        number = self.new_offer(False) if not self.offers or self.chance(0.5) else self.recent()
        return [("reject", {"number": number})]

    def burst(self) -> list[tuple[str, dict[str, Any]]]:
        number = self.new_offer(False)
        count = self.draw.choice([10, 30, 100] if self.vendor else [50, 300, 2000])
        self.offers[number] = dataclasses.replace(
            self.offers[number], tokens=8, first_token=0, ready=True, lease=2.0, consumers=count
        )
        self.made.add(number)
        args = {
            "id": self.fetches,
            "number": number,
            "consumer": self.draw.choice(self.names("consumer")),
            "count": count,
            "timeout": 3.0,
        }
        self.fetches += count
        return [("offer", {"number": number}), ("burst", args)]

    def close(self) -> list[tuple[str, dict[str, Any]]]:
        return [("close", {"agent": self.anyone()})]

    # What is done to them.

    def kill(self) -> list[tuple[str, dict[str, Any]]]:
        return [("kill", {"agent": self.anyone(), "down": self.draw.choice([0.0, 0.1, 0.5])})]

    def stop(self) -> list[tuple[str, dict[str, Any]]]:
        return [("stop", {"agent": self.anyone(), "seconds": self.draw.choice([0.05, 0.4, 1.6])})]

    def crawl(self) -> list[tuple[str, dict[str, Any]]]:
        return [("crawl", {"agent": self.anyone(), "seconds": 1.0})]

    def limit(self) -> list[tuple[str, dict[str, Any]]]:
        shortages = ["descriptors", "memory", "threads", "disk"]
        if self.vendor:
            shortages = ["descriptors", "threads", "disk"]  # drivers are short of memory for us
        if self.transport in ucx.LANES:
            shortages = ["threads", "disk"]  # UCX itself ends a process that is short of the others
        what = self.draw.choice(shortages)
        return [("limit", {"agent": self.anyone(), "what": what, "seconds": 0.3})]

    def strike(self) -> list[tuple[str, dict[str, Any]]]:
        draw = self.draw
        producer = self.producer()
        args: dict[str, Any] = {"producer": producer}
        args["agent"] = draw.choice([producer, draw.choice(self.names("consumer"))])
        # Of shared memory only the handshake passes where strikes can see it.
        args["at"] = draw.choice(KINDS if self.transport == "tcp" else HANDSHAKE)
        args["how"] = draw.choice(["kill", "kill", "stop"])
        args["seconds"] = draw.choice(
            [0.0, 0.1, 0.5] if args["how"] == "kill" else [0.05, 0.4, 1.6]
        )
        return [("strike", args)]

    def clock(self) -> list[tuple[str, dict[str, Any]]]:
        by = self.draw.choice([-86400.0, -5.0, 5.0, 86400.0, 10 * 365 * 86400.0])
        return [("clock", {"agent": self.anyone(), "seconds": 0.5, "by": by})]

    def flip(self) -> list[tuple[str, dict[str, Any]]]:
        consumer = self.draw.choice(self.names("consumer"))
        return [("flip", {"agent": consumer, "seconds": 0.3})]

    def vanish(self) -> list[tuple[str, dict[str, Any]]]:
        if not self.offers:
            return []
        return [("vanish", {"number": self.recent(), "times": 10})]

    def link(self) -> list[tuple[str, dict[str, Any]]]:
        draw = self.draw
        kinds = ["reset", "freeze", "half", "delay", "corrupt", *MET]
        args: dict[str, Any] = {"agent": self.producer(), "how": draw.choice(kinds)}
        args["seconds"] = draw.choice([0.2, 0.6, 1.5])
        args["seed"] = draw.randrange(1 << 30)
        args["direction"] = draw.choice(["up", "down"])
        return [("link", args)]

    def adapters(self) -> list[tuple[str, dict[str, Any]]]:
        draw = self.draw
        args: dict[str, Any] = {"how": draw.choice(ADAPTER_FAULTS)}
        args["device"] = draw.choice(fake_verbs.DEVICES)
        args["seconds"] = draw.choice([0.1, 0.4, 1.5])
        return [("adapters", args)]

    def gpus(self) -> list[tuple[str, dict[str, Any]]]:
        draw = self.draw
        kinds = {n: k.often for n, k in gpu_faults.KINDS.items()}
        fitting = [n for n in kinds if gpu_faults.fits(n, self.vendor, self.transport)]
        if not self.hang:
            fitting.remove("hangs")
        on_gpus = [agent.name for agent in self.agents if agent.device != HOST]
        fault = draw.choices(fitting, [kinds[n] for n in fitting])[0]
        calls = gpu_faults.KINDS[fault].calls.get(self.vendor)
        args: dict[str, Any] = {"agent": draw.choice(on_gpus), "fault": fault}
        args["call"] = draw.choice(calls) if calls else ""
        args["nth"], args["times"] = draw.choice([0, 0, 1, 3, 10]), draw.choice([1, 1, 2, 20])
        renews = gpu_faults.KINDS[fault].renews
        args["seconds"] = gpu_faults.PATIENCE + 1.5 if renews else draw.choice([0.1, 0.5, 1.5])
        return [("gpus", args)]

    def rail(self) -> list[tuple[str, dict[str, Any]]]:
        args: dict[str, Any] = {"number": self.draw.choice([0, 1])}
        args["how"] = self.draw.choice(["cut", "shape"])
        args["seconds"] = self.draw.choice([0.2, 1.0, 2.0])
        return [("rail", args)]

    def cut(self) -> list[tuple[str, dict[str, Any]]]:
        draw = self.draw
        args: dict[str, Any] = {"agent": self.producer()}
        args["direction"] = draw.choice(["both", "both", "up", "down"])
        args["seconds"] = draw.choice([0.2, 1.5, 3.0])
        return [("cut", args)]

    def shape(self) -> list[tuple[str, dict[str, Any]]]:
        seconds = self.draw.choice([0.5, 2.0])
        return [("shape", {"agent": self.producer(), "seconds": seconds})]

    def loopback(self) -> list[tuple[str, dict[str, Any]]]:
        draw = self.draw
        # Messages are never lost here: transports lose none without losing the link.
        faults = draw.choice(
            [
                {"corrupt_write": 1.0},
                {"corrupt_write": 0.1},
                {"reorder_write": 0.4, "duplicate_write": 0.3},
                {"delay_us": 3000},
                {"drop_write": 0.1},
                {"duplicate_message": 0.2},
            ]
        )
        args = {
            "consumer": draw.choice(self.names("consumer")),
            "producer": self.producer(),
            "faults": {**faults, "seed": draw.randrange(1 << 30)},
        }
        return [("loopback", args)]


_WORK = {
    "offer": 12,
    "fetch": 30,
    "ready": 8,
    "release": 3,
    "cancel": 4,
    "give_up": 2,
    "decline": 2,
    "reject": 1,
    "renew": 1,
}
_MORE = {"burst": 0.3, "close": 0.3}
_ON_PROCESSES = {"kill": 0.7, "stop": 0.8, "crawl": 0.5, "limit": 0.6, "clock": 0.4}
_FAULTS = {
    "loopback": {"loopback": 4, "limit": 0.3, "clock": 0.2},
    "shm": {**_ON_PROCESSES, "flip": 1.5, "vanish": 0.5, "link": 0.5, "strike": 0.5},
    "tcp": {**_ON_PROCESSES, "flip": 0.7, "vanish": 0.5, "link": 4, "strike": 2},
    "namespaces": {**_ON_PROCESSES, "flip": 0.4, "cut": 3, "shape": 1.5},
    **dict.fromkeys(ucx.LANES, {**_ON_PROCESSES, "flip": 0.7, "link": 2, "strike": 0.5}),
    "rdma": {**_ON_PROCESSES, "flip": 0.7, "link": 1, "strike": 0.5, "rail": 3},
    "verbs": {"adapters": 3, "link": 1, "flip": 0.5, "limit": 0.3, "clock": 0.2},
}


def draw_schedule(seed: int, lane: str, steps: int, *, calm: bool = False) -> Schedule:
    """Draw a round. A calm one has work alone, and nothing that ends a fetch early."""
    draw = random.Random(f"{seed}/{lane}/{steps}/{calm}")
    transport = lane.removeprefix("gpu-")
    agents = _draw_fleet(draw, transport)
    vendor, hang, environment = "", False, {}
    if lane != transport:
        vendor = draw.choice(["cuda", "cuda", "hip"])
        hang = draw.random() < 0.3
        agents, environment = _on_gpus(draw, agents, transport, hang)
    drawing = _Drawing(draw, agents, transport, vendor, hang)
    taken: list[Step] = []
    if calm:
        while len(taken) < steps:
            taken += _calm_steps(drawing)
        taken.append(Step(0.0, "rest"))
    else:
        rests = 0
        weights = {**_WORK, **_MORE, **_FAULTS[transport], **({"gpus": 4} if vendor else {})}
        while len(taken) < steps:
            kind = draw.choices(list(weights), list(weights.values()))[0]
            method: Callable[[], list[tuple[str, dict[str, Any]]]] = getattr(drawing, kind)
            for name, args in method():
                taken.append(Step(round(draw.choice([0, 0, 0.002, 0.01, 0.03]), 3), name, args))
            if len(taken) // 40 > rests:
                rests += 1
                taken.append(Step(0.0, "rest"))
    secret = "campaign" if draw.random() < 0.3 and transport != "loopback" else None
    if transport == "namespaces":
        secret = "campaign"  # without one nobody listens beyond loopback
    # The tests' certificates are for this host.
    tls = draw.random() < 0.3 and transport not in ("loopback", "namespaces")
    return Schedule(
        seed,
        transport,
        agents,
        tuple(drawing.offers),
        tuple(taken),
        calm,
        secret,
        tls,
        vendor,
        tuple(environment.items()),
    )


def _on_gpus(
    draw: random.Random, agents: tuple[AgentPlan, ...], transport: str, hang: bool
) -> tuple[tuple[AgentPlan, ...], dict[str, str]]:
    """Put the caches of agents on GPUs, of at least one, and say what kind of GPUs."""
    # Where none hangs none must be given up, however busy the machine is.
    knobs: list[tuple[str, Any]] = [("gpu_timeout", gpu_faults.PATIENCE)] if hang else []
    environment = {}
    if transport == "verbs":
        knobs.append(("gpudirect", draw.choice(["auto", "auto", "dmabuf", "peermem", "off"])))
        # How writes of adapters come to be seen: the driver flushes them, has them ordered, or
        # adapters read.
        variable, value = draw.choice(
            [("", ""), ("FAKE_CUDA_ORDERING", "100"), ("FAKE_CUDA_FLUSH_OPTIONS", "2")]
        )
        if variable:
            environment[variable] = value
    if transport == "shm" and draw.random() < 0.1:
        environment["FAKE_GPU_NO_PEERS"] = "1"
    first = draw.randrange(len(agents))
    placed = [
        dataclasses.replace(
            agent,
            knobs=(*agent.knobs, *knobs),
            device=draw.choice([0, 1] if i == first else [0, 0, 1, 1, HOST]),
            streams=draw.random() < 0.5,
        )
        for i, agent in enumerate(agents)
    ]
    return tuple(placed), environment


def _calm_steps(drawing: _Drawing) -> list[Step]:
    draw = drawing.draw
    number = drawing.new_offer(calm=True)
    plan = drawing.offers[number]
    offer = Step(0.0, "offer", {"number": number})
    fetches = []
    for _ in range(plan.consumers):
        args = drawing.fetch()[0][1]
        args.update(number=number, skip=0, timeout=60.0)
        fetches.append(Step(draw.choice([0, 0.01]), "fetch", args))
    ready = [Step(0.005, "ready", {"number": number, "layer": layer}) for layer in LAYERS]
    return [*draw.choice([[offer, *fetches], [*fetches, offer]]), *ready, Step(0.0, "wait")]
