"""The way between two hosts: one doctor listens, the other fetches from it."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
import time

from kvxfer.agent import Agent
from kvxfer.bench.case import BenchError
from kvxfer.bench.channel import INTRODUCTION, connect
from kvxfer.config import Config
from kvxfer.doctor.findings import Finding
from kvxfer.doctor.pattern import AGENT, PatternCache, offer_pattern
from kvxfer.doctor.selftest import failure, fetch_over, judge
from kvxfer.transports import Transport

_PATIENCE = 10.0
"""Seconds for one path to the other host: it takes a fraction of one."""


def serve(listen: str, config: Config) -> int:
    """Serve doctors on other hosts until SIGINT or SIGTERM; return the exit status.

    Raises
    ------
    Error
        It can't listen there.
    """
    ended = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: ended.set())
    with Agent(AGENT, listen=listen, config=config) as agent:
        offer = offer_pattern(agent, PatternCache(filled=True))
        sys.stdout.write(
            f"Listening. On the other host:\n  kvxfer doctor --peer {agent.address}\n"
            "Ctrl-C ends it.\n"
        )
        sys.stdout.flush()
        while not ended.wait(3600.0):
            pass
        offer.release()
    return 0


def check_peer(address: str, transports: dict[str, Transport]) -> list[Finding]:
    """Return how the paths to another host do: that which would be taken, then each alone.

    What listens there is a doctor, or ``kvxfer bench serve``.
    """
    way = _Way(address, address)
    findings = way.check(transports)
    if INTRODUCTION not in findings[0].found:
        return findings
    try:
        with contextlib.closing(connect(address, way.config)) as channel:
            return _Way(address, str(channel.ask("pattern")["address"])).check(transports)
    except BenchError as error:
        return [failure("peer.auto", f"{address} by auto", error)]


class _Way:
    """To the agent that has the pattern. `named` is what the user calls it."""

    def __init__(self, named: str, address: str) -> None:
        self._named, self._address = named, address
        self._cache = PatternCache(filled=False)
        self.config = Config()

    def check(self, transports: dict[str, Transport]) -> list[Finding]:
        auto = self._over("auto")
        if "failed" in auto.found:
            return [auto]  # no other would do better, and each takes its time
        # Shared memory is not asked for: auto takes it where it can be.
        alone = [name for name in transports if name not in ("loopback", "shm")]
        return [auto, *(self._over(name) for name in alone if transports[name].available)]

    def _over(self, name: str) -> Finding:
        config = self.config if name == "auto" else self.config.replace(transport=name)

        def run() -> tuple[str, int]:
            deadline = time.monotonic() + _PATIENCE
            return fetch_over(name, self._address, self._cache, deadline, config)

        return judge(f"peer.{name}", f"{self._named} by {name}", run)
