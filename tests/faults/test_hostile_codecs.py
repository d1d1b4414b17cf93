"""Producers that agree on a codec and then send something else, over real sockets."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from kvtest import codec_model as model
from kvtest import wire
from kvtest.agents import LONG, consumer, producer, until
from kvtest.caches import Geometry, Paged
from kvtest.child import Child
from kvtest.coded import fill_like_a_model

import kvxfer
from kvxfer import Status, _core

SIDE = Geometry(layers=("layer.0",))  # planes of 16, 4 heads, bfloat16
TOKENS, ROWS = 32, 8 * 32
INT8 = ((4, 1, 0), (3, 1, 0))  # scheme, scale format, group: of k, of v
HEADER = 64
CODED = HEADER + 8 * (32 * 16 + 64)  # k: 16 scales and zeros, v: 32 scales
MOST = CODED + 4 * ROWS + 32 * ROWS  # with all rows raw


class Bait:
    """A consumer with one fetch of two blocks from a producer made by hand."""

    def __init__(self, decode: kvxfer.Agent, fake: wire.FakeProducer, codec: str) -> None:
        self.decode = decode
        self.target = Paged(SIDE)
        decode.register(self.target.cache)
        self.ticket = kvxfer.issue_ticket("r", [fake.reference()], num_tokens=TOKENS)
        self.fetch = decode.fetch(self.ticket, self.target.cache, [3, 4], codec=codec, timeout=LONG)
        self.peer = fake.accept()
        raw = self.peer.hear_a(wire.FETCH)
        (self.id,) = struct.unpack_from("<Q", raw, 1)
        at = 9 + 4 + 1 + 16 + 4 + 4 + 4 + 5 * 4  # one layer
        self.asked = struct.unpack_from("<BHHBIIII", raw, at)
        chunk_bytes, _, count = struct.unpack_from("<III", raw, at + 23)
        assert chunk_bytes >= MOST
        self.slots = struct.unpack_from(f"<{count}I", raw, at + 35)

    def accept(self, **changes: object) -> None:
        words = {
            "wire_bytes": MOST,
            "codec": wire.INT8,
            "panel_tokens": 64,
            "encodings": INT8,
            "why": "because",
            **changes,
        }
        self.peer.say(wire.accept(self.id, **words))

    def seed(self) -> int:
        g0, g1 = struct.unpack("<QQ", bytes.fromhex(self.ticket["generation"]))
        return g0 ^ g1 ^ 0x9E3779B97F4A7C15

    def commit(self, chunk: bytes, *, digest: tuple[int, int] | None = None) -> None:
        slot = self.slots[0]
        found = struct.pack("<QQ", *(digest or _core.digest(chunk, self.seed())))
        notice = wire.commit(self.id, slot=slot, size=len(chunk), digest=found)
        self.peer.data[0].sendall(wire.write(notice, chunk, offset=slot * (64 << 10)))

    def fails(self, status: Status, *words: str) -> None:
        with pytest.raises(kvxfer.TransferError, match="'prefill'") as caught:
            self.fetch.wait()
        assert caught.value.status is status
        for word in words:
            assert word in str(caught.value)


@pytest.fixture
def bait(request: pytest.FixtureRequest) -> Iterator[Bait]:
    """In int8, or in the codec that the test names."""
    with wire.FakeProducer() as fake, consumer("tcp") as decode:
        bait = Bait(decode, fake, getattr(request, "param", "int8"))
        with bait.peer:
            yield bait
        until(lambda: decode.stats.peers == 0)
        assert bait.fetch.done
        stats = decode.stats
        assert (stats.fetches, stats.free_slots) == (0, stats.slots)
        # What the fetch was not about is as it was, and others are served.
        rest = [block for block in range(SIDE.num_blocks) if block not in (3, 4)]
        for plane in SIDE.planes:
            assert (bait.target.view("layer.0", plane)[rest].view(np.uint8) == 0xEE).all()
        with producer("tcp", "good") as prefill:
            source, target = Paged(SIDE, seed=1), Paged(SIDE)
            prefill.register(source.cache)
            decode.register(target.cache)
            offer = prefill.offer(source.cache, [5, 6], TOKENS)
            decode.fetch(offer.ticket, target.cache, [5, 6], timeout=LONG).wait()
            assert (target.view("layer.0", "v")[5:7] == source.view("layer.0", "v")[5:7]).all()


def header(**changes: int) -> bytes:
    words = {
        "magic": 0x4358564B,
        "version": 1,
        "codec": wire.INT8,
        "element": 2,
        "planes": 2,
        "panel_tokens": 64,
        "zero": 0,
        "first": 0,
        "panels": 8,
        "exceptions": 0,
        "k_scheme": 4,
        "k_scale": 1,
        "k_group": 0,
        "k_content": 16,
        "v_scheme": 3,
        "v_scale": 1,
        "v_group": 0,
        "v_content": 16,
        **changes,
    }
    raw = struct.pack("<IBBBBHHIIIBBHIBBHI", *words.values())
    return raw + bytes(HEADER - len(raw))


def panels(source: Paged) -> bytes:
    raw = b""
    for plane, scheme in (("k", "int8_channel"), ("v", "int8")):
        for head in range(4):
            rows = source.rows("layer.0", plane, head, [0, 1], TOKENS)
            coded, marked = model.encode_panel(rows, "bfloat16", model.Encoding(scheme))
            assert not marked.any()
            raw += coded
    assert len(raw) == CODED - HEADER
    return raw


@pytest.fixture(scope="module")
def source() -> Paged:
    made = Paged(SIDE)
    fill_like_a_model(made, 1)
    return made


def test_the_fake_producer_speaks_the_protocol(bait: Bait, source: Paged) -> None:
    """What the others rest on: with the right words the fetch ends well."""
    assert bait.asked == (wire.INT8, 64, 0, 1, 0, wire.NEVER, 0, 0)
    bait.accept()
    bait.commit(header() + panels(source))
    bait.fetch.wait()
    report = bait.fetch.report
    assert (report.codec, report.codec_why, report.wire_bytes) == ("int8", "because", CODED)
    for plane in SIDE.planes:
        got = model.to_float32(bait.target.rows("layer.0", plane, 2, [3, 4], TOKENS), "bfloat16")
        sent = model.to_float32(source.rows("layer.0", plane, 2, [0, 1], TOKENS), "bfloat16")
        assert np.abs(got - sent).max() < 0.2


@pytest.mark.parametrize(
    "change",
    [
        {"magic": 0x4358564C},
        {"version": 2},
        {"codec": wire.FP8_E4M3},
        {"element": 1},
        {"planes": 1},
        {"panel_tokens": 32},
        {"zero": 1},
        {"first": 1},
        {"panels": 7},
        {"exceptions": 1},
        {"exceptions": 0xFFFFFFFF},
        {"k_scheme": 3},
        {"k_scale": 0},
        {"v_group": 8},
        {"v_content": 17},
    ],
    ids=str,
)
def test_a_header_that_is_not_what_was_agreed_on(
    bait: Bait, source: Paged, change: dict[str, int]
) -> None:
    bait.accept()
    bait.commit(header(**change) + panels(source))
    bait.fails(Status.PROTOCOL)
    assert bait.target.poisoned


@pytest.mark.parametrize("indices", [[ROWS], [0xFFFFFFFF], [5, 5], [6, 5], [0, ROWS]], ids=str)
def test_raw_rows_that_are_not_in_the_chunk(bait: Bait, source: Paged, indices: list[int]) -> None:
    bait.accept()
    raw = struct.pack(f"<{len(indices)}I", *indices)
    raw += bytes(-len(raw) % 16) + b"\1" * (32 * len(indices))
    bait.commit(header(exceptions=len(indices)) + panels(source) + raw)
    bait.fails(Status.PROTOCOL)
    assert bait.target.poisoned


@pytest.mark.parametrize("change", [-16, -1, 1, 16])
def test_chunks_of_another_length(bait: Bait, source: Paged, change: int) -> None:
    bait.accept()
    chunk = header() + panels(source)
    bait.commit(chunk + bytes(change) if change > 0 else chunk[:change])
    bait.fails(Status.PROTOCOL)
    assert bait.target.poisoned


def test_a_chunk_longer_than_any_can_be(bait: Bait, source: Paged) -> None:
    bait.accept()
    chunk = header() + panels(source)
    bait.commit(chunk + bytes(MOST + 1 - len(chunk)))
    bait.fails(Status.PROTOCOL, f"of {MOST + 1} bytes")
    assert bait.target.poisoned


@pytest.mark.parametrize("at", [0, 5, 20, HEADER, CODED - 1])
def test_damage_on_the_way(bait: Bait, source: Paged, at: int) -> None:
    """Also in the header: that is no violation, but a link that flips bits."""
    bait.accept()
    chunk = bytearray(header() + panels(source))
    digest = _core.digest(bytes(chunk), bait.seed())
    chunk[at] ^= 4
    bait.commit(bytes(chunk), digest=digest)
    bait.fails(Status.CORRUPT, "fetch again")
    assert bait.decode.stats.digest_errors == 1


@pytest.mark.parametrize(
    "change",
    [
        {"codec": wire.FP8_E4M3, "encodings": ((1, 1, 0), (1, 1, 0))},
        {"codec": wire.RAW, "encodings": ((0, 0, 0), (0, 0, 0))},
        {"codec": wire.RAW, "encodings": (), "panel_tokens": 0},
        {"codec": 255},
        {"codec": 77},
        {"element": 99},
        {"element": 3},
        {"element": 4},
        {"panel_tokens": 65},
        {"panel_tokens": 0},
        {"panel_tokens": 0, "encodings": ()},
        {"encodings": INT8[:1]},
        {"encodings": INT8 * 2},
        {"encodings": ((3, 1, 0), (3, 1, 0))},
        {"encodings": ((4, 1, 0), (9, 1, 0))},
        {"encodings": ((4, 2, 0), (3, 1, 0))},
        {"encodings": ((4, 9, 0), (3, 1, 0))},
        {"stretch": (1, wire.NEVER)},
        {"stretch": (0, 10)},
        {"scales": (1.0,)},
        {"scales": (2.0, 1.0)},
        {"scales": (float("nan"), 1.0)},
    ],
    ids=str,
)
def test_accepts_of_something_else(bait: Bait, change: dict) -> None:
    bait.accept(**change)
    bait.fails(Status.PROTOCOL)
    assert bait.target.poisoned


def most(encodings: tuple[tuple[int, int, int], ...]) -> int:
    """Most bytes of the chunk with all of its rows raw."""
    size = HEADER
    for scheme, scale_format, group in encodings:
        groups = -(-16 // group) if group else 1
        scales = {0: 0, 4: 2 * 16}.get(scheme, 32 * groups) * (4, 2, 1)[scale_format]
        size += 4 * (32 * 16 * (2 if scheme == 0 else 1) + scales)
    return size + (4 + 32) * ROWS if encodings[0][0] else size


CODES = {"raw": wire.RAW, "fp8_e4m3": wire.FP8_E4M3, "fp8_e5m2": wire.FP8_E5M2, "int8": wire.INT8}


@pytest.mark.parametrize(
    ("bait", "codec", "encodings", "words"),
    [
        ("int8(group=4, scale=float32)", "int8", INT8, "scale format 1 for plane 'k'"),
        ("int8(group=4, scale=float32)", "int8", ((4, 0, 0), (3, 0, 0)), "group 0 for plane 'v'"),
        ("int8(group=4, scale=float32)", "int8", ((4, 0, 4), (3, 0, 4)), "group 4 for plane 'k'"),
        ("int8", "int8", ((4, 1, 8), (3, 1, 0)), "group 8 for plane 'k'"),
        ("fp8_e4m3(group=8, scale=float32)", "fp8_e4m3", ((1, 2, 0),) * 2, "scale format 2"),
        ("fp8_e4m3(group=8)", "fp8_e4m3", ((1, 1, 8), (1, 1, 0)), "group 0 for plane 'v'"),
        ("fp8_e4m3(group=16)", "fp8_e4m3", ((1, 1, 8), (1, 1, 8)), "group 8 for plane 'k'"),
        ("auto", "fp8_e5m2", ((2, 1, 0),) * 2, "codec fp8_e5m2, asked for was auto"),
        ("auto", "fp8_e4m3", ((1, 1, 0),) * 2, "codec fp8_e4m3, asked for was auto"),
        ("auto", "int8", ((4, 0, 0), (3, 0, 0)), "scale format 0"),
    ],
    indirect=["bait"],
)
def test_accepts_of_another_quality(
    bait: Bait, codec: str, encodings: tuple[tuple[int, int, int], ...], words: str
) -> None:
    bait.accept(codec=CODES[codec], encodings=encodings, wire_bytes=most(encodings))
    bait.fails(Status.PROTOCOL, words)
    assert bait.target.poisoned


@pytest.mark.parametrize(
    ("bait", "codec", "encodings", "panel_tokens", "why"),
    [
        ("int8(group=4, scale=float32)", "int8", ((4, 0, 0), (3, 0, 4)), 64, "because"),
        ("int8(group=16)", "int8", INT8, 64, "because"),
        ("int8(group=17)", "int8", INT8, 32, "because"),
        (
            "fp8_e4m3",
            "fp8_e4m3",
            ((1, 1, 8), (1, 1, 0)),
            64,
            "because; 8 elements of plane 'k' share a scale",
        ),
        (
            "fp8_e4m3(panel_tokens=100)",
            "fp8_e4m3",
            ((1, 1, 0),) * 2,
            16,
            "because; panels have 16 tokens, not 100, for a chunk of 65536 bytes to hold one",
        ),
        ("auto", "int8", INT8, 64, "because"),
        ("auto", "raw", ((0, 1, 0),) * 2, 64, "because"),
        ("raw", "raw", ((0, 0, 0),) * 2, 5, "because"),
    ],
    indirect=["bait"],
)
def test_accepts_of_what_was_asked_for(
    bait: Bait,
    codec: str,
    encodings: tuple[tuple[int, int, int], ...],
    panel_tokens: int,
    why: str,
) -> None:
    """What the others rest on. What differs from the question is in the report."""
    bait.accept(
        codec=CODES[codec],
        encodings=encodings,
        panel_tokens=panel_tokens,
        wire_bytes=most(encodings),
    )
    until(lambda: bait.fetch.done or bait.fetch.report.codec != "")
    assert not bait.fetch.done, bait.fetch.error
    assert (bait.fetch.report.codec, bait.fetch.report.codec_why) == (codec, why)
    bait.fetch.cancel()


PLAIN = {"codec": wire.RAW, "encodings": (), "panel_tokens": 0, "wire_bytes": 32 * ROWS}


@pytest.mark.parametrize("bait", ["raw", "auto"], indirect=True)
@pytest.mark.parametrize("stretch", [(1, wire.NEVER), (0, wire.NEVER - 1), (0, 0)], ids=str)
def test_plain_memory_has_no_tiers(bait: Bait, stretch: tuple[int, int]) -> None:
    bait.accept(**PLAIN, stretch=stretch)
    bait.fails(Status.PROTOCOL, "other tokens raw")
    assert bait.target.poisoned


@pytest.mark.parametrize("bait", ["raw", "auto"], indirect=True)
def test_plain_memory(bait: Bait) -> None:
    bait.accept(**PLAIN)
    until(lambda: bait.fetch.done or bait.fetch.report.codec != "")
    assert not bait.fetch.done, bait.fetch.error
    bait.fetch.cancel()


@pytest.mark.parametrize("bait", ["raw"], indirect=True)
@pytest.mark.parametrize("scale", [1e-39, 0.0, -1.0, float("inf"), float("nan")], ids=str)
def test_scales_that_no_cache_has(bait: Bait, scale: float) -> None:
    raw = ((0, 1, 0),) * 2
    bait.accept(codec=wire.RAW, encodings=raw, element=4, scales=(1.0, scale))
    bait.fails(Status.PROTOCOL, "a cache's scale is", f"{scale:.4g}"[:5])
    assert bait.target.poisoned


@pytest.mark.parametrize("change", [{"wire_bytes": MOST - 1}, {"num_chunks": 2}], ids=str)
def test_accepts_of_other_chunks(bait: Bait, change: dict[str, int]) -> None:
    bait.accept(**change)
    bait.fails(Status.MISMATCH)
    assert bait.target.poisoned


@pytest.fixture
def ask() -> Iterator[Callable[..., tuple[kvxfer.Fetch, wire.FakePeer]]]:
    """Start a fetch from a producer that has only some schemes."""
    with wire.FakeProducer() as fake, consumer("tcp") as decode:
        target = Paged(SIDE)
        decode.register(target.cache)
        ticket = kvxfer.issue_ticket("r", [fake.reference()], num_tokens=TOKENS)
        peers = []

        def start(codec: str, schemes: int) -> tuple[kvxfer.Fetch, wire.FakePeer]:
            fetch = decode.fetch(ticket, target.cache, [3, 4], codec=codec, timeout=LONG)
            peer = fake.accept(say_hello=False)
            me = fake.identity
            peer.say(wire.hello(me.name, me.incarnation, schemes=schemes))
            peers.append(peer)
            return fetch, peer

        yield start
        for peer in peers:
            peer.close()


@pytest.mark.parametrize(
    ("codec", "schemes"), [("int8", 0b00111), ("int8", 0b01111), ("fp8_e4m3", 1)]
)
def test_a_codec_that_the_producer_lacks(
    ask: Callable[..., tuple[kvxfer.Fetch, wire.FakePeer]], codec: str, schemes: int
) -> None:
    fetch, _ = ask(codec, schemes)
    with pytest.raises(kvxfer.TransferError) as caught:
        fetch.wait()
    assert caught.value.status is Status.MISMATCH
    for word in [f"codec {codec}", "'decode' has raw, fp8_e4m3", "'prefill' has raw", "auto"]:
        assert word in str(caught.value)


@pytest.mark.parametrize(("codec", "schemes"), [("raw", 1), ("auto", 1), ("fp8_e4m3", 0b10011)])
def test_a_codec_that_the_producer_has(
    ask: Callable[..., tuple[kvxfer.Fetch, wire.FakePeer]], codec: str, schemes: int
) -> None:
    fetch, peer = ask(codec, schemes)
    assert peer.hear_a(wire.FETCH)
    fetch.cancel()


def test_a_consumer_that_lacks_what_auto_would_take() -> None:
    with producer("tcp") as prefill:
        source = Paged(SIDE, seed=1)
        prefill.register(source.cache)
        with prefill.offer(source.cache, [5, 6], TOKENS) as offer:
            for schemes in (1, 0b11111):
                with wire.consumer(prefill.address, say_hello=False) as fake:
                    me = fake.identity
                    fake.say(wire.hello(me.name, me.incarnation, schemes=schemes))
                    fake.hear_a(wire.HELLO)
                    fake.say(wire.layout(), wire.fetch(offer.ticket, codec=255, rates=(1, 1)))
                    answer = fake.hear_a(wire.ACCEPT)
                    assert answer[35] == wire.RAW
                    assert (b"does not have int8" in answer) == (schemes == 1)


@pytest.fixture
def fresh() -> Iterator[tuple[Child, str, kvxfer.Ticket]]:
    """A process of its own, so that its agent has not measured its codecs yet, and an offer."""
    with Child() as child:
        address = child.call("start", "prefill", "tcp", listen="")
        child.call("cache", "source", SIDE, 1)
        yield child, address, child.call("offer", "source", [5, 6], TOKENS)


def serves_auto(peer: wire.FakePeer, ticket: kvxfer.Ticket, fetch_id: int) -> None:
    """The next word but pings is the ACCEPT of this fetch."""
    peer.say(wire.fetch(ticket, fetch_id=fetch_id, codec=255, rates=(1, 1), slots=()))
    while (word := peer.hear()) is not None and word[0] == wire.PING:
        pass
    assert word is not None
    assert struct.unpack_from("<BQ", word) == (wire.ACCEPT, fetch_id)


def test_auto_that_is_cancelled_while_codecs_are_measured(
    fresh: tuple[Child, str, kvxfer.Ticket],
) -> None:
    _, address, ticket = fresh
    with wire.consumer(address) as peer:
        peer.say(
            wire.layout(),
            wire.fetch(ticket, codec=255, rates=(1, 1)),
            wire.of_fetch(wire.CANCEL, 1),
        )
        while (word := peer.hear()) is not None and word[0] == wire.PING:
            pass
        assert word == wire.of_fetch(wire.CANCELLED, 1)
        serves_auto(peer, ticket, 2)


def test_auto_whose_link_is_lost_while_codecs_are_measured(
    fresh: tuple[Child, str, kvxfer.Ticket],
) -> None:
    child, address, ticket = fresh
    with wire.consumer(address) as peer:
        peer.say(wire.layout(), wire.fetch(ticket, codec=255, rates=(1, 1)))
    until(lambda: child.call("stats")["peers"] == 0)
    assert child.call("stats")["serving"] == 0
    with wire.consumer(address, "another") as peer:
        peer.say(wire.layout())
        serves_auto(peer, ticket, 1)


@pytest.mark.skipif(
    _core.build_info()["sanitize"] != "", reason="sanitizers end a process that has no memory"
)
def test_auto_where_there_is_no_memory_to_measure_codecs(
    fresh: tuple[Child, str, kvxfer.Ticket],
) -> None:
    child, address, ticket = fresh
    with wire.consumer(address) as peer:
        child.call("limit_data", 8 << 20)
        peer.say(wire.layout(), wire.fetch(ticket, codec=255, rates=(1, 1)))
        refused = peer.hear_a(wire.REFUSED)
        assert struct.unpack_from("<BQB", refused) == (wire.REFUSED, 1, 11)  # NO_RESOURCES
        assert b"'prefill' could not serve it" in refused
        child.call("unlimit", "RLIMIT_DATA")
        serves_auto(peer, ticket, 2)
