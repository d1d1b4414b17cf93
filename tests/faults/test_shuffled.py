"""Messages that come twice, in another order or late, though TCP itself does nothing of that."""

from __future__ import annotations

import random

import pytest
from faults.campaign.proxy import Proxy
from faults.campaign.shuffle import SHUFFLES, Shuffle
from kvtest.agents import LONG, consumer, producer, until
from kvtest.caches import Geometry, Paged

import kvxfer
from kvxfer import AgentRef, Status

SIDE = Geometry(layers=("a", "b"), content=64, num_blocks=32)
BLOCKS = range(32)
TOKENS = 32 * 16
# All of it goes over the data streams, in many chunks; heartbeats see to it that messages follow.
KNOBS = {
    "arena_bytes": 64 << 10,
    "tcp_chunk_bytes": 8 << 10,
    "inline_bytes": 0,
    "window": 4,
    "heartbeat_interval": 0.05,
}

ORDER = {"repeat": [0, 0, 1, 2, 3, 4, 5], "swap": [1, 0, 2, 3, 4, 5], "late": [1, 2, 3, 0, 4, 5]}


@pytest.mark.parametrize("how", SHUFFLES)
def test_messages_stay_whole(how: str) -> None:
    """Cut into pieces anywhere, and begun in the middle of one."""
    draw = random.Random(how)
    for _ in range(50):
        messages = [bytes([i]) * draw.randrange(1, 20) for i in range(6)]
        rest = b"\xff" * draw.randrange(5)  # of one that began before
        passed = rest + b"".join(messages)
        spans, place = [], len(rest)
        for message in messages:
            spans.append((place, place + len(message)))
            place += len(message)
        shuffle, came, at = Shuffle(how), b"", 0
        while at < len(passed):
            end = at + draw.randrange(1, 12)
            begun = [span for span in spans if at <= span[0] < end]
            piece = passed[at:end]
            came += piece if shuffle.over else shuffle.feed(at, piece, begun)
            at = end
        assert shuffle.happened
        assert came == rest + b"".join(messages[i] for i in ORDER[how])


@pytest.mark.parametrize("how", SHUFFLES)
@pytest.mark.parametrize("direction", ["up", "down"])
def test_nothing_wrong_is_delivered(how: str, direction: str) -> None:
    """Control messages are numbered, so that ends the connection; chunks say what they are."""
    with producer("tcp", **KNOBS) as prefill, consumer("tcp", tcp_streams=2, **KNOBS) as decode:
        proxy = Proxy()
        proxy.target = prefill.address
        reference = AgentRef(name="prefill", address=proxy.address)
        source, target = Paged(SIDE, 1), Paged(SIDE)
        prefill.register(source.cache)
        decode.register(target.cache)

        def fetch() -> Status:
            target.poison()
            ticket = kvxfer.issue_ticket("r", [reference], num_tokens=TOKENS)
            offer = prefill.offer(source.cache, BLOCKS, ticket=ticket)
            fetch = decode.fetch(ticket, target.cache, BLOCKS, timeout=LONG)
            until(lambda: fetch.done)
            offer.release()
            if fetch.status is Status.OK:
                assert target.same_as(source)
            return fetch.status

        assert fetch() is Status.OK
        ended = []
        for seed in range(4):
            happened = proxy.happened[how]
            proxy.begin(how, direction, seed)
            while proxy.happened[how] == happened:
                ended.append(fetch())
            proxy.end(how)
        assert set(ended) <= {Status.OK, Status.PEER_LOST, Status.PROTOCOL, Status.CORRUPT}
        until(lambda: fetch() is Status.OK)
        if direction == "up":  # where only control messages go
            assert proxy.connections > 3
        until(lambda: decode.stats.free_slots == decode.stats.slots)
        proxy.close()
