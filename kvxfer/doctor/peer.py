"""The way between two hosts: one doctor listens, the other fetches from it."""

from __future__ import annotations

import signal
import sys
import threading
import time

from kvxfer.agent import Agent
from kvxfer.config import Config
from kvxfer.doctor.findings import Finding
from kvxfer.doctor.pattern import AGENT, PatternCache, offer_pattern
from kvxfer.doctor.selftest import fetch_over, judge
from kvxfer.transports import Transport

_PATIENCE = 10.0
"""Seconds for one path to the other host."""


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
    """Return how the paths to a listening doctor do: that which would be taken, then each alone."""
    config = Config()
    cache = PatternCache(filled=False)
    findings = []
    names = [name for name, it in transports.items() if it.available and name != "loopback"]
    for name in ("auto", *names):
        if name == "shm":
            continue  # auto takes it where it can be

        settings = config if name == "auto" else config.replace(transport=name)

        def run(name: str = name, settings: Config = settings) -> tuple[str, int]:
            return fetch_over(name, address, cache, time.monotonic() + _PATIENCE, settings)

        findings.append(judge(f"peer.{name}", f"{address} by {name}", run))
        if name == "auto" and "failed" in findings[0].found:
            break  # no other would do better, and each takes its time
    return findings
