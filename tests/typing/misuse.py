"""Mistakes that a type checker has to find: an ignore that is not needed is an error itself."""

from __future__ import annotations

import kvxfer


def mistakes(agent: kvxfer.Agent, cache: kvxfer.Cache, ticket: kvxfer.Ticket) -> None:
    agent.offer(cache, [1], "700")  # type: ignore[arg-type]
    agent.offer(cache, 1, 700)  # type: ignore[arg-type]
    agent.offer(cache, [1], 700, "request-1")  # type: ignore[call-arg]
    agent.fetch(ticket, "cache", [1])  # type: ignore[arg-type]
    agent.fetch("ticket", cache, [1])  # type: ignore[arg-type]
    agent.fetch(ticket, cache, [1], tokens=(0, 10))  # type: ignore[arg-type]
    agent.fetch(ticket, cache, [1], ranks=2)  # type: ignore[arg-type]
    agent.decline(ticket, cache, 5.0)  # type: ignore[call-arg, arg-type]
    agent.reject(ticket, 7)  # type: ignore[arg-type]
    kvxfer.Agnet("x")  # type: ignore[attr-defined]
    agent.register({"layer.0": None})  # type: ignore[arg-type]
    kvxfer.Cache(["layer.0"])  # type: ignore[arg-type]
    kvxfer.Config("tcp")  # type: ignore[call-arg]
    kvxfer.Config(window="8")  # type: ignore[arg-type]
    kvxfer.AgentRef("rank-0", "127.0.0.1:1")  # type: ignore[call-arg]


def results(fetch: kvxfer.Fetch, offer: kvxfer.Offer) -> None:
    fetch.cancel(True)  # type: ignore[call-arg]
    fetch.done = True  # type: ignore[misc]
    offer.released()  # type: ignore[operator]
    name: str = fetch.status  # type: ignore[assignment]
    size: str = fetch.report.bytes  # type: ignore[assignment]
    fetch.report.bytes = 7  # type: ignore[misc]
    fetch.add_done_callback(lambda: None)  # type: ignore[arg-type, misc]
    print(name, size)
