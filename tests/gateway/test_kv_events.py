"""What engines publish of their caches."""

from __future__ import annotations

import asyncio

import pytest
from gateway.rig import LONG, in_loop, rig

from kvxfer.integrations.gateway.engines import Engine
from kvxfer.integrations.gateway.kv_events import Blocks
from kvxfer.integrations.gateway.prompts import COMPLETIONS, Measure
from kvxfer.integrations.gateway.settings import Entry, Role, Settings


@pytest.fixture
def engine() -> Engine:
    found = Engine(Entry("http://a:1", Role.DECODE), "test", Settings())
    found.model_ids = ("m",)
    return found


def stored(names, parent, tokens, size=32, **more):
    """Return an event as vLLM writes it: a map with its kind."""
    return {
        "type": "BlockStored",
        "block_hashes": names,
        "parent_block_hash": parent,
        "token_ids": tokens,
        "block_size": size,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
        **more,
    }


def cached(engine: Engine, tokens) -> int:
    call = Measure(16).call(COMPLETIONS, {"prompt": tokens, "model": "m"}, {})
    return call.cached(engine.index.match(call.hashes))


def test_blocks_are_stored_and_removed(engine) -> None:
    blocks = Blocks(engine)
    blocks.batch(0, [1.0, [stored([b"a", b"b"], None, LONG[:64])]])
    assert cached(engine, LONG) == 64
    blocks.batch(1, [1.0, [stored([b"c"], b"b", LONG[64:96])], 0])
    assert cached(engine, LONG) == 96
    assert cached(engine, [1, *LONG]) == 0
    blocks.batch(2, [1.0, [{"type": "BlockRemoved", "block_hashes": [b"c"], "medium": "CPU"}]])
    assert cached(engine, LONG) == 96  # of another tier
    blocks.batch(
        3, [1.0, [{"type": "BlockRemoved", "block_hashes": [b"b", b"x"], "medium": "GPU"}]]
    )
    assert cached(engine, LONG) == 32
    blocks.batch(4, [1.0, [{"type": "AllBlocksCleared"}]])
    assert cached(engine, LONG) == 0


def test_older_releases_write_lists(engine) -> None:
    blocks = Blocks(engine)
    blocks.batch(0, [1.0, [["BlockStored", [7], None, LONG[:16], 16, None, "GPU"]]])
    assert cached(engine, LONG) == 16
    blocks.batch(1, [1.0, [["BlockRemoved", [7], "GPU"]]])
    assert cached(engine, LONG) == 0
    blocks.batch(2, [1.0, [["AllBlocksCleared"]]])


def test_after_a_gap_everything_is_learnt_anew(engine) -> None:
    blocks = Blocks(engine)
    blocks.batch(5, [1.0, [stored([b"a"], None, LONG[:32])]])
    assert cached(engine, LONG) == 32
    blocks.batch(7, [1.0, []])
    assert cached(engine, LONG) == 0
    blocks.batch(8, [1.0, [stored([b"c"], b"a", LONG[32:64])]])  # whose parent is not known now
    assert cached(engine, LONG) == 0


@pytest.mark.parametrize(
    "more", [{"lora_name": "x"}, {"extra_keys": [("salt",)]}, {"size": 24}, {"medium": "CPU"}]
)
def test_what_tokens_alone_do_not_name_is_left_out(engine, more) -> None:
    size = more.pop("size", 32)
    Blocks(engine).batch(0, [1.0, [stored([b"a"], None, LONG[:size], size, **more)]])
    assert len(engine.index) == 0


@pytest.mark.parametrize(
    "batch",
    [
        None,
        [],
        [1.0],
        [1.0, 3],
        [1.0, [None]],
        [1.0, [3]],
        [1.0, [[]]],
        [1.0, [{}]],
        [1.0, [{"type": "BlockStored"}]],
        [1.0, [{"type": "BlockRemoved", "medium": "GPU"}]],
        [1.0, [{"type": "Unheard of"}]],
        [1.0, [["BlockStored", 3, None, "text", "x", None, "GPU"]]],
        [1.0, [["BlockStored", [[]], None, [1] * 16, 16, None, "GPU"]]],
        [1.0, [["BlockStored", [b"x"], None, [1] * 16, 0, None, "GPU"]]],
        [1.0, [["BlockStored", [b"x"], None, [1] * 16, -16, None, "GPU"]]],
    ],
)
def test_odd_events_are_survived(engine, batch) -> None:
    blocks = Blocks(engine)
    blocks.batch(0, batch)
    blocks.batch(1, [1.0, [stored([b"a"], None, LONG[:32])]])
    assert cached(engine, LONG) == 32


@in_loop
async def test_events_over_zmq() -> None:
    zmq = pytest.importorskip("zmq.asyncio", reason="pyzmq is not installed")
    msgpack = pytest.importorskip("msgpack", reason="msgpack is not installed")
    import zmq as names

    context = zmq.Context()
    publisher = context.socket(names.PUB)
    port = publisher.bind_to_random_port("tcp://127.0.0.1")
    try:
        async with rig(prefill=1, decode=1) as it:
            address = f"tcp://127.0.0.1:{port}"
            entry = Entry(f"http://localhost:{it.decode[0].port}", Role.DECODE, address)
            engine = it.gateway.pool.add(entry, "test")
            await it.until(lambda: engine.healthy)
            batch = msgpack.packb([1.0, [stored([b"a", b"b"], None, LONG[:64])]])
            number = 0
            while cached(engine, LONG) < 64:  # until it has subscribed
                await publisher.send_multipart([b"", number.to_bytes(8, "big"), batch])
                number += 1
                await asyncio.sleep(0.02)
            await publisher.send_multipart([b"", b"\x00", b"\xc1 no msgpack"])
            await publisher.send_multipart([b"alone"])
            cleared = msgpack.packb([1.0, [{"type": "AllBlocksCleared"}]])
            await publisher.send_multipart([b"", number.to_bytes(8, "big"), cleared])
            await it.until(lambda: cached(engine, LONG) == 0)
    finally:
        publisher.close(0)
        context.term()
