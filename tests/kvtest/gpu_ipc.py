"""Two processes of one host with caches on fake GPUs, for tests of what they share."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kvxfer
from kvtest import fake_gpu
from kvtest.agents import LONG, registered
from kvtest.caches import Geometry, Paged
from kvtest.child import Child
from kvtest.fake_gpu import GpuPaged, Gpus

LAYERS = ("layer.0", "layer.1")
SIDE = Geometry(layers=LAYERS, num_blocks=12, content=64, heads=(0, 2))
OTHER = Geometry(layers=LAYERS, num_blocks=24, content=64, heads=(0, 2), axes="BNHC", block_size=8)
BLOCKS, OTHER_BLOCKS = [7, 2, 9, 0, 5], [20, 3, 5, 17, 0, 9, 8, 1, 2]
TOKENS = 69  # no multiple of a block


@contextlib.contextmanager
def all_given_back(folder: Path) -> Iterator[Gpus]:
    """The fake GPUs, of which nothing may be left in use."""
    with fake_gpu.without_leaks(folder) as found:
        yield found
        assert found.early_frees() == 0


class Prefill:
    """A producer in a process of its own, whose cache is on one of its GPUs."""

    def __init__(self, child: Child, device: int = 0, **knobs: Any) -> None:
        self.child = child
        self.before = child.call("gpu", "open_handles")
        child.call("start", "prefill", "shm", listen="", **knobs)
        child.call("gpu_cache", "cache", SIDE, device, 3, False)
        self.source = Paged(SIDE, seed=3)

    def offer(self) -> kvxfer.Ticket:
        return self.child.call("offer", "cache", BLOCKS, TOKENS, consumers=9)

    def release(self) -> None:
        self.child.call("release_offers")

    def gpu(self, method: str, *args: Any) -> Any:
        return self.child.call("gpu", method, *args)


@contextlib.contextmanager
def idle_prefill() -> Iterator[Prefill]:
    """One in which nothing of a consumer's stays open."""
    with Child() as child:
        found = Prefill(child)
        yield found
        found.release()
        child.call("forget", "cache")
        child.call("close")
        assert found.gpu("open_handles") == found.before


@contextlib.contextmanager
def on_gpu(agent: kvxfer.Agent, geometry: Geometry = OTHER, device: int = 1) -> Iterator[GpuPaged]:
    paged = GpuPaged(geometry, device)
    try:
        with registered(agent, paged.cache):
            yield paged
    finally:
        paged.free()


def fetched(
    decode: kvxfer.Agent,
    prefill: Prefill,
    target: Paged,
    ticket: kvxfer.Ticket | None = None,
) -> kvxfer.FetchReport:
    """Fetch all, compare every byte, and return the report."""
    ticket = ticket or prefill.offer()
    fetch = decode.fetch(ticket, target.cache, OTHER_BLOCKS, timeout=LONG)
    fetch.wait()
    if isinstance(target, GpuPaged):
        target.download()
    want = Paged(OTHER)
    want.deliver([prefill.source], BLOCKS, OTHER_BLOCKS, (0, TOKENS))
    assert target.same_as(want)
    return fetch.report


def launches(prefill: Prefill, before: int) -> bool:
    return prefill.gpu("calls", "cuLaunchKernel") > before


def all_slots_free(agent: kvxfer.Agent) -> bool:
    return agent.stats.free_slots == agent.stats.slots
