"""UCX as tests use it: over its sockets and its shared memory, or over real RDMA adapters."""

from __future__ import annotations

import functools
import os

import pytest

import kvxfer
from kvtest import fake_verbs

# What the tests call it, and what UCX may then use. It shares memory only where it is told to care
# for the errors of that, which it is built to do since 1.16.
LANES = {"ucx-tcp": "tcp", "ucx-shm": "posix,sysv"}
_SETTINGS = {"UCX_NET_DEVICES": "lo"}
_SETTINGS |= {"UCX_POSIX_ERROR_HANDLING": "y", "UCX_SYSV_ERROR_HANDLING": "y"}
if adapters := fake_verbs.real_devices():
    # One adapter for both sides: UCX reads its settings for each agent, but not from the agent.
    LANES = {"ucx-rc": "rc_v", "ucx-ud": "ud_v"}
    _SETTINGS = {"UCX_NET_DEVICES": f"{adapters[0].split(',')[0]}:1"}
    _SETTINGS |= {"UCX_IB_GID_INDEX": "0"}  # soft-RoCE drops its datagrams to IPv4 addresses
    # The guest of tools/rdma_rig.sh maps page by page, 65,530 for a process.
    _SETTINGS |= {"UCX_RC_RX_QUEUE_LEN": "256", "UCX_UD_RX_QUEUE_LEN": "256"}
ONE = next(iter(LANES))
"""Where it matters that it is UCX, not what that uses."""
_SETTINGS |= {"UCX_WARN_UNUSED_ENV_VARS": "n"}  # older ones know less
SETTINGS = ("UCX_TLS", *_SETTINGS)


@functools.cache
def missing() -> str | None:
    found = kvxfer.transports()["ucx"]
    return None if found.available else found.why


def use(transport: str) -> None:
    """Let agents of this process use these lanes; skip the test where UCX is missing."""
    os.environ |= {**_SETTINGS, "UCX_TLS": LANES[transport]}
    if (reason := missing()) is not None:
        pytest.skip(f"no UCX here: {reason}")
