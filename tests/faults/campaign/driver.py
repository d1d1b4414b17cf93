"""Makes a schedule happen, and judges what comes of it."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import heapq
import itertools
import os
import random
import select
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from faults.campaign import content
from faults.campaign.proxy import Proxy
from faults.campaign.schedule import HEADS, AgentPlan, OfferPlan, Schedule, Step
from kvtest import wire
from kvtest.caches import Geometry

import kvxfer
from kvxfer import Status
from kvxfer.ticket import AgentRef, new_generation

PATIENCE = 30.0  # awake seconds of a node in which a fleet has to come to rest
MEMORY_NOISE = 12 << 20  # bytes that allocators, numpy and caches of the reference may keep
_MOST_RUNNING = 24
FINDINGS = ("wrong", "late", "leak", "error", "unexplained", "died")


@dataclasses.dataclass(frozen=True)
class Finding:
    """Something that must not happen."""

    kind: str  # one of FINDINGS
    why: str


@dataclasses.dataclass
class Outcome:
    """What came of a round, or of several."""

    rounds: int = 0
    operations: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    faults: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    fetches: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    offers: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    bytes: int = 0
    detection: dict[str, list[float]] = dataclasses.field(
        default_factory=lambda: {"killed": [], "partitioned": [], "corrupted": []}
    )
    grown: int = 0  # most bytes by which a process had grown between two rests
    checks: int = 0  # rests at which all was counted
    findings: list[Finding] = dataclasses.field(default_factory=list)

    def add(self, other: Outcome) -> None:
        self.rounds += other.rounds
        self.checks += other.checks
        for name in ("operations", "faults", "fetches", "offers"):
            getattr(self, name).update(getattr(other, name))
        for kind, times in other.detection.items():
            self.detection[kind] += times
        self.bytes += other.bytes
        self.grown = max(self.grown, other.grown)
        self.findings += other.findings


class _Process:
    """A node, seen from here."""

    def __init__(self, names: list[str], sabotage: str | None) -> None:
        self.names = names
        ours, theirs = Pipe()
        self.pipe: Connection = ours
        self.stopped = 0  # how many faults want it so
        self.waiting: list[tuple[str, dict[str, Any]]] = []
        self.alive = True
        self.baseline: dict[str, Any] | None = None
        self.measured: dict[str, Any] | None = None
        tests = str(Path(__file__).parents[2])
        path = os.pathsep.join([tests, *filter(None, [os.environ.get("PYTHONPATH")])])
        with theirs:
            self.process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "faults.campaign.node",
                    str(theirs.fileno()),
                    sabotage or "",
                ],
                pass_fds=[theirs.fileno()],
                env={**os.environ, "PYTHONPATH": path},
            )

    def send(self, method: str, **args: Any) -> None:
        """Send a command. Those for a stopped process wait here: its pipe may be full."""
        if self.stopped:
            self.waiting.append((method, args))
            return
        with contextlib.suppress(OSError):  # it was killed
            self.pipe.send((method, args))

    def stop(self) -> None:
        self.stopped += 1
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.process.pid, signal.SIGSTOP)

    def resume(self) -> None:
        self.stopped -= 1
        if self.stopped:
            return
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.process.pid, signal.SIGCONT)
        waiting, self.waiting = self.waiting, []
        for method, args in waiting:
            self.send(method, **args)

    def kill(self) -> None:
        self.alive = False
        self.process.kill()
        self.process.wait()
        self.pipe.close()


@dataclasses.dataclass
class _Running:
    consumer: str
    owners: tuple[str, ...]
    number: int


class Round:
    """One schedule on one fleet."""

    def __init__(self, schedule: Schedule, sabotage: str | None = None) -> None:
        self.schedule, self.sabotage = schedule, sabotage
        self.outcome = Outcome(rounds=1)
        self.plans = {agent.name: agent for agent in schedule.agents}
        self.processes: dict[str, _Process] = {}
        self.proxies: dict[str, Proxy] = {}
        self.addresses: dict[str, str] = {}  # of the agents themselves
        self.incarnations: dict[str, int] = {}
        self.tickets: dict[int, kvxfer.Ticket] = {}
        self.running: dict[int, _Running] = {}
        self.killed: dict[str, float] = {}
        self.frozen: dict[str, float] = {}
        self.timers: list[tuple[float, int, Callable[[], None]]] = []
        self.order = itertools.count()
        self.probes: dict[int, OfferPlan] = {}
        self.probing: dict[int, str] = {}  # what each probe is about
        self.starting: set[str] = set()

    # Running

    def run(self) -> Outcome:
        try:
            self._start()
            self._rest()
            for step in self.schedule.steps:
                self._serve_until(time.monotonic() + step.after)
                self._step(step)
            self._rest()
        finally:
            self._end()
        return self.outcome

    def _start(self) -> None:
        if self.schedule.transport == "loopback":
            process = _Process(list(self.plans), self.sabotage)
            for name in self.plans:
                self.processes[name] = process
        else:
            for name, plan in self.plans.items():
                self.processes[name] = _Process([name], self.sabotage)
                if plan.role != "consumer":
                    self.proxies[name] = Proxy()
        for name in self.plans:
            self._start_agent(name, None)
        self._wait_for(lambda: not self.starting)

    def _start_agent(self, name: str, address: str | None) -> None:
        self.starting.add(name)
        self.processes[name].send(
            "start",
            plan=self.plans[name],
            transport=self.schedule.transport,
            secret=self.schedule.secret,
            address=address,
        )

    def _end(self) -> None:
        for process in set(self.processes.values()):
            if not process.alive:
                continue
            while process.stopped:
                process.resume()
            process.send("exit")
            try:
                process.process.wait(60)
            except subprocess.TimeoutExpired:
                self._find("late", f"{process.names} did not exit within 60 s of being told to")
                process.process.kill()
                process.process.wait()
            process.pipe.close()
        for proxy in self.proxies.values():
            proxy.close()

    def _find(self, kind: str, why: str) -> None:
        if os.environ.get("CAMPAIGN_VERBOSE"):
            print(f"{time.monotonic():.3f} {kind}: {why}", flush=True)
        self.outcome.findings.append(Finding(kind, why))

    def _after(self, seconds: float, action: Callable[[], None]) -> None:
        heapq.heappush(self.timers, (time.monotonic() + seconds, next(self.order), action))

    def _serve_until(self, end: float) -> None:
        """Take in events and run timers until then."""
        while True:
            now = time.monotonic()
            while self.timers and self.timers[0][0] <= now:
                heapq.heappop(self.timers)[2]()
            self._take_events(max(0.0, min([end, *(t[0] for t in self.timers[:1])]) - now))
            if time.monotonic() >= end:
                return

    def _wait_for(self, condition: Callable[[], bool]) -> None:
        end = time.monotonic() + 180
        while not condition():
            if time.monotonic() > end:
                raise TimeoutError(f"the fleet did not start: {self.starting}")
            self._serve_until(time.monotonic() + 0.02)

    def _take_events(self, seconds: float) -> None:
        living = {p.pipe.fileno(): p for p in self.processes.values() if p.alive}
        ready, _, _ = select.select(list(living), [], [], seconds)
        for descriptor in ready:
            process = living[descriptor]
            try:
                while process.alive and process.pipe.poll(0):
                    self._take(process, process.pipe.recv())
            except (EOFError, OSError):
                if process.alive:
                    process.alive = False
                    code = process.process.wait()
                    self._find("died", f"{process.names} ended by itself with status {code}")

    # Events

    def _take(self, process: _Process, event: dict[str, Any]) -> None:
        kind = event["event"]
        if kind == "started":
            name = event["agent"]
            self.starting.discard(name)
            self.incarnations[name] = event["incarnation"]
            if event["address"] is not None:
                self.addresses[name] = event["address"]
                if name in self.proxies:
                    self.proxies[name].target = event["address"]
        elif kind == "fault":
            self._find(event["what"], event["why"])
        elif kind == "released":
            self.outcome.offers[event["status"]] += 1
        elif kind == "ended":
            self._ended(event)
        elif kind == "refused":
            self.outcome.operations["refused: " + event["why"]] += 1
            self.running.pop(event["id"], None)
            if event["id"] in self.probing:
                self._find("unexplained", f"{self.probing.pop(event['id'])}: {event['message']}")
            elif event["what"] == "start":
                self._find("error", f"an agent could not be started: {event['message']}")
            elif self.schedule.calm:
                self._find("unexplained", f"{event['what']}: {event['message']}")
        elif kind == "skipped":
            self.outcome.operations["skipped"] += 1
        elif kind == "measured":
            process.measured = event

    def _ended(self, event: dict[str, Any]) -> None:
        status, when = event["status"], event["time"]
        self.outcome.fetches[status] += 1
        self.outcome.bytes += event["bytes"] if status == "OK" else 0
        running = self.running.pop(event["id"], None)
        probe = self.probing.pop(event["id"], None)
        if probe is not None and status != "OK":
            self._find("unexplained", f"{probe} ended {status}: {event['message']}")
        elif status == "INVALID" or (status != "OK" and self.schedule.calm):
            self._find("unexplained", f"fetch {event['id']} ended {status}: {event['message']}")
        if running is None:
            return
        detection = self.outcome.detection
        for owner in running.owners:
            if status == "PEER_LOST" and owner in self.killed:
                detection["killed"].append(when - self.killed[owner])
            elif status == "PEER_LOST" and owner in self.frozen:
                detection["partitioned"].append(when - self.frozen[owner])
            elif status in ("CORRUPT", "PROTOCOL", "PEER_LOST") and owner in self.proxies:
                flips = [t for t in self.proxies[owner].corrupted if when - 2 < t <= when]
                if flips:
                    detection["corrupted"].append(when - flips[-1])
                    self.proxies[owner].corrupted.clear()

    # Steps

    def _step(self, step: Step) -> None:
        handler = getattr(self, "_do_" + step.kind)
        handler(**step.args)

    def _plan(self, number: int) -> OfferPlan:
        probe = self.probes.get(number)
        return self.schedule.offers[number] if probe is None else probe

    def _ticket(self, number: int) -> kvxfer.Ticket:
        """Return the offer's ticket, made when it is first needed: by whoever routes requests."""
        if number not in self.tickets:
            plan = self._plan(number)
            self.tickets[number] = kvxfer.issue_ticket(
                f"request-{number}",
                [
                    AgentRef(
                        name=name,
                        address=self._address(name),
                        incarnation=self.incarnations[name] if plan.names_incarnation else None,
                        heads=self.plans[name].geometry.heads,
                    )
                    for name in plan.owners
                ],
                num_tokens=plan.tokens,
                first_token=plan.first_token,
                generation=new_generation(),
                secret=self.schedule.secret,
            )
        return self.tickets[number]

    def _address(self, name: str) -> str:
        return self.proxies[name].address if name in self.proxies else self.addresses[name]

    def _source(self, number: int) -> Geometry:
        plan = self._plan(number)
        return content.whole(self.plans[plan.owners[0]].geometry, plan.heads)

    def _up(self, name: str) -> bool:
        return self.processes[name].alive and name not in self.starting

    def _tell(self, name: str, method: str, number: int, **args: Any) -> None:
        process = self.processes[name]
        process.send("know", number=number, plan=self._plan(number), source=self._source(number))
        process.send(method, agent=name, number=number, **args)

    def _do_offer(self, number: int) -> None:
        for name in self._plan(number).owners:
            if self._up(name):
                self.outcome.operations["offer"] += 1
                self._tell(name, "offer", number, ticket=self._ticket(number))

    def _do_ready(self, number: int, layer: str) -> None:
        for name in self._plan(number).owners:
            if self._up(name):
                self.outcome.operations["ready"] += 1
                self.processes[name].send("ready", agent=name, number=number, layer=layer)

    def _do_release(self, number: int) -> None:
        for name in self._plan(number).owners:
            if self._up(name):
                self.outcome.operations["release"] += 1
                self.processes[name].send("release", agent=name, number=number)

    def _do_fetch(self, id: int, number: int, consumer: str, **args: Any) -> None:  # noqa: A002
        self._not_too_many()
        if self._up(consumer):
            self.outcome.operations["fetch"] += 1
            owners = self._plan(number).owners
            self.running[id] = _Running(consumer, owners, number)
            self._tell(consumer, "fetch", number, id=id, ticket=self._ticket(number), **args)

    def _not_too_many(self) -> None:
        """Give the fleet time, so that on a busy machine too things happen side by side."""
        end = time.monotonic() + 1.0
        while len(self.running) >= _MOST_RUNNING and time.monotonic() < end:
            self._serve_until(time.monotonic() + 0.005)

    def _do_burst(self, id: int, number: int, consumer: str, **args: Any) -> None:  # noqa: A002
        if self._up(consumer):
            self.outcome.operations["fetch"] += args["count"]
            self._tell(consumer, "burst", number, id=id, ticket=self._ticket(number), **args)

    def _do_cancel(self, id: int) -> None:  # noqa: A002
        running = self.running.get(id)
        if running is not None and self._up(running.consumer):
            self.outcome.operations["cancel"] += 1
            self.processes[running.consumer].send("cancel", id=id)

    def _do_give_up(self, id: int) -> None:  # noqa: A002
        running = self.running.get(id)
        if running is not None and self._up(running.consumer):
            self.outcome.operations["give up"] += 1
            self.processes[running.consumer].send("give_up", id=id)

    def _do_decline(self, id: int, number: int, consumer: str, timeout: float) -> None:  # noqa: A002
        if self._up(consumer):
            self.outcome.operations["decline"] += 1
            self._tell(
                consumer, "decline", number, id=id, ticket=self._ticket(number), timeout=timeout
            )

    def _do_reject(self, number: int) -> None:
        for name in self._plan(number).owners:
            if self._up(name):
                self.outcome.operations["reject"] += 1
                self._tell(name, "reject", number, ticket=self._ticket(number))

    def _do_close(self, agent: str) -> None:
        if self._up(agent):
            self.outcome.operations["close"] += 1
            self.starting.add(agent)
            self.processes[agent].baseline = None
            self.processes[agent].send(
                "close",
                agent=agent,
                transport=self.schedule.transport,
                secret=self.schedule.secret,
            )

    def _do_kill(self, agent: str, down: float) -> None:
        process = self.processes[agent]
        if not self._up(agent) or process.stopped:
            return
        self.outcome.faults["kill"] += 1
        self.killed[agent] = time.monotonic()
        process.kill()
        for number, running in list(self.running.items()):
            if running.consumer == agent:
                del self.running[number]
                self.outcome.fetches["(its process was killed)"] += 1
        self._after(down, lambda: self._restart(agent))

    def _restart(self, agent: str) -> None:
        self.processes[agent] = _Process([agent], self.sabotage)
        self._start_agent(agent, self.addresses.get(agent))
        # What fails from here on fails by the restart.
        self._after(0.5, lambda: self.killed.pop(agent, None))

    def _do_stop(self, agent: str, seconds: float) -> None:
        process = self.processes[agent]
        if self._up(agent):
            self.outcome.faults["stop"] += 1
            process.stop()
            self._after(seconds, process.resume)

    def _do_crawl(self, agent: str, seconds: float) -> None:
        """Let it run a fifth of the time: a slow producer, a slow consumer."""
        process = self.processes[agent]
        if not self._up(agent):
            return
        self.outcome.faults["slow"] += 1
        for turn in range(int(seconds / 0.05)):
            self._after(0.05 * turn, process.stop)
            self._after(0.05 * turn + 0.04, process.resume)

    def _do_limit(self, agent: str, what: str, seconds: float) -> None:
        process = self.processes[agent]
        if self._up(agent):
            self.outcome.faults["no more " + what] += 1
            process.send("limit", what=what)
            self._after(seconds, lambda: process.send("unlimit", what=what))

    def _do_flip(self, agent: str, seconds: float) -> None:
        if self._up(agent):
            self.outcome.faults["memory gone bad"] += 1
            self.processes[agent].send("flip", agent=agent, seconds=seconds)

    def _do_loopback(self, consumer: str, producer: str, faults: dict[str, float]) -> None:
        if self._up(consumer) and self._up(producer):
            self.outcome.faults["loopback: " + " ".join(k for k in faults if k != "seed")] += 1
            self.processes[consumer].send(
                "loopback", consumer=consumer, producer=producer, faults=faults
            )

    def _do_link(self, agent: str, how: str, seconds: float, seed: int, direction: str) -> None:
        proxy = self.proxies.get(agent)
        if proxy is None:
            return
        self.outcome.faults["link: " + how] += 1
        proxy.begin(how, direction, seed)
        if how == "freeze":
            self.frozen[agent] = time.monotonic()

        def end() -> None:
            proxy.end(how)
            if how == "freeze":
                self._after(0.5, lambda: self.frozen.pop(agent, None))

        self._after(seconds, end)

    def _do_vanish(self, number: int, times: int) -> None:
        """Ask as a consumer would and go at once, again and again."""
        owner = self._plan(number).owners[0]
        if not self._up(owner):
            return
        self.outcome.faults["asked and vanished"] += times
        address, ticket, secret = self.addresses[owner], self._ticket(number), self.schedule.secret

        def work() -> None:
            draw = random.Random(number)
            for _ in range(times):
                with (
                    contextlib.suppress(OSError, kvxfer.Error, AssertionError, struct.error),
                    wire.consumer(address, "vanishing", secret=secret) as fake,
                ):
                    if draw.random() < 0.8:
                        fake.say(wire.layout(), wire.fetch(ticket, slots=(0, 1)))

        threading.Thread(target=work, daemon=True, name="campaign-vanish").start()

    # Rest

    def _do_rest(self) -> None:
        self._rest()

    def _do_wait(self) -> None:
        self._quiet(_no_handles, "fetches and offers have not ended")

    def _rest(self) -> None:
        """Let all that was begun come to its end, see that all works, then count what is held."""
        while self.timers or self.starting:
            self._serve_until(min([time.monotonic() + 0.05, *(t[0] for t in self.timers[:1])]))
        for process in self._living():
            process.send("end")
        self._quiet(_no_handles, "fetches and offers have not ended")
        self._connect_all()
        self._quiet(self._nothing_held, "something is still held")
        self._probe()
        self._quiet(self._nothing_held, "something is still held after a probe")
        self._compare()
        self.outcome.checks += 1

    def _probe(self) -> None:
        """Whatever happened is over: every consumer can fetch from every producer."""
        for consumer in self._names("consumer"):
            for producer in self._names("producer", "rank"):
                heads = self.plans[producer].geometry.heads
                if heads != HEADS:
                    continue  # a rank alone holds no whole offer
                number = id_ = 1_000_000 + len(self.probes)
                self.probes[number] = OfferPlan((producer,), 40)
                self.probing[id_] = f"{consumer} fetching from {producer} after the faults"
                self._tell(producer, "offer", number, ticket=self._ticket(number))
                self._tell(
                    consumer,
                    "fetch",
                    number,
                    id=id_,
                    ticket=self._ticket(number),
                    skip=0,
                    timeout=30.0,
                    codec="raw",
                )
                self.outcome.operations["probe"] += 1

    def _living(self) -> list[_Process]:
        return [p for p in dict.fromkeys(self.processes.values()) if p.alive]

    def _measure(self) -> None:
        for process in self._living():
            process.measured = None
            process.send("measure")
        end = time.monotonic() + PATIENCE
        while any(p.measured is None for p in self._living()) and time.monotonic() < end:
            self._serve_until(time.monotonic() + 0.005)

    def _quiet(self, good: Callable[[dict[str, Any]], bool], what: str) -> None:
        """Measure until every process is as it should be."""
        began: dict[int, float] = {}
        while True:
            self._measure()
            bad = [p for p in self._living() if p.measured is None or not good(p.measured)]
            if not bad:
                return
            for process in bad:
                if process.measured is None:
                    self._find("late", f"{process.names} has not answered for {PATIENCE} s")
                    return
                first = began.setdefault(process.process.pid, process.measured["awake"])
                if process.measured["awake"] > first + PATIENCE:
                    self._find("leak", f"{process.names}: {what}: {process.measured}")
                    return
            self._serve_until(time.monotonic() + 0.05)

    def _connect_all(self) -> None:
        """Have as many connections at each rest, so that what is held can be compared."""
        loopback = self.schedule.transport == "loopback"
        for consumer in self._names("consumer"):
            for producer in self._names("producer", "rank"):
                if loopback:
                    self.processes[consumer].send(
                        "loopback", consumer=consumer, producer=producer, faults={}
                    )
                    continue
                self.processes[consumer].send(
                    "connect", agent=consumer, name=producer, address=self._address(producer)
                )

    def _names(self, *roles: str) -> list[str]:
        return [plan.name for plan in self.schedule.agents if plan.role in roles]

    def _nothing_held(self, measured: dict[str, Any]) -> bool:
        for name, held in measured["held"].items():
            consumer = self.plans[name].role == "consumer"
            peers = len(self._names("producer", "rank") if consumer else self._names("consumer"))
            # Links of loopback are never replaced, only added to.
            if held["peers"] != peers and self.schedule.transport != "loopback":
                if consumer and held["peers"] < peers:
                    self._connect_all()  # one had not noticed yet that its link is gone
                return False
            if any(value for what, value in held.items() if what != "peers"):
                return False
        return measured["busy"] == 0

    def _compare(self) -> None:
        for process in self._living():
            now, before = process.measured, process.baseline
            if now is None:
                continue
            if before is None:
                process.baseline = now
                continue
            for what in ("descriptors", "threads"):
                if now[what] > before[what]:
                    self._settle(process, what)
            grown = now["memory"] - before["memory"]
            self.outcome.grown = max(self.outcome.grown, grown)
            if grown > MEMORY_NOISE:
                self._find("leak", f"{process.names} has grown by {grown >> 20} MiB")

    def _settle(self, process: _Process, what: str) -> None:
        """See whether there are more of them than there were for good."""
        assert process.baseline is not None
        end = time.monotonic() + 10
        while time.monotonic() < end:
            self._measure()
            if process.measured is None or process.measured[what] <= process.baseline[what]:
                return
            self._serve_until(time.monotonic() + 0.1)
        assert process.measured is not None
        self._find(
            "leak",
            f"{process.names}: {process.measured[what]} {what}, {process.baseline[what]} before",
        )


def _no_handles(measured: dict[str, Any]) -> bool:
    return bool(measured["handles"] == 0)


def run(schedule: Schedule, sabotage: str | None = None) -> Outcome:
    """Run a round. `sabotage` makes nodes do wrong, which has to be noticed: see `Node`."""
    return Round(schedule, sabotage).run()


__all__ = ["AgentPlan", "Finding", "Outcome", "Round", "Status", "run"]
