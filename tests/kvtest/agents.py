"""Agents over a transport by its name, and the skips of what this host has not."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import kvxfer
from kvtest import fake_verbs, ucx
from kvtest.caches import Geometry, Paged

TRANSPORTS = ("loopback", "shm", "tcp", "tcp6", "verbs", ucx.ONE)
# The fake adapters of verbs reach no other process.
BETWEEN_PROCESSES = (
    *("shm", "tcp", "tcp6", *ucx.LANES),
    *(("verbs",) if fake_verbs.real_devices() else ()),
)

_FILES = Path(__file__).parents[1] / "data" / "tls"
CERTIFICATE = {
    "tls_cert": str(_FILES / "agent.pem"),
    "tls_key": str(_FILES / "agent.key"),
    "tls_ca": str(_FILES / "ca.pem"),
}

# No test waits for one of these: they only bound how long a broken one takes.
LONG = 60.0

SMALL: dict[str, Any] = {"arena_bytes": 4 << 20, "chunk_bytes": 64 << 10, "threads": 2}


def has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6, socket.SOCK_STREAM) as sock:
            sock.bind(("::1", 0))
    except OSError:
        return False
    return True


def transport_name(transport: str) -> str:
    """Return what `Config.transport` calls it; skip the test where this host has not got it."""
    if transport == "verbs":
        fake_verbs.use()
    if transport == "tcp6" and not has_ipv6():
        pytest.skip("this host has no IPv6 loopback address ::1")
    if transport in ucx.LANES:
        ucx.use(transport)
        return "ucx"
    return "tcp" if transport == "tcp6" else transport


def listen_address(transport: str) -> str:
    return {"loopback": "loopback:", "tcp6": "[::1]:0"}.get(transport, "127.0.0.1:0")


def devices(transport: str, *, producing: bool) -> dict[str, Any]:
    """Return the knob that names the adapters of a side, where those are real."""
    real = fake_verbs.real_devices() if transport == "verbs" else None
    return {} if real is None else {"verbs_devices": real[producing]}


def producer(transport: str, name: str = "prefill", **knobs: Any) -> kvxfer.Agent:
    return kvxfer.Agent(
        name,
        listen=listen_address(transport),
        transport=transport_name(transport),
        **{**SMALL, **devices(transport, producing=True), **knobs},
    )


def consumer(transport: str, name: str = "decode", **knobs: Any) -> kvxfer.Agent:
    knobs = {**SMALL, **devices(transport, producing=False), **knobs}
    return kvxfer.Agent(name, transport=transport_name(transport), **knobs)


@contextmanager
def pair(transport: str, **knobs: Any) -> Iterator[tuple[kvxfer.Agent, kvxfer.Agent]]:
    """A producer and a consumer in this process."""
    with producer(transport, **knobs) as prefill, consumer(transport, **knobs) as decode:
        yield prefill, decode


def until(condition: Callable[[], bool]) -> None:
    """Wait for what has to come, without saying when."""
    rest = threading.Event()
    end = time.monotonic() + LONG
    while not condition():
        assert time.monotonic() < end, "what was waited for never came"
        rest.wait(0.002)


@contextmanager
def registered(agent: kvxfer.Agent, cache: kvxfer.Cache) -> Iterator[kvxfer.Cache]:
    """A cache for the length of a block: agents that serve many examples must forget it."""
    agent.register(cache)
    try:
        yield cache
    finally:
        until(lambda: _unregistered(agent, cache))


def _unregistered(agent: kvxfer.Agent, cache: kvxfer.Cache) -> bool:
    try:
        agent.unregister(cache)
    except kvxfer.InvalidError as error:
        if "is in use" not in str(error):
            raise
        return False  # a consumer has all of its bytes, and its DONE is on its way
    return True


def works(prefill: kvxfer.Agent, **knobs: object) -> None:
    """A consumer that behaves is served."""
    side = Geometry(layers=("layer.0",), num_blocks=4)
    source, target = Paged(side, seed=1), Paged(side)
    with kvxfer.Agent("decode", **knobs) as decode:
        prefill.register(source.cache)
        decode.register(target.cache)
        offer = prefill.offer(source.cache, range(4), 64)
        decode.fetch(offer.ticket, target.cache, range(4)).wait(LONG)
        assert target.same_as(source)
        assert offer.wait(LONG) is kvxfer.Status.OK
    prefill.unregister(source.cache)
