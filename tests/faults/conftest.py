"""Which transports the tests of faults run over."""

from __future__ import annotations

import pytest
from kvtest import ucx
from kvtest.agents import BETWEEN_PROCESSES, transport_name


@pytest.fixture(params=["loopback", "shm", "tcp", "verbs", ucx.ONE])
def transport(request: pytest.FixtureRequest) -> str:
    transport_name(request.param)
    return request.param


@pytest.fixture(params=[name for name in BETWEEN_PROCESSES if name != "tcp6"])
def process_transport(request: pytest.FixtureRequest) -> str:
    transport_name(request.param)
    return request.param


@pytest.fixture(
    params=[
        name for name in BETWEEN_PROCESSES if name == ucx.ONE or name not in ("tcp6", *ucx.LANES)
    ]
)
def process_transport_kind(request: pytest.FixtureRequest) -> str:
    """For what agents do whatever the link is, and links of one kind do alike."""
    transport_name(request.param)
    return request.param
