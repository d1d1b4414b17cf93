"""Agents that the tests of one module share, by transport."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from kvtest.agents import BETWEEN_PROCESSES, TRANSPORTS, consumer, pair, transport_name
from kvtest.child import Child

import kvxfer


@pytest.fixture(scope="module", params=TRANSPORTS)
def transport(request: pytest.FixtureRequest) -> str:
    transport_name(request.param)
    return request.param


@pytest.fixture(scope="module")
def agents(transport: str) -> Iterator[tuple[kvxfer.Agent, kvxfer.Agent]]:
    """A producer and a consumer in this process."""
    with pair(transport) as both:
        yield both


@pytest.fixture(scope="module", params=BETWEEN_PROCESSES)
def process_transport(request: pytest.FixtureRequest) -> str:
    transport_name(request.param)
    return request.param


@pytest.fixture(scope="module")
def child(process_transport: str) -> Iterator[Child]:
    """Another process, whose agent listens."""
    with Child() as process:
        process.call("start", "prefill", process_transport, listen="")
        yield process


@pytest.fixture(scope="module")
def decode(process_transport: str) -> Iterator[kvxfer.Agent]:
    """The consumer of this process that fetches from `child`."""
    with consumer(process_transport) as agent:
        yield agent
