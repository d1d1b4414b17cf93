"""Real engines that are killed in the middle of requests and come back under their old names."""

from __future__ import annotations

import threading
import time
import urllib.error
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytestmark = [
    pytest.mark.slow,  # six starts of engines
    pytest.mark.timeout(1800),
    pytest.mark.filterwarnings("default"),
]

LEASE = 5.0


class Pair:
    """A prefill and a decode engine at fixed ports, and proxies in front of them."""

    def __init__(self, model: Path, logs: Path) -> None:
        from rig import engines

        self._engines, self._model, self._logs = engines, model, logs
        self._starts = 0
        self.single = engines.start_engine(model, logs / "single.log", core="0")
        self.p = self._start("kv_producer", "0", engines.free_port())
        self.d = self._start("kv_consumer", "1", engines.free_port())
        self.proxies = {
            flow: engines.start_proxy(logs / f"{flow}.log", self.p, self.d, flow)
            for flow in ("serial", "concurrent")
        }
        self.servers = [self.single, self.p, self.d, *self.proxies.values()]

    def _start(self, role: str, core: str, port: int) -> Any:
        self._starts += 1
        return self._engines.start_engine(
            self._model,
            self._logs / f"{role}-{self._starts}.log",
            role=role,
            core=core,
            port=port,
            extra={"lease": LEASE},
        )

    def restart(self, name: str) -> None:
        role, core = {"p": ("kv_producer", "0"), "d": ("kv_consumer", "1")}[name]
        old = getattr(self, name)
        new = self._start(role, core, old.port)
        self.servers.append(new)
        new.wait_ready()
        setattr(self, name, new)

    def wanted(self, tokens: list[int]) -> list[int]:
        return self._engines.tokens(self._engines.completion(self.single.port, tokens))

    def got(self, flow: str, tokens: list[int]) -> list[int]:
        return self._engines.tokens(self._engines.completion(self.proxies[flow].port, tokens))

    def check(self, seed: str) -> None:
        """Both flows give the right tokens, and load them.

        The first request of a flow may be recomputed: its proxy knows an engine that is gone.
        """
        before = 0.0
        for turn in ("first", "second"):
            for flow in ("serial", "concurrent"):
                tokens = self._engines.prompt(300, f"{seed} {flow} {turn}")
                assert self.got(flow, tokens) == self.wanted(tokens)
            self._engines.wait_idle(self.p)
            self._engines.wait_idle(self.d)
            loads = self.d.metric("vllm:kvxfer_loads_total") - before
            before = self.d.metric("vllm:kvxfer_loads_total")
        assert loads == 2

    def in_background(self, flow: str, tokens: list[int]) -> Any:
        """Send a request; returns where its tokens will stand, or the error."""
        found = SimpleNamespace(tokens=None, error=None)

        def run() -> None:
            try:
                found.tokens = self.got(flow, tokens)
            except (RuntimeError, OSError, urllib.error.URLError) as error:
                found.error = error

        found.thread = threading.Thread(target=run)
        found.thread.start()
        return found


@pytest.fixture(scope="module")
def pair(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    made = Pair(model, tmp_path_factory.mktemp("death"))
    try:
        for server in list(made.servers):
            server.wait_ready()
        made.check("before")
        yield made
    finally:
        for server in made.servers:
            server.kill()


@pytest.mark.parametrize("flow", ["serial", "concurrent"])
def test_prefill_engine_dies_in_the_middle(pair: Pair, flow: str) -> None:
    tokens = pair._engines.prompt(3000, f"killed {flow}")
    request = pair.in_background(flow, tokens)
    time.sleep(0.3)  # a prefill takes longer
    pair.p.kill()
    request.thread.join(120)
    assert request.error is None
    assert request.tokens == pair.wanted(tokens)  # the decode engine has prefilled
    pair._engines.wait_idle(pair.d)
    pair.restart("p")
    pair.check(f"after {flow}")


def test_decode_engine_dies_in_the_middle(pair: Pair) -> None:
    tokens = pair._engines.prompt(3000, "killed decode")
    request = pair.in_background("concurrent", tokens)
    time.sleep(0.3)
    pair.d.kill()
    request.thread.join(120)
    assert request.error is not None  # the proxy has no other decode engine
    pair._engines.wait_idle(pair.p)  # no block is left, at the latest when the lease ends
    pair.restart("d")
    pair.check("after decode")
