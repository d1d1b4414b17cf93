"""A scheduler that issues a ticket for offers that its ranks make later."""

from __future__ import annotations

from collections.abc import Sequence

import kvxfer


def references(hosts: Sequence[str], heads: int) -> list[kvxfer.AgentRef]:
    share = heads // len(hosts)
    return [
        kvxfer.AgentRef(name=f"rank-{i}", address=host, heads=(i * share, (i + 1) * share))
        for i, host in enumerate(hosts)
    ]


def issue(hosts: Sequence[str], request: str) -> kvxfer.Ticket:
    return kvxfer.issue_ticket(
        request, references(hosts, 8), num_tokens=700, first_token=0, model="llama", secret=None
    )


def stage(agent: kvxfer.Agent, layers: Sequence[str]) -> kvxfer.AgentRef:
    reference: kvxfer.AgentRef = agent.reference(layers=layers, heads=(0, 8))
    assert reference.incarnation == agent.incarnation
    return reference


def rank(agent: kvxfer.Agent, cache: kvxfer.Cache, ticket: kvxfer.Ticket) -> kvxfer.Offer:
    return agent.offer(cache, range(44), ticket=ticket, lease=5.0, ready=False)


def hold(agent: kvxfer.Agent, ticket: kvxfer.Ticket, name: str, address: str) -> None:
    try:
        agent.connect(name, address)
    except kvxfer.HandshakeError as error:
        raise RuntimeError(error.status.value) from error
    agent.renew(ticket)
