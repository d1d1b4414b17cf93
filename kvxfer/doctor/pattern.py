"""A cache with known contents, to be fetched and compared byte by byte.

Both sides compute the contents, and the ticket, from what they know already. So a doctor needs
nothing but the ordinary protocol of agents to check the way to another.
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import hashlib
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvxfer._gpu_memory import Cuda, GpuArray, Hip
from kvxfer.agent import Agent
from kvxfer.cache import Cache
from kvxfer.errors import Error
from kvxfer.handles import Offer, Report
from kvxfer.ticket import AgentRef, Ticket, issue_ticket

AGENT = "kvxfer-doctor"
_OFFER = "kvxfer-doctor"
_LAYERS = ("layer.0", "layer.1")
_PLANES = ("k", "v")
_HEADS, _BLOCK_SIZE, _CONTENT = 4, 16, 128
_BLOCK_BYTES = _HEADS * _BLOCK_SIZE * _CONTENT * 2
TOKENS = 4096
_BLOCKS = TOKENS // _BLOCK_SIZE
TOTAL_BYTES = len(_LAYERS) * len(_PLANES) * _BLOCKS * _BLOCK_BYTES
_POISON = 0xA5
_FOR_EVER = 1e8  # seconds of lease
_FETCHES = (1 << 32) - 1


class _Tensor:
    """Memory of the standard library, as kvxfer takes tensors."""

    def __init__(self, memory: bytearray) -> None:
        self.memory = memory
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        self.__array_interface__: dict[str, Any] = {
            "version": 3,
            "shape": (_BLOCKS, _HEADS, _BLOCK_SIZE, _CONTENT),
            "typestr": "<u2",
            "data": (address, False),
        }


class PatternCache:
    """The cache of one side; the producer's holds the pattern, the consumer's something else."""

    def __init__(self, filled: bool) -> None:
        # Other places on the two sides, and never in the order of the tokens.
        step = 77 if filled else 101
        self.blocks = [(step * index + 3) % _BLOCKS for index in range(_BLOCKS)]
        self._memory = {
            (layer, plane): bytearray([_POISON]) * (_BLOCKS * _BLOCK_BYTES)
            for layer in _LAYERS
            for plane in _PLANES
        }
        if filled:
            for key, memory in self._memory.items():
                wanted = _contents(*key)
                for index, block in enumerate(self.blocks):
                    memory[block * _BLOCK_BYTES : (block + 1) * _BLOCK_BYTES] = wanted[
                        index * _BLOCK_BYTES : (index + 1) * _BLOCK_BYTES
                    ]
        tensors = {
            layer: tuple(_Tensor(self._memory[(layer, plane)]) for plane in _PLANES)
            for layer in _LAYERS
        }
        self.cache = Cache(tensors, dtype="bfloat16", model="kvxfer-doctor")

    def clear(self) -> None:
        """Overwrite all of it."""
        for memory in self._memory.values():
            place = (ctypes.c_char * len(memory)).from_buffer(memory)
            ctypes.memset(place, _POISON, len(memory))

    def wrong_bytes(self, tokens: int = TOKENS) -> int:
        """Return how many bytes of the first tokens are not the pattern's."""
        wrong = 0
        for (layer, plane), memory in self._memory.items():
            wanted = _contents(layer, plane)
            for index, block in enumerate(self.blocks[: tokens // _BLOCK_SIZE]):
                found = memory[block * _BLOCK_BYTES : (block + 1) * _BLOCK_BYTES]
                expected = wanted[index * _BLOCK_BYTES : (index + 1) * _BLOCK_BYTES]
                if found != expected:
                    wrong += sum(a != b for a, b in zip(found, expected, strict=True))
        return wrong


def gpu_cache(driver: Cuda | Hip) -> Cache:
    """Return a cache of the pattern's shape in the memory of a GPU."""
    shape = (_BLOCKS, _HEADS, _BLOCK_SIZE, _CONTENT)
    tensors = {layer: tuple(GpuArray(driver, shape, 2) for _ in _PLANES) for layer in _LAYERS}
    return Cache(tensors, dtype="bfloat16", model="kvxfer-doctor")


@functools.cache
def _contents(layer: str, plane: str) -> bytes:
    return hashlib.shake_256(f"kvxfer doctor {layer} {plane}".encode()).digest(
        _BLOCKS * _BLOCK_BYTES
    )


def ticket_for(address: str, secret: str | None) -> Ticket:
    """Return the ticket for the pattern of the doctor who listens at an address."""
    generation = hashlib.sha256(f"kvxfer doctor {secret or ''}".encode()).digest()[:16]
    agent = AgentRef(name=AGENT, address=address)
    return issue_ticket(_OFFER, [agent], num_tokens=TOKENS, generation=generation, secret=secret)


def offer_pattern(agent: Agent, cache: PatternCache) -> Offer:
    """Offer the pattern for as long as the agent is there."""
    agent.register(cache.cache)
    ticket = ticket_for(agent.address, agent.config.secret)
    return agent.offer(
        cache.cache, cache.blocks, ticket=ticket, lease=_FOR_EVER, consumers=_FETCHES
    )


@dataclass(frozen=True)
class Fetched:
    """What became of the pattern."""

    report: Report
    seconds: float
    """Of the fastest fetch."""
    wrong_bytes: int


def fetch_pattern(
    agent: Agent, address: str, cache: PatternCache, timeout: float, repeat: int = 3
) -> Fetched:
    """Fetch the pattern of the doctor at an address; the last fetch is compared byte by byte.

    Raises
    ------
    Error
        It could not be fetched.
    """
    agent.register(cache.cache)
    ticket = ticket_for(address, agent.config.secret)
    best, report = float("inf"), None
    for turn in range(repeat):
        if turn + 1 == repeat:
            cache.clear()
        start = time.monotonic()
        fetch = agent.fetch(ticket, cache.cache, cache.blocks, timeout=timeout, codec="raw")
        fetch.wait()
        best = min(best, time.monotonic() - start)
        report = fetch.report
    assert report is not None
    return Fetched(report, best, cache.wrong_bytes())


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve the pattern until the standard input ends: the other process of the self-test."""
    parser = argparse.ArgumentParser()
    parser.add_argument("listen")
    options = parser.parse_args(arguments)
    try:
        with Agent(AGENT, listen=options.listen) as agent:
            offer = offer_pattern(agent, PatternCache(filled=True))
            sys.stdout.write(json.dumps({"address": agent.address}) + "\n")
            sys.stdout.flush()
            sys.stdin.read()
            offer.release()
    except Error as error:
        sys.stdout.write(json.dumps({"error": str(error)}) + "\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
