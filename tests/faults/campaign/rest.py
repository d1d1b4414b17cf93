"""A fleet at rest: everything has ended, all works again, nothing more is held than before."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from faults.campaign.checks import MEMORY_NOISE
from faults.campaign.fleet import Fleet
from faults.campaign.process import Process
from faults.campaign.schedule import PROBES, OfferPlan
from kvtest import fake_verbs
from kvtest.fake_gpu import HOST

PATIENCE = 30.0  # awake seconds of a node in which a fleet has to come to rest


class Rest:
    """The steps that wait, and what is looked at then."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    def wait(self) -> None:
        self._quiet(_no_handles, "fetches and offers have not ended")

    def rest(self) -> None:
        """Let all that was begun come to its end, see that all works, then count what is held."""
        fleet = self._fleet
        while fleet.timers or fleet.starting or fleet.armed:
            soon = time.monotonic() + 0.05
            fleet.serve_until(min([soon, *(timer[0] for timer in fleet.timers[:1])]))
        for process in fleet.living():
            process.send("end")
        self._quiet(_no_handles, "fetches and offers have not ended")
        self._connect_all()
        self._quiet(self._nothing_held, "something is still held")
        self._probe()
        self._quiet(self._nothing_held, "something is still held after a probe")
        self._await_rails()
        self._compare()
        fleet.outcome.checks += 1

    def _probe(self) -> None:
        """Whatever happened is over: every consumer can fetch from every producer."""
        fleet = self._fleet
        for consumer in fleet.names("consumer"):
            # A rank alone holds no whole offer.
            ranks = tuple(fleet.names("rank"))
            for owners in [
                *((name,) for name in fleet.names("producer")),
                *([ranks] if ranks else []),
            ]:
                number = id_ = PROBES + len(fleet.probes)
                fleet.probes[number] = OfferPlan(owners, 40)
                who = " and ".join(owners)
                fleet.probing[id_] = f"{consumer} fetching from {who} after the faults"
                ticket = fleet.ticket(number)
                for owner in owners:
                    fleet.tell(owner, "offer", number, ticket=ticket)
                how = {"skip": 0, "timeout": 30.0, "codec": "raw"}
                fleet.tell(consumer, "fetch", number, id=id_, ticket=ticket, **how)
                fleet.outcome.operations["probe"] += 1

    def _await_rails(self) -> None:
        """Over adapters: what was lost of a link, but not the link, comes back by itself."""
        fleet = self._fleet
        for _ in range(int(PATIENCE / 0.25)):
            lost = [names for names, pairs in fleet.queue_pairs.items() if pairs is None]
            if not lost:
                return
            fleet.serve_until(time.monotonic() + 0.25)
            self._probe()
            self._quiet(self._nothing_held, "something is still held after a probe")
        fleet.find("late", f"queue pairs of {lost} have not come back within {PATIENCE} s")

    def _measure(self) -> None:
        for process in self._fleet.living():
            process.measured = None
            process.send("measure")
        end = time.monotonic() + PATIENCE
        while self._unmeasured() and time.monotonic() < end:
            self._fleet.serve_until(time.monotonic() + 0.005)

    def _unmeasured(self) -> bool:
        return any(process.measured is None for process in self._fleet.living())

    def _quiet(self, good: Callable[[dict[str, Any]], bool], what: str) -> None:
        """Measure until every process is as it should be."""
        fleet = self._fleet
        began: dict[int, float] = {}
        while True:
            self._measure()
            bad = [p for p in fleet.living() if p.measured is None or not good(p.measured)]
            if not bad:
                return
            for process in bad:
                if process.measured is None:
                    fleet.find("late", f"{process.names} has not answered for {PATIENCE} s")
                    return
                first = began.setdefault(process.process.pid, process.measured["awake"])
                if process.measured["awake"] > first + PATIENCE:
                    fleet.find("leak", f"{process.names}: {what}: {process.measured}")
                    return
            fleet.serve_until(time.monotonic() + 0.05)

    def _connect_all(self) -> None:
        """Have as many connections at each rest, so that what is held can be compared."""
        fleet = self._fleet
        loopback = fleet.schedule.transport == "loopback"
        for consumer in fleet.names("consumer"):
            for producer in fleet.names("producer", "rank"):
                process = fleet.processes[consumer]
                if loopback:
                    process.send("loopback", consumer=consumer, producer=producer, faults={})
                else:
                    address = fleet.address(producer)
                    process.send("connect", agent=consumer, name=producer, address=address)

    def _nothing_held(self, measured: dict[str, Any]) -> bool:
        fleet = self._fleet
        for name, held in measured["held"].items():
            consumer = fleet.plans[name].role == "consumer"
            peers = len(fleet.names("producer", "rank") if consumer else fleet.names("consumer"))
            # Links of loopback are never replaced, only added to.
            if held["peers"] != peers and fleet.schedule.transport != "loopback":
                if consumer and held["peers"] < peers:
                    self._connect_all()  # one had not noticed yet that its link is gone
                return False
            if any(value for what, value in held.items() if what != "peers"):
                return False
        return bool(measured["busy"] == 0)

    def _compare(self) -> None:
        fleet = self._fleet
        for process in fleet.living():
            now, before = process.measured, process.baseline
            if now is None:
                continue
            if before is None:
                process.baseline = now | {"queue pairs": self._queue_pairs(process)}
                continue
            # Each has a completion channel, which is a descriptor, a completion queue and a buffer.
            pairs = self._queue_pairs(process) - before["queue pairs"]
            # The direct path registers a cache when it is first used, and keeps that.
            direct = any(dict(plan.knobs).get("path") != "staged" for plan in fleet.plans.values())
            if not direct:
                self._settle(process, "objects of adapters", 4 * pairs)
            self._settle(process, "handles of GPUs")
            if now["early frees"] > 0:
                fleet.find("error", f"{process.names} freed memory of a GPU that another had open")
            self._settle(process, "threads")
            self._settle(process, "descriptors", pairs + self._loopbacks())
            # A key may have been damaged on its way to who uses it.
            damaged = any(proxy.happened for proxy in fleet.proxies.values())
            if now["violations"] > before["violations"] and not damaged:
                fleet.find("error", f"{process.names} asked adapters for what they must refuse")
            grown = self._settle(process, "memory", MEMORY_NOISE)
            fleet.outcome.grown = max(fleet.outcome.grown, grown)

    def _loopbacks(self) -> int:
        """Return how many queue pairs agents may yet make for themselves.

        By those adapters reach memory of GPUs for a trial and afterwards. They end when an adapter
        fails, and are made again when they are needed.
        """
        schedule = self._fleet.schedule
        if not schedule.gpus or schedule.transport != "verbs":
            return 0
        on_gpus = [plan for plan in schedule.agents if plan.device != HOST]
        return 2 * len(fake_verbs.DEVICES) * len(on_gpus)

    def _queue_pairs(self, process: Process) -> int:
        """Return how many it has by what its links say."""
        ends = (
            (name, pairs or 0) for link, pairs in self._fleet.queue_pairs.items() for name in link
        )
        return sum(pairs for name, pairs in ends if name in process.names)

    def _settle(self, process: Process, what: str, allowed: int = 0) -> int:
        """Return how much more a process has for good; more than `allowed` is found."""
        assert process.baseline is not None
        # What is kept on purpose does not go.
        patience = 10.0 if self._fleet.sabotage is None else 1.0
        before, end = process.baseline[what], time.monotonic() + patience
        while True:
            assert process.measured is not None
            now = process.measured[what]
            if now <= before + allowed:
                return int(now - before)
            if time.monotonic() > end:
                break
            self._fleet.serve_until(time.monotonic() + 0.1)
            self._measure()
            if process.measured is None:
                break
        self._fleet.find("leak", f"{process.names}: {now:,} {what}, {before:,} before")
        return int(now - before)


def _no_handles(measured: dict[str, Any]) -> bool:
    return bool(measured["handles"] == 0)
