"""Moves a pattern over each path there is, and compares every byte."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable

from kvxfer._gpu_memory import open_gpu
from kvxfer._numbers import format_bytes
from kvxfer.agent import Agent
from kvxfer.config import Config
from kvxfer.doctor.findings import Finding, State
from kvxfer.doctor.pattern import (
    AGENT,
    TOKENS,
    TOTAL_BYTES,
    PatternCache,
    fetch_pattern,
    gpu_cache,
    offer_pattern,
)
from kvxfer.errors import Error
from kvxfer.transports import Transport

PATIENCE = 20.0
"""Seconds for all paths together: they take one, but a machine that is busy is no broken one."""
_LOOPBACK = "loopback:"
_NARROWING = (
    *("KVXFER_TRANSPORT", "KVXFER_INTERFACE", "KVXFER_ADVERTISE"),
    *("KVXFER_TLS_CERT", "KVXFER_TLS_KEY", "KVXFER_TLS_CA"),  # for other names than 127.0.0.1
)
_REPORT = "this must not happen: please report it, with the output of kvxfer doctor --json"


class Producer:
    """The other process. It ends with this one."""

    def __init__(self) -> None:
        # What narrows the choice of paths is not for a test of all of them.
        environment = {name: it for name, it in os.environ.items() if name not in _NARROWING}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "kvxfer.doctor.pattern", "127.0.0.1:0"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
            start_new_session=True,  # Ctrl-C is for this process, which then ends that one
        )

    def address(self, deadline: float) -> str:
        """Return where it listens.

        Raises
        ------
        Error
            It does not.
        """
        assert self._process.stdout is not None
        patience = max(0.0, deadline - time.monotonic())
        if not select.select([self._process.stdout], [], [], patience)[0]:
            raise Error(f"the process of the other side said nothing for {patience:.1f} s")
        line = self._process.stdout.readline()
        answer = json.loads(line) if line else {"error": "the other side's process ended at once"}
        if "error" in answer:
            raise Error(str(answer["error"]))
        return str(answer["address"])

    def close(self) -> None:
        """End it."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(1.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()


def test_paths(transports: dict[str, Transport], producer: Producer) -> list[Finding]:
    """Return how each available transport did between two processes, loopback within this one."""
    deadline = time.monotonic() + PATIENCE
    cache = PatternCache(filled=False)
    findings = []
    found: list[str | Error] = []

    def address() -> str:
        """Wait for it as late as possible: that process starts meanwhile."""
        if not found:
            try:
                found.append(producer.address(deadline))
            except Error as error:
                found.append(error)
        if isinstance(found[0], Error):
            raise found[0]
        return found[0]

    for name, transport in transports.items():
        if not transport.available:
            continue
        if name == "loopback":
            findings.append(judge(f"selftest.{name}", name, lambda: _loopback(cache, deadline)))
            continue

        def between(name: str = name) -> tuple[str, int]:
            return fetch_over(name, address(), cache, deadline)

        findings.append(judge(f"selftest.{name}", f"{name}, two processes", between))
    return findings


def judge(identity: str, what: str, run: Callable[[], tuple[str, int]]) -> Finding:
    """Return the finding of a path; `run` returns what to say and how many bytes were wrong."""
    try:
        said, wrong = run()
    except (Error, OSError) as error:
        return failure(identity, what, error)
    if wrong:
        return Finding(
            identity, what, f"{wrong} of {TOTAL_BYTES} bytes WRONG; {said}", State.BAD,
            "an engine would answer from wrong KV", _REPORT,
        )  # fmt: skip
    return Finding(identity, what, f"every byte as it should be; {said}")


def failure(identity: str, what: str, error: Exception) -> Finding:
    """Return the finding of a path over which nothing could be fetched."""
    return Finding(
        identity,
        what,
        f"failed: {error}",
        State.BAD,
        "transfers over it fail as well",
        "the message names the cause; docs/doctor.md and docs/troubleshooting.md have more",
    )


def fetch_over(
    transport: str,
    address: str,
    cache: PatternCache,
    deadline: float,
    config: Config | None = None,
) -> tuple[str, int]:
    """Fetch the pattern of another process; return what to say of it and the wrong bytes.

    Settings that narrow the choice of paths count only where `config` is given.
    """
    left = max(0.1, deadline - time.monotonic())
    if config is None:
        config = Config().replace(transport=transport, interface=None, advertise=None)
        config = config.replace(tls_cert=None, tls_key=None, tls_ca=None, handshake_timeout=left)
    with Agent(f"{AGENT}-asks", config=config) as agent:
        found = fetch_pattern(agent, address, cache, left)
    rate = found.report.bytes / found.seconds / 1e9
    size = f"{found.report.bytes >> 20} MiB at {rate:.2f} GB/s"
    return f"{size} over {found.report.transport}: {found.report.why}", found.wrong_bytes


def check_gpu_memory(tokens: int = TOKENS) -> Finding:
    """Return how the pattern came through the memory of the first GPU: there, and back."""
    return judge("selftest.gpu", "GPU memory, there and back", lambda: _through_gpu(tokens))


def _through_gpu(tokens: int) -> tuple[str, int]:
    source, target = PatternCache(filled=True), PatternCache(filled=False)
    memory = gpu_cache(open_gpu())
    blocks = target.blocks  # of the GPU's cache too: in another order than the source's
    with (
        Agent("host", listen=_LOOPBACK, transport="loopback") as host,
        Agent("gpu", listen=_LOOPBACK, transport="loopback") as gpu,
    ):
        for agent, cache in ((host, source.cache), (host, target.cache), (gpu, memory)):
            agent.register(cache)
        used = tokens // (TOKENS // len(blocks))
        there = host.offer(source.cache, source.blocks[:used], tokens)
        gpu.fetch(there.ticket, memory, blocks[:used], timeout=PATIENCE, codec="raw").wait()
        back = gpu.offer(memory, blocks[:used], tokens)
        fetch = host.fetch(back.ticket, target.cache, blocks[:used], timeout=PATIENCE, codec="raw")
        fetch.wait()
    size = format_bytes(fetch.report.bytes)
    return f"{size} packed by it at {fetch.report.gbps:.2f} GB/s", target.wrong_bytes(tokens)


def _loopback(cache: PatternCache, deadline: float) -> tuple[str, int]:
    with Agent(AGENT, listen=_LOOPBACK, transport="loopback") as producer:
        offer = offer_pattern(producer, PatternCache(filled=True))
        try:
            return fetch_over("loopback", producer.address, cache, deadline)
        finally:
            offer.release()
