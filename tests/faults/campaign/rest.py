"""A fleet at rest: everything has ended, all works again, nothing more is held than before."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from faults.campaign.checks import MEMORY_NOISE
from faults.campaign.fleet import Fleet
from faults.campaign.process import Process
from faults.campaign.schedule import HEADS, OfferPlan

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
        self._compare()
        fleet.outcome.checks += 1

    def _probe(self) -> None:
        """Whatever happened is over: every consumer can fetch from every producer."""
        fleet = self._fleet
        for consumer in fleet.names("consumer"):
            for producer in fleet.names("producer", "rank"):
                if fleet.plans[producer].geometry.heads != HEADS:
                    continue  # a rank alone holds no whole offer
                number = id_ = 1_000_000 + len(fleet.probes)
                fleet.probes[number] = OfferPlan((producer,), 40)
                fleet.probing[id_] = f"{consumer} fetching from {producer} after the faults"
                ticket = fleet.ticket(number)
                fleet.tell(producer, "offer", number, ticket=ticket)
                how = {"skip": 0, "timeout": 30.0, "codec": "raw"}
                fleet.tell(consumer, "fetch", number, id=id_, ticket=ticket, **how)
                fleet.outcome.operations["probe"] += 1

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
                process.baseline = now
                continue
            # The direct path registers a cache when it is first used, and keeps that.
            direct = any(dict(plan.knobs).get("path") != "staged" for plan in fleet.plans.values())
            for what in ("threads", *(() if direct else ("objects of adapters",))):
                self._settle(process, what)
            self._settle(process, "descriptors", self._rails_that_return())
            # A key may have been damaged on its way to who uses it.
            damaged = any(proxy.happened for proxy in fleet.proxies.values())
            if now["violations"] > before["violations"] and not damaged:
                fleet.find("error", f"{process.names} asked adapters for what they must refuse")
            grown = self._settle(process, "memory", MEMORY_NOISE)
            fleet.outcome.grown = max(fleet.outcome.grown, grown)

    def _rails_that_return(self) -> int:
        """Return the descriptors of rails that may have been out when the baseline was taken.

        One of the two of each link, which has a completion channel at either end.
        """
        fleet = self._fleet
        if fleet.schedule.transport not in ("verbs", "rdma"):
            return 0
        return 2 * len(fleet.names("producer", "rank")) * len(fleet.names("consumer"))

    def _settle(self, process: Process, what: str, allowed: int = 0) -> int:
        """Return how much more a process has for good; more than `allowed` is found."""
        assert process.baseline is not None
        before, end = process.baseline[what], time.monotonic() + 10
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
