"""The work of a fleet: what each kind of step has its agents do."""

from __future__ import annotations

import time
from typing import Any

from faults.campaign.fleet import Fleet, Running

_MOST_RUNNING = 24


class Steps:
    """A method for each kind of step."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._operations = fleet.outcome.operations

    def _owners(self, number: int) -> list[str]:
        return [name for name in self._fleet.plan(number).owners if self._fleet.up(name)]

    def offer(self, number: int) -> None:
        for name in self._owners(number):
            self._operations["offer"] += 1
            self._fleet.tell(name, "offer", number, ticket=self._fleet.ticket(number))

    def ready(self, number: int, layer: str) -> None:
        for name in self._owners(number):
            self._operations["ready"] += 1
            self._fleet.processes[name].send("ready", agent=name, number=number, layer=layer)

    def release(self, number: int) -> None:
        for name in self._owners(number):
            self._operations["release"] += 1
            self._fleet.processes[name].send("release", agent=name, number=number)

    def reject(self, number: int) -> None:
        for name in self._owners(number):
            self._operations["reject"] += 1
            self._fleet.tell(name, "reject", number, ticket=self._fleet.ticket(number))

    def fetch(self, id: int, number: int, consumer: str, **args: Any) -> None:  # noqa: A002
        self._not_too_many()
        fleet = self._fleet
        if fleet.up(consumer):
            self._operations["fetch"] += 1
            fleet.running[id] = Running(consumer, fleet.plan(number).owners)
            fleet.tell(consumer, "fetch", number, id=id, ticket=fleet.ticket(number), **args)

    def _not_too_many(self) -> None:
        """Give the fleet time, so that on a busy machine too things happen side by side."""
        end = time.monotonic() + 1.0
        while len(self._fleet.running) >= _MOST_RUNNING and time.monotonic() < end:
            self._fleet.serve_until(time.monotonic() + 0.005)

    def burst(self, id: int, number: int, consumer: str, **args: Any) -> None:  # noqa: A002
        fleet = self._fleet
        if fleet.up(consumer):
            self._operations["fetch"] += args["count"]
            fleet.tell(consumer, "burst", number, id=id, ticket=fleet.ticket(number), **args)

    def cancel(self, id: int) -> None:  # noqa: A002
        self._end_early(id, "cancel")

    def give_up(self, id: int) -> None:  # noqa: A002
        self._end_early(id, "give_up")

    def _end_early(self, id_: int, how: str) -> None:
        running = self._fleet.running.get(id_)
        if running is not None and self._fleet.up(running.consumer):
            self._operations[how.replace("_", " ")] += 1
            self._fleet.processes[running.consumer].send(how, id=id_)

    def decline(self, id: int, number: int, consumer: str, timeout: float) -> None:  # noqa: A002
        fleet = self._fleet
        if fleet.up(consumer):
            self._operations["decline"] += 1
            ticket = fleet.ticket(number)
            fleet.tell(consumer, "decline", number, id=id, ticket=ticket, timeout=timeout)

    def renew(self, number: int, consumer: str) -> None:
        fleet = self._fleet
        if fleet.up(consumer):
            self._operations["renew"] += 1
            fleet.tell(consumer, "renew", number, ticket=fleet.ticket(number))

    def close(self, agent: str) -> None:
        fleet = self._fleet
        if fleet.up(agent):
            self._operations["close"] += 1
            fleet.starting.add(agent)
            fleet.processes[agent].baseline = None
            fleet.processes[agent].send("close", agent=agent, **fleet.about_agents())
