"""UCX as tests use it: over its sockets, or over its shared memory."""

from __future__ import annotations

import functools
import os

import pytest

import kvxfer

# What the tests call it, and what UCX may then use. It shares memory only where it is told to care
# for the errors of that, which it is built to do since 1.16.
LANES = {"ucx-tcp": "tcp", "ucx-shm": "posix,sysv"}
SETTINGS = (
    "UCX_TLS",
    "UCX_NET_DEVICES",
    "UCX_POSIX_ERROR_HANDLING",
    "UCX_SYSV_ERROR_HANDLING",
    "UCX_WARN_UNUSED_ENV_VARS",  # older ones know less
)


@functools.cache
def missing() -> str | None:
    found = kvxfer.transports()["ucx"]
    return None if found.available else found.why


def use(transport: str) -> None:
    """Let agents of this process use these lanes; skip the test where UCX is missing."""
    os.environ["UCX_TLS"] = LANES[transport]
    os.environ["UCX_POSIX_ERROR_HANDLING"] = os.environ["UCX_SYSV_ERROR_HANDLING"] = "y"
    os.environ["UCX_NET_DEVICES"] = "lo"
    os.environ["UCX_WARN_UNUSED_ENV_VARS"] = "n"
    if (reason := missing()) is not None:
        pytest.skip(f"no UCX here: {reason}")
