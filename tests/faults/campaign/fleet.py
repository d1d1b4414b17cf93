"""The agents of a round, what they say, and how long things may take."""

from __future__ import annotations

import collections
import dataclasses
import heapq
import itertools
import os
import select
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from faults.campaign import content, gpu_faults
from faults.campaign.clock import preloaded
from faults.campaign.network import Network
from faults.campaign.outcome import Finding, Outcome
from faults.campaign.process import Process
from faults.campaign.proxy import Proxy
from faults.campaign.schedule import OfferPlan, Schedule
from kvtest import fake_gpu
from kvtest.caches import Geometry

import kvxfer
from kvxfer.ticket import AgentRef, new_generation


@dataclasses.dataclass
class Running:
    """A fetch that has not ended."""

    consumer: str
    owners: tuple[str, ...]


@dataclasses.dataclass
class Armed:
    """A strike that waits for its moment."""

    agent: str
    process: Process
    sign: signal.Signals
    what: str  # for the report
    seconds: float  # that it lasts
    end: float  # when it is given up
    disarm: Callable[[], None]


class Fleet:
    """The agents of one schedule, seen from the driver."""

    def __init__(self, schedule: Schedule, sabotage: str | None = None) -> None:
        self.schedule, self.sabotage = schedule, sabotage
        about = {"under TLS": schedule.tls, "with a secret": schedule.secret is not None}
        about |= {"without faults": schedule.calm, "on GPUs": bool(schedule.gpus)}
        about[f"over {schedule.transport}"] = True
        self.outcome = Outcome(rounds=1)
        self.outcome.rounds_by_kind.update(kind for kind, so in about.items() if so)
        self.plans = {agent.name: agent for agent in schedule.agents}
        self.processes: dict[str, Process] = {}
        self.proxies: dict[str, Proxy] = {}
        self.network: Network | None = None
        self.addresses: dict[str, str] = {}  # of the agents themselves
        self.running: dict[int, Running] = {}
        self.killed: dict[str, float] = {}
        self.frozen: dict[str, float] = {}
        self.timers: list[tuple[float, int, Callable[[], None]]] = []
        self.armed: list[Armed] = []
        self.probes: dict[int, OfferPlan] = {}
        self.probing: dict[int, str] = {}  # what each probe is about
        # Of links over adapters, by consumer and producer, when last probed. None: some were lost.
        self.queue_pairs: dict[tuple[str, str], int | None] = {}
        self._left_over: collections.Counter[str] = collections.Counter()
        self.starting: set[str] = set()
        self._incarnations: dict[str, int] = {}
        self._tickets: dict[int, kvxfer.Ticket] = {}
        self._order = itertools.count()
        self._folder = tempfile.TemporaryDirectory(prefix="kvxfer-campaign-")

    @property
    def together(self) -> bool:
        """Whether all agents are in one process, out of which their transport does not reach."""
        return self.schedule.transport in ("loopback", "verbs")

    # Life

    def start(self) -> None:
        transport = self.schedule.transport
        producers = [name for name, plan in self.plans.items() if plan.role != "consumer"]
        if transport == "namespaces":
            self.network = Network(producers)
        elif transport != "loopback":
            self.proxies = {name: Proxy() for name in producers}
        if self.together:
            process = self._new_process(list(self.plans))
            for name in self.plans:
                self.processes[name] = process
        else:
            for name in self.plans:
                self.processes[name] = self._new_process([name])
        for name in self.plans:
            self._start_agent(name, None)
        self.wait_for(lambda: not self.starting)

    def _new_process(self, names: list[str]) -> Process:
        inside = [] if self.network is None else self.network.inside(names[0])
        environment = dict(self.schedule.environment)
        if self.schedule.gpus:
            environment |= fake_gpu.environment(Path(self._folder.name), self.schedule.gpus)
        return Process(names, self.sabotage, inside, preloaded(), environment)

    def _start_agent(self, name: str, address: str | None) -> None:
        self.starting.add(name)
        if address is None and self.network is not None:
            address = self.network.listen_address(name)
        self.processes[name].send(
            "start", plan=self.plans[name], address=address, **self.about_agents()
        )

    def about_agents(self) -> dict[str, Any]:
        """Return what is common to all agents."""
        transport = self.schedule.transport
        return {
            "transport": {"namespaces": "tcp", "rdma": "verbs"}.get(transport, transport),
            "secret": self.schedule.secret,
            "tls": self.schedule.tls,
            "traces": self._folder.name,
        }

    def lost(self, agent: str, when: float, down: float) -> None:
        """Take note that an agent was killed, and start it again after a while."""
        self.killed[agent] = when
        for number, running in list(self.running.items()):
            if running.consumer == agent:
                del self.running[number]
                self.outcome.fetches["(its process was killed)"] += 1
        self.after(down, lambda: self._restart(agent))

    def _restart(self, agent: str) -> None:
        self.processes[agent] = self._new_process([agent])
        self._start_agent(agent, self.addresses.get(agent))
        # What fails from here on fails by the restart.
        self.after(0.5, lambda: self.killed.pop(agent, None))

    def end(self) -> None:
        for process in self.living():
            while process.stopped:
                process.resume()
            process.send("exit")
            try:
                process.process.wait(60)
            except subprocess.TimeoutExpired:
                self.find("late", f"{process.names} did not exit within 60 s of being told to")
                process.process.kill()
                process.process.wait()
            process.pipe.close()
        for proxy in self.proxies.values():
            proxy.close()
            for how, times in proxy.happened.items():
                self.outcome.faults[f"link: {how}"] += times
        if self.network is not None:
            self.network.close()
        self._folder.cleanup()

    def find(self, kind: str, why: str) -> None:
        if os.environ.get("CAMPAIGN_VERBOSE"):
            print(f"{time.monotonic():.3f} {kind}: {why}", flush=True)
        self.outcome.findings.append(Finding(kind, why))

    # Time

    def after(self, seconds: float, action: Callable[[], None]) -> None:
        heapq.heappush(self.timers, (time.monotonic() + seconds, next(self._order), action))

    def serve_until(self, end: float) -> None:
        """Take in events and run timers until then."""
        while True:
            now = time.monotonic()
            while self.timers and self.timers[0][0] <= now:
                heapq.heappop(self.timers)[2]()
            self._look_at_strikes()
            wait = max(0.0, min([end, *(timer[0] for timer in self.timers[:1])]) - now)
            self._take_events(min(wait, 0.01) if self.armed else wait)
            if time.monotonic() >= end:
                return

    def wait_for(self, condition: Callable[[], bool]) -> None:
        end = time.monotonic() + 180
        while not condition():
            if time.monotonic() > end:
                raise TimeoutError(f"the fleet did not start: {self.starting}")
            self.serve_until(time.monotonic() + 0.02)

    def _look_at_strikes(self) -> None:
        for armed in list(self.armed):
            process = armed.process
            if process.struck is not None and armed.sign is signal.SIGSTOP:
                process.struck = None
                process.stop()
                self.after(armed.seconds, process.resume)
            elif process.struck is None and process.alive and time.monotonic() < armed.end:
                continue
            elif process.struck is not None and process.alive:
                process.alive = False
                process.process.wait()
                process.pipe.close()
                self.lost(armed.agent, process.struck, armed.seconds)
            else:
                armed.what = ""
            armed.disarm()
            self.armed.remove(armed)
            if armed.what:
                self.outcome.faults[armed.what] += 1

    # Events

    def _take_events(self, seconds: float) -> None:
        living = {process.pipe.fileno(): process for process in self.living()}
        ready, _, _ = select.select(list(living), [], [], seconds)
        for descriptor in ready:
            process = living[descriptor]
            try:
                while process.alive and process.pipe.poll(0):
                    self._take(process, process.pipe.recv())
            except (EOFError, OSError):
                if process.alive and process.struck is None:
                    process.alive = False
                    code = process.process.wait()
                    self.find("died", f"{process.names} ended by itself with status {code}")
                elif process.alive:
                    return  # `_look_at_strikes` sees to it

    def _take(self, process: Process, event: dict[str, Any]) -> None:
        kind = event["event"]
        if kind == "started":
            name = event["agent"]
            self.starting.discard(name)
            self._incarnations[name] = event["incarnation"]
            if event["address"] is not None:
                self.addresses[name] = event["address"]
                if name in self.proxies:
                    self.proxies[name].target = event["address"]
        elif kind == "fault":
            self.find(event["what"], event["why"])
        elif kind == "released":
            self.outcome.offers[event["status"]] += 1
            if self.schedule.gpus and event["status"] != "OK":
                self._look_for_reason(event["status"], event["message"])
        elif kind == "ended":
            self._ended(event)
        elif kind == "refused":
            self._refused(event)
        elif kind == "skipped":
            self.outcome.operations["skipped"] += 1
        elif kind == "measured":
            process.measured = event

    def _refused(self, event: dict[str, Any]) -> None:
        self.outcome.operations["refused: " + event["why"]] += 1
        self.running.pop(event["id"], None)
        if self.schedule.gpus:
            self._look_for_reason("NO_RESOURCES" if event["short"] else "", event["message"])
        if event["id"] in self.probing:
            self.find("unexplained", f"{self.probing.pop(event['id'])}: {event['message']}")
        elif event["what"] == "start":
            self.find("error", f"an agent could not be started: {event['message']}")
        elif self.schedule.calm:
            self.find("unexplained", f"{event['what']}: {event['message']}")

    def _ended(self, event: dict[str, Any]) -> None:
        status = event["status"]
        self.outcome.fetches[status] += 1
        if status == "OK":
            self.outcome.bytes += event["bytes"]
            self.outcome.paths[event["path"]] += 1
        running = self.running.pop(event["id"], None)
        probe = self.probing.pop(event["id"], None)
        if probe is not None and status != "OK" and not self._is_left_over(probe, status):
            self.find("unexplained", f"{probe} ended {status}: {event['message']}")
        elif probe is not None and status == "OK":
            for peer, pairs in event["queue pairs"].items():
                self.queue_pairs[event["agent"], peer] = pairs
        elif status == "INVALID" or (status != "OK" and self.schedule.calm):
            self.find("unexplained", f"fetch {event['id']} ended {status}: {event['message']}")
        if self.schedule.gpus:
            self._look_for_reason(status, event["path why" if status == "OK" else "message"])
        if running is not None:
            self._note_detection(running, status, event["time"])

    def _is_left_over(self, probe: str, status: str) -> bool:
        """Whether a fault that is over shows now: memory was registered so that writes are lost.

        That lasts as long as the connection, and is found by the first fetch over it, one of which
        has at most two.
        """
        self._left_over[probe] += status == "CORRUPT"
        most = 2 * self.outcome.faults["GPU: writes to GPUs are lost"]
        return status == "CORRUPT" and self._left_over[probe] <= most

    def _look_for_reason(self, status: str, message: str) -> None:
        happened = set(self.outcome.faults)
        happened.update(how for proxy in self.proxies.values() for how in proxy.happened)
        why = gpu_faults.unexplained(status, message, happened, self.schedule.gpus)
        if why is not None:
            self.find("unexplained", f"{status}, but {why}: {message}")

    def _note_detection(self, running: Running, status: str, when: float) -> None:
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

    # What is where

    def names(self, *roles: str) -> list[str]:
        return [plan.name for plan in self.schedule.agents if plan.role in roles]

    def living(self) -> list[Process]:
        return [p for p in dict.fromkeys(self.processes.values()) if p.alive]

    def up(self, name: str) -> bool:
        return self.processes[name].alive and name not in self.starting

    def plan(self, number: int) -> OfferPlan:
        probe = self.probes.get(number)
        return self.schedule.offers[number] if probe is None else probe

    def address(self, name: str) -> str:
        """Return where consumers find it."""
        return self.proxies[name].address if name in self.proxies else self.addresses[name]

    def ticket(self, number: int) -> kvxfer.Ticket:
        """Return the offer's ticket, made when it is first needed: by whoever routes requests."""
        if number not in self._tickets:
            plan = self.plan(number)
            self._tickets[number] = kvxfer.issue_ticket(
                f"request-{number}",
                [
                    AgentRef(
                        name=name,
                        address=self.address(name),
                        incarnation=self._incarnations[name] if plan.names_incarnation else None,
                        heads=self.plans[name].geometry.heads,
                    )
                    for name in plan.owners
                ],
                num_tokens=plan.tokens,
                first_token=plan.first_token,
                generation=new_generation(),
                secret=self.schedule.secret,
            )
        return self._tickets[number]

    def source(self, number: int) -> Geometry:
        plan = self.plan(number)
        return content.whole(self.plans[plan.owners[0]].geometry, plan.heads)

    def tell(self, name: str, method: str, number: int, **args: Any) -> None:
        """Send a command about an offer."""
        process = self.processes[name]
        process.send("know", number=number, plan=self.plan(number), source=self.source(number))
        process.send(method, agent=name, number=number, **args)
