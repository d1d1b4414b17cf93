"""What is done to a fleet: a method for each kind of fault."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import struct
import subprocess
import threading
import time

from faults.campaign import gpu_faults
from faults.campaign.fleet import Armed, Fleet
from faults.campaign.process import Process
from faults.campaign.proxy import MET
from faults.campaign.watch import FIRST
from kvtest import wire
from kvtest.agents import CERTIFICATE
from kvtest.fake_gpu import HOST

import kvxfer
from kvxfer import _core

_BAD = ("delay", "2ms", "2ms", "loss", "2%", "reorder", "25%", "duplicate", "1%")  # for netem
_PATIENCE = 1.5  # seconds that a strike waits for the message it is meant for


class Harm:
    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._faults = fleet.outcome.faults
        self._doubtful: list[Process] = []  # whose GPUs may have been given up

    # Processes

    def kill(self, agent: str, down: float) -> None:
        process = self._fleet.processes[agent]
        if self._fleet.up(agent) and not process.stopped:
            self._faults["kill"] += 1
            now = time.monotonic()
            process.kill()
            self._fleet.lost(agent, now, down)

    def stop(self, agent: str, seconds: float) -> None:
        process = self._fleet.processes[agent]
        if self._fleet.up(agent):
            self._faults["stop"] += 1
            process.stop()
            self._fleet.after(seconds, process.resume)

    def crawl(self, agent: str, seconds: float) -> None:
        """Let it run a fifth of the time: a slow producer, a slow consumer."""
        process = self._fleet.processes[agent]
        if not self._fleet.up(agent):
            return
        self._faults["slow"] += 1
        for turn in range(int(seconds / 0.05)):
            self._fleet.after(0.05 * turn, process.stop)
            self._fleet.after(0.05 * turn + 0.04, process.resume)

    def strike(self, agent: str, producer: str, how: str, at: str, seconds: float) -> None:
        """Kill or stop an agent when a message of a kind passes to or from a producer.

        The message still arrives, where there is somebody left.
        """
        fleet, process = self._fleet, self._fleet.processes[agent]
        proxy = fleet.proxies.get(producer)
        busy = process.stopped or any(armed.process is process for armed in fleet.armed)
        if not fleet.up(agent) or proxy is None or busy:
            return
        sign = signal.SIGKILL if how == "kill" else signal.SIGSTOP
        watching = proxy.watch(at, lambda: process.strike(sign))
        fleet.armed.append(
            Armed(
                agent,
                process,
                sign,
                f"{how} at {at}",
                seconds,
                time.monotonic() + _PATIENCE,
                lambda: proxy.forget(watching),
            )
        )
        if at in FIRST:
            proxy.begin("reset", "up", 0)

    # What a process needs

    def limit(self, agent: str, what: str, seconds: float) -> None:
        process = self._fleet.processes[agent]
        # UBSan makes a pipe to look at a virtual table, ASan's allocator throws no std::bad_alloc:
        # both end the process.
        if what in ("descriptors", "memory") and _core.build_info()["sanitize"]:
            return
        if self._fleet.up(agent):
            self._faults["no more " + what] += 1
            process.send("limit", what=what)
            self._fleet.after(seconds, lambda: process.send("unlimit", what=what))

    def clock(self, agent: str, seconds: float, by: float) -> None:
        """Let its clock of the day jump, and jump back."""
        process = self._fleet.processes[agent]
        if self._fleet.up(agent):
            self._faults["clock jumps"] += 1
            process.send("clock", by=by)
            self._fleet.after(seconds, lambda: process.send("clock", by=0.0))

    def flip(self, agent: str, seconds: float) -> None:
        if self._fleet.up(agent):
            self._faults["memory gone bad"] += 1
            self._fleet.processes[agent].send("flip", agent=agent, seconds=seconds)

    def adapters(self, how: str, device: str, seconds: float) -> None:
        """Let RDMA adapters fail, and mend all of them after a while."""
        fleet = self._fleet
        if not fleet.together or fleet.starting or not fleet.living():
            return
        self._faults[f"adapters: {how}"] += 1
        process = fleet.living()[0]
        process.send("break_adapters", how=how, device=device)
        fleet.after(seconds, lambda: process.send("mend_adapters"))

    def gpus(self, agent: str, fault: str, call: str, nth: int, times: int, seconds: float) -> None:
        """Let something happen to the GPUs of a process; where that is for good, begin anew."""
        fleet, process = self._fleet, self._fleet.processes[agent]
        if not fleet.up(agent) or process.stopped or process in self._doubtful:
            return
        self._faults[f"GPU: {fault}"] += 1
        how = {"fault": fault, "call": call, "nth": nth, "times": times, "seconds": seconds}
        process.send("break_gpus", **how)
        if not gpu_faults.KINDS[fault].renews:
            fleet.after(seconds, lambda: None)
            return
        self._doubtful.append(process)
        fleet.after(seconds, lambda: self._renew(agent, process))

    def _renew(self, agent: str, process: Process) -> None:
        fleet = self._fleet
        self._doubtful.remove(process)
        if not process.alive or fleet.processes[agent] is not process:
            return
        if fleet.together:
            fleet.starting.update(n for n, plan in fleet.plans.items() if plan.device != HOST)
            process.baseline = None
            process.send("renew_gpus", **fleet.about_agents())
        else:
            now = time.monotonic()
            process.kill()
            fleet.lost(agent, now, 0.0)

    def rail(self, number: int, how: str, seconds: float) -> None:
        """Cut one of the two ways between real adapters, or let it lose and delay packets."""
        rig = os.environ.get("KVXFER_TEST_RIG")
        if rig is None:
            return
        self._faults[f"rail: {how}"] += 1
        bad = _BAD if how == "shape" else ()
        mend = "shape" if how == "shape" else "restore"
        subprocess.run([rig, how, str(number), *bad], check=True)
        self._fleet.after(seconds, lambda: subprocess.run([rig, mend, str(number)], check=True))

    # Links

    def loopback(self, consumer: str, producer: str, faults: dict[str, float]) -> None:
        if self._fleet.up(consumer) and self._fleet.up(producer):
            self._faults["loopback: " + " ".join(k for k in faults if k != "seed")] += 1
            self._fleet.processes[consumer].send(
                "loopback", consumer=consumer, producer=producer, faults=faults
            )

    def link(self, agent: str, how: str, seconds: float, seed: int, direction: str) -> None:
        fleet, proxy = self._fleet, self._fleet.proxies.get(agent)
        if proxy is None:
            return
        if how not in MET:  # those are counted by the proxy
            self._faults["link: " + how] += 1
        proxy.begin(how, direction, seed)
        if how == "freeze":
            fleet.frozen[agent] = time.monotonic()

        def end() -> None:
            proxy.end(how)
            if how == "freeze":
                fleet.after(0.5, lambda: fleet.frozen.pop(agent, None))

        fleet.after(seconds, end)

    def cut(self, agent: str, direction: str, seconds: float) -> None:
        """Part a producer from all consumers; nobody is told. One way, or both."""
        fleet, network = self._fleet, self._fleet.network
        if network is None or agent in fleet.frozen:
            return
        self._faults[f"network: cut {direction}"] += 1
        network.cut(agent, direction)
        fleet.frozen[agent] = time.monotonic()

        def end() -> None:
            network.heal(agent)
            fleet.after(0.5, lambda: fleet.frozen.pop(agent, None))

        fleet.after(seconds, end)

    def shape(self, agent: str, seconds: float) -> None:
        """Let the line to a producer lose, delay and reorder packets."""
        network = self._fleet.network
        if network is not None:
            self._faults[f"network: {network.shape(agent)}"] += 1
            self._fleet.after(seconds, lambda: network.straighten(agent))

    # Strangers

    def vanish(self, number: int, times: int) -> None:
        """Ask as a consumer would and go at once, again and again."""
        fleet = self._fleet
        owner = fleet.plan(number).owners[0]
        if not fleet.up(owner):
            return
        address, ticket, schedule = fleet.addresses[owner], fleet.ticket(number), fleet.schedule
        config = kvxfer.Config(**CERTIFICATE) if schedule.tls else None

        def work() -> None:
            draw = random.Random(number)
            for _ in range(times):
                with (
                    contextlib.suppress(OSError, kvxfer.Error, AssertionError, struct.error),
                    wire.consumer(
                        address,
                        "vanishing",
                        secret=schedule.secret,
                        transport=schedule.transport,
                        config=config,
                    ) as fake,
                ):
                    asks = draw.random() < 0.8
                    if asks:
                        fake.say(wire.layout(), wire.fetch(ticket, slots=(0, 1)))
                    self._faults["asked and vanished" if asks else "connected and vanished"] += 1

        threading.Thread(target=work, daemon=True, name="campaign-vanish").start()
