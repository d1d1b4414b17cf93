"""Links that corrupt, lose, repeat, delay and reorder: never a wrong byte, never a hang."""

from __future__ import annotations

import pytest
from kvtest.agents import LONG, consumer, pair, producer, until
from kvtest.caches import Geometry, Paged

import kvxfer
from kvxfer import Status, _core

SIDE = Geometry(layers=("a", "b"), content=64, num_blocks=32)
BLOCKS = range(32)
TOKENS = 32 * 16
# Many chunks, so that each fault meets some of them.
KNOBS = {"arena_bytes": 64 << 10, "chunk_bytes": 8 << 10}


def connect(decode: kvxfer.Agent, prefill: kvxfer.Agent, **faults: float) -> None:
    """Link two agents of this process by a link on which these things go wrong."""
    wrong = _core.LoopbackFaults()
    for name, value in faults.items():
        setattr(wrong, name, value)
    decode._peers.attach_loopback(prefill._peers, wrong)


class Sides:
    def __init__(self, prefill: kvxfer.Agent, decode: kvxfer.Agent) -> None:
        self.prefill, self.decode = prefill, decode
        self.source, self.target = Paged(SIDE, seed=1), Paged(SIDE)
        prefill.register(self.source.cache)
        decode.register(self.target.cache)

    def fetch(self, timeout: float = LONG) -> Status:
        self.target.poison()
        offer = self.prefill.offer(self.source.cache, BLOCKS, TOKENS)
        fetch = self.decode.fetch(offer.ticket, self.target.cache, BLOCKS, timeout=timeout)
        try:
            fetch.wait(LONG)
        except kvxfer.TransferError:
            offer.release()
        assert offer._wait(LONG)
        return fetch.status

    @property
    def wrong(self) -> int:
        """Elements that hold neither what was sent nor what was there before."""
        return sum(
            int(((got != sent) & (got != 0xEEEE)).sum())
            for mine, theirs in zip(self.target.arrays, self.source.arrays, strict=True)
            for got, sent in zip(mine, theirs, strict=True)
        )


@pytest.mark.parametrize("codec", ["raw", "int8", "fp8_e4m3"])
def test_every_corruption_is_caught(codec: str) -> None:
    with pair("loopback", **KNOBS) as (prefill, decode):
        connect(decode, prefill, corrupt_write=1.0)
        sides = Sides(prefill, decode)
        for number in range(1, 6):
            offer = prefill.offer(sides.source.cache, BLOCKS, TOKENS, id=f"offer-{number}")
            fetch = decode.fetch(
                offer.ticket, sides.target.cache, BLOCKS, codec=codec, timeout=LONG
            )
            with pytest.raises(
                kvxfer.TransferError,
                match=rf"'offer-{number}' from 'prefill' over loopback.*digest.*fetch again",
            ) as caught:
                fetch.wait()
            assert caught.value.status is Status.CORRUPT
            assert decode.stats.digest_errors >= number
            offer.release()


@pytest.mark.parametrize("seed", range(5))
def test_rare_corruption_is_caught(seed: int) -> None:
    """One chunk in fifty: what is delivered is right, the rest fails as corrupt."""
    with pair("loopback", **KNOBS) as (prefill, decode):
        connect(decode, prefill, corrupt_write=0.02, seed=seed)
        sides = Sides(prefill, decode)
        ended = []
        for _ in range(8):
            ended.append(sides.fetch())
            if ended[-1] is Status.OK:
                assert sides.target.same_as(sides.source)
        assert set(ended) <= {Status.OK, Status.CORRUPT}


def test_without_the_digest_corruption_gets_through() -> None:
    """The control: it shows that these tests would see a wrong byte."""
    with pair("loopback", digest=False, **KNOBS) as (prefill, decode):
        connect(decode, prefill, corrupt_write=1.0)
        sides = Sides(prefill, decode)
        assert sides.fetch() is Status.OK
        assert not sides.target.same_as(sides.source)
        assert sides.wrong > 0
        assert decode.stats.digest_errors == 0


@pytest.mark.parametrize(
    "faults",
    [
        {"reorder_write": 0.5},
        {"duplicate_write": 0.5},
        {"delay_us": 3000},
        {"reorder_write": 0.3, "duplicate_write": 0.3, "delay_us": 2000},
    ],
    ids=str,
)
@pytest.mark.parametrize("seed", range(2))
def test_what_comes_late_twice_or_in_another_order_is_delivered(faults: dict, seed: int) -> None:
    with pair("loopback", **KNOBS) as (prefill, decode):
        connect(decode, prefill, seed=seed, **faults)
        sides = Sides(prefill, decode)
        for _ in range(4):
            assert sides.fetch() is Status.OK
            assert sides.target.same_as(sides.source)
        until(lambda: decode.stats.free_slots == decode.stats.slots)


@pytest.mark.parametrize(
    "faults",
    [
        {"drop_write": 0.05},
        {"drop_write": 1.0},
        {"drop_message": 0.1},
        {"drop_message": 0.7},
        {"duplicate_message": 0.3},
        {"drop_message": 0.05, "duplicate_message": 0.05, "drop_write": 0.02, "delay_us": 1000},
        {
            "drop_write": 0.02,
            "duplicate_write": 0.2,
            "reorder_write": 0.2,
            "corrupt_write": 0.02,
            "delay_us": 1000,
        },
    ],
    ids=str,
)
@pytest.mark.parametrize("seed", range(2))
def test_what_is_lost_ends_in_time_and_wrong_bytes_never_come(faults: dict, seed: int) -> None:
    """No transport may lose anything; one that does costs fetches, never a wrong one."""
    knobs = {**KNOBS, "heartbeat_interval": 0.1, "heartbeat_timeout": 5.0}
    with pair("loopback", **knobs) as (prefill, decode):
        sides = Sides(prefill, decode)
        for attempt in range(3):
            connect(decode, prefill, seed=100 * seed + attempt, **faults)
            ended = sides.fetch(timeout=0.4)
            if ended is Status.OK:
                assert sides.target.same_as(sides.source)
            if ended is not Status.CORRUPT:
                assert sides.wrong == 0
        # Over a link that works it works.
        connect(decode, prefill)
        assert sides.fetch() is Status.OK
        assert sides.target.same_as(sides.source)


def test_a_late_write_finds_its_slot_closed() -> None:
    """Cancelled while its chunks are delayed on their way; the next fetch gets the same slots."""
    with pair("loopback", **KNOBS) as (prefill, decode):
        connect(decode, prefill, delay_us=20_000)
        sides = Sides(prefill, decode)
        other = Paged(SIDE, seed=2)
        prefill.register(other.cache)
        for _ in range(5):
            sides.target.poison()
            sent = prefill.stats.bytes_sent
            offer = prefill.offer(other.cache, BLOCKS, TOKENS)
            fetch = decode.fetch(offer.ticket, sides.target.cache, BLOCKS, timeout=LONG)
            until(lambda sent=sent: prefill.stats.bytes_sent > sent)
            fetch.cancel()
            offer.release()
            assert fetch.status is Status.CANCELLED
            assert sides.fetch() is Status.OK
            assert sides.target.same_as(sides.source)


@pytest.mark.parametrize("who", ["prefill", "decode"])
def test_the_consumer_decides_about_the_digest(who: str) -> None:
    """What the producer is set to does not matter to those who fetch from it."""
    with (
        producer("loopback", digest=who != "prefill", **KNOBS) as prefill,
        consumer("loopback", digest=who != "decode", **KNOBS) as decode,
    ):
        connect(decode, prefill, corrupt_write=1.0)
        ended = Sides(prefill, decode).fetch()
        assert ended is (Status.CORRUPT if who == "prefill" else Status.OK)
