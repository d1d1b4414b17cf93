"""Tickets, handshakes and messages: `pytest benches/micro --benchmark-only`."""

from __future__ import annotations

import json
from typing import Any

import pytest

import kvxfer
from kvxfer.handshake import Transcript
from kvxfer.ticket import parse_ticket

RANKS = [1, 8, 64]
SECRET = "swordfish"


def agents(ranks: int) -> list[kvxfer.AgentRef]:
    return [
        kvxfer.AgentRef(
            name=f"prefill-{rank}",
            address=f"10.0.0.{rank}:7000",
            incarnation=rank,
            heads=(rank, rank + 1),
        )
        for rank in range(ranks)
    ]


@pytest.mark.parametrize("ranks", RANKS)
def test_issue(benchmark: Any, ranks: int) -> None:
    held = agents(ranks)
    ticket = benchmark(lambda: kvxfer.issue_ticket("req-1", held, num_tokens=700, secret=SECRET))
    benchmark.extra_info["bytes"] = len(json.dumps(ticket))


@pytest.mark.parametrize("ranks", RANKS)
def test_parse(benchmark: Any, ranks: int) -> None:
    ticket = kvxfer.issue_ticket("req-1", agents(ranks), num_tokens=700, secret=SECRET)
    text = json.dumps(ticket)
    parsed = benchmark(lambda: parse_ticket(json.loads(text), SECRET))
    assert parsed.num_tokens == 700
    assert len(parsed.agents) == ranks


def test_prove(benchmark: Any) -> None:
    hello = {"kind": "peer", "name": "decode-0", "incarnation": "1", "nonce": "0" * 32}
    reply = {"name": "prefill-0", "incarnation": "2", "nonce": "1" * 32}

    def prove() -> None:
        transcript = Transcript(SECRET, hello, reply)
        transcript.check("producer", {"proof": transcript.proof("producer")})

    benchmark(prove)


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_round_trip(benchmark: Any, transport: str) -> None:
    """A fetch of one row: every message of a fetch, and next to no data."""
    import numpy as np

    def cache() -> kvxfer.Cache:
        return kvxfer.Cache({"layer": np.ones((4096, 1, 1, 8), "f2")}, axes="BHNC")

    with (
        kvxfer.Agent("prefill", listen="127.0.0.1:0", transport=transport) as prefill,
        kvxfer.Agent("decode", transport=transport) as decode,
    ):
        theirs, ours = prefill.register(cache()), decode.register(cache())
        numbers = iter(range(1 << 30))

        def offer() -> tuple[tuple[kvxfer.Offer], dict[str, Any]]:
            return (prefill.offer(theirs, [next(numbers) % 4096], 1),), {}

        def fetch(offered: kvxfer.Offer) -> None:
            decode.fetch(offered.ticket, ours, [0]).wait()

        benchmark.pedantic(fetch, setup=offer, rounds=300, warmup_rounds=10)
