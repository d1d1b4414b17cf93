"""Which transports the tests of faults run over."""

from __future__ import annotations

import pytest
from kvtest.agents import TRANSPORTS, transport_name


@pytest.fixture(params=TRANSPORTS[:3])
def transport(request: pytest.FixtureRequest) -> str:
    transport_name(request.param)
    return request.param


@pytest.fixture(params=["shm", "tcp"])
def process_transport(request: pytest.FixtureRequest) -> str:
    return request.param
