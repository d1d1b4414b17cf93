"""Peers that have shaken hands and then break the rules, over real sockets."""

from __future__ import annotations

import fcntl
import os
import socket
import struct
import tempfile
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kvtest import wire
from kvtest.agents import LONG, consumer, producer, until
from kvtest.caches import Geometry, Paged
from kvtest.strategies import examples

import kvxfer
from kvxfer import Status
from kvxfer.handshake import (
    Deadline,
    Identity,
    Transcript,
    recv_frame,
    send_frame,
    session_token,
)

SIDE = Geometry(layers=("layer.0",))
ROW = SIDE.content * 2
SIZE = 2 * 16 * 4 * ROW  # of one block: planes, tokens, heads


class Victim:
    """A producer, with somebody who fetches from it and behaves."""

    def __init__(self, prefill: kvxfer.Agent, decode: kvxfer.Agent) -> None:
        self.prefill, self.decode = prefill, decode
        self.source, self.target = Paged(SIDE, seed=1), Paged(SIDE)
        prefill.register(self.source.cache)
        decode.register(self.target.cache)

    def serves_others(self) -> None:
        offer = self.prefill.offer(self.source.cache, range(24), 24 * 16)
        self.target.poison()
        self.decode.fetch(offer.ticket, self.target.cache, range(24), timeout=LONG).wait()
        assert self.target.same_as(self.source)
        assert offer.wait(LONG) is Status.OK


@pytest.fixture(scope="module")
def victim() -> Iterator[Victim]:
    with producer("tcp") as prefill, consumer("tcp") as decode:
        victim = Victim(prefill, decode)
        yield victim
        victim.serves_others()
        assert (victim.prefill.stats.serving, victim.prefill.stats.peers) == (0, 1)


@pytest.fixture
def offer(victim: Victim) -> Iterator[kvxfer.Offer]:
    with victim.prefill.offer(victim.source.cache, [5, 6, 7], 48) as offer:
        yield offer


def thrown_out(fake: wire.FakePeer) -> None:
    """The other side closes the link, in whatever way."""
    fake.last_words()


HELLO_AGAIN = wire.hello("stranger", 1)


@pytest.mark.parametrize(
    "messages",
    [
        [b""],
        [b"\0"],
        [b"\x0f"],
        [b"\xff" * 100],
        [HELLO_AGAIN],
        [wire.layout()[:-1]],
        [wire.layout() + b"\0"],
        [wire.layout(element=99)],
        [wire.layout(scales=(1.0, 2.0))],
        [wire.layout(scales=(1.0,), element=4)],
        [wire.layout(scales=(0.0, 1.0), element=4)],
        [wire.layout(scales=(1.0, float("nan")), element=4)],
        [wire.layout(scales=(1e-39, 1.0), element=4)],
        [wire.layout(block_size=0)],
        [wire.layout(heads=(0, 0))],
        [wire.layout(layers=())],
        [wire.layout(planes=())],
        [wire.layout(layers=("a" * 1025,))],
        [struct.pack("<BI", wire.LAYOUT, 1) + wire.numbers(0xFFFFFFFF)],
        [struct.pack("<BQ", wire.CREDIT, 1) + wire.numbers(0xFFFFFFFF)],
        [struct.pack("<BQ", wire.CREDIT, 1) + wire.numbers(1 << 20)],
        [wire.of_fetch(wire.DONE, 1)[:-1]],
        # Of the other side's kind.
        [wire.accept(1, wire_bytes=SIZE)],
        [wire.commit(1, size=SIZE)],
        [wire.refused(1, 3)],
        [wire.of_fetch(wire.CANCELLED, 1)],
    ],
    ids=range(26),
)
def test_messages_that_make_no_sense_end_the_link(victim: Victim, messages: list[bytes]) -> None:
    with wire.consumer(victim.prefill.address) as fake:
        fake.say(*messages)
        thrown_out(fake)
        victim.serves_others()


@pytest.mark.parametrize(
    "raw",
    [b"\xff\xff\xff\xff", struct.pack("<I", (4 << 20) + 1), b"GET / HTTP/1.1\r\n\r\n"],
    ids=range(3),
)
def test_oversize_control_frames_end_the_link(victim: Victim, raw: bytes) -> None:
    with wire.consumer(victim.prefill.address) as fake:
        fake.raw(raw)
        thrown_out(fake)
        victim.serves_others()


def test_a_first_message_other_than_hello_ends_the_link(victim: Victim) -> None:
    with wire.consumer(victim.prefill.address, say_hello=False) as fake:
        fake.say(wire.layout())
        thrown_out(fake)


@pytest.mark.parametrize(
    "change",
    [
        {"name": "another"},
        {"incarnation": 1},
        {"version": 1},
        {"version": 3},
        {"version": 5},
        {"slot_bytes": 0},
    ],
    ids=str,
)
def test_a_hello_of_another_than_who_shook_hands(victim: Victim, change: dict) -> None:
    with wire.consumer(victim.prefill.address, say_hello=False) as fake:
        me = fake.identity
        words = {"name": me.name, "incarnation": me.incarnation, **change}
        fake.say(wire.hello(words.pop("name"), words.pop("incarnation"), **words))
        thrown_out(fake)


def test_messages_cut_short_by_the_end(victim: Victim) -> None:
    for raw in (b"\x05", struct.pack("<I", 100) + b"\x02", b""):
        with wire.consumer(victim.prefill.address) as fake:
            fake.raw(raw)
            fake.control.shutdown(socket.SHUT_WR)
            thrown_out(fake)
    victim.serves_others()


@pytest.mark.parametrize("data", [b"garbage" * 10, b"KVXW" + b"\xff" * 20], ids=range(2))
def test_garbage_on_a_data_stream_ends_the_link(victim: Victim, data: bytes) -> None:
    with wire.consumer(victim.prefill.address) as fake:
        fake.data[0].sendall(data)
        thrown_out(fake)
        victim.serves_others()


@pytest.mark.parametrize(
    ("change", "outcome"),
    [
        ({"layers": (1,)}, "link"),
        ({"layers": ()}, "refused"),
        ({"layers": (0, 0)}, "refused"),
        ({"cache_id": 9}, "refused"),
        ({"heads": (0, 0)}, "refused"),
        ({"heads": (3, 1)}, "refused"),
        ({"heads": (0, 5)}, "refused"),
        ({"heads": (0, 0xFFFFFFFF)}, "refused"),
        ({"tokens": (0, 49)}, "refused"),
        ({"tokens": (8, 8)}, "refused"),
        ({"tokens": (0, 0xFFFFFFFF)}, "refused"),
        ({"slot_in_block": 16}, "refused"),
        ({"slot_in_block": 0xFFFFFFFF}, "refused"),
        ({"codec": 7}, "refused"),
        ({"codec": wire.INT8, "panel_tokens": 0}, "refused"),
        ({"codec": wire.INT8, "panel_tokens": 257}, "refused"),
        ({"codec": wire.INT8, "scale_format": 2}, "refused"),
        ({"codec": wire.FP8_E4M3, "scale_format": 3}, "refused"),
        ({"codec": wire.INT8, "stretch": (5, 4)}, "refused"),
        ({"chunk_bytes": 0}, "refused"),
        ({"chunk_bytes": 1 << 31}, "refused"),
        ({"slots": tuple(range(1 << 16)) + (0,)}, "link"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_fetches_that_make_no_sense(
    victim: Victim, offer: kvxfer.Offer, change: dict, outcome: str
) -> None:
    """Refused or thrown out, and the owner keeps its offer."""
    with wire.consumer(victim.prefill.address) as fake:
        fake.say(wire.layout(), wire.fetch(offer.ticket, **change))
        while (heard := fake.hear()) is not None and heard[0] != wire.REFUSED:
            assert heard[0] not in (wire.ACCEPT, wire.COMMIT)
        assert outcome == "link" or heard is None or struct.unpack_from("<Q", heard, 1) == (1,)
        assert not offer.released
        victim.serves_others()


def test_a_generation_that_was_guessed(victim: Victim, offer: kvxfer.Offer) -> None:
    """The right id with another generation gets nothing but a refusal."""
    with wire.consumer(victim.prefill.address) as fake:
        fake.say(wire.layout(), wire.fetch(offer.ticket, generation=bytes(16)))
        refusal = fake.hear_a(wire.REFUSED)
        assert b"another generation" in refusal
        assert not offer.released


def test_words_about_fetches_that_are_not_there(victim: Victim, offer: kvxfer.Offer) -> None:
    with wire.consumer(victim.prefill.address) as fake:
        fake.say(
            wire.layout(),
            wire.of_fetch(wire.DONE, 77),
            wire.credit(77, 0),
            wire.of_fetch(wire.CANCEL, 77),
        )
        assert fake.hear_a(wire.CANCELLED) == wire.of_fetch(wire.CANCELLED, 77)
        assert not offer.released


def test_done_for_what_was_never_delivered(victim: Victim) -> None:
    """A fetch whose offer is not there yet cannot be done."""
    ticket = kvxfer.issue_ticket("later", [victim.prefill.reference()], num_tokens=48)
    with wire.consumer(victim.prefill.address) as fake:
        fake.say(wire.layout(), wire.fetch(ticket), wire.of_fetch(wire.DONE, 1))
        thrown_out(fake)
    with victim.prefill.offer(victim.source.cache, [1, 2, 3], ticket=ticket) as later:
        assert not later.released


def test_a_consumer_that_never_takes_its_data(victim: Victim, offer: kvxfer.Offer) -> None:
    """Its socket fills up; the others are served, and its end sets everything free."""
    with wire.consumer(victim.prefill.address) as fake:
        fake.data[0].setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        fake.say(wire.layout())
        for number in range(200):
            fake.say(wire.fetch(offer.ticket, fetch_id=number, tokens=(0, 48), slots=(0, 1)))
        fake.hear_a(wire.ACCEPT)
        victim.serves_others()
    until(lambda: victim.prefill.stats.peers == 1)
    assert victim.prefill.stats.serving == 0


VALID = [
    wire.layout(),
    wire.fetch({"offer": "r", "generation": "00" * 16}),
    wire.credit(1, 0, 1, 2),
    wire.of_fetch(wire.DONE, 1),
    wire.of_fetch(wire.CANCEL, 1),
    bytes([wire.PING]),
    bytes([wire.RENEW]) + wire.text("r") + bytes(16),
    HELLO_AGAIN,
]


@st.composite
def spoilt(draw: st.DrawFn) -> bytes:
    """A message with something wrong, or not."""
    message = bytearray(draw(st.sampled_from(VALID)))
    for _ in range(draw(st.integers(0, 3))):
        index = draw(st.integers(0, len(message) - 1))
        message[index] = draw(st.sampled_from([0, 1, 0x7F, 0x80, 0xFF]) | st.integers(0, 255))
    end = draw(st.none() | st.integers(0, len(message)))
    return bytes(message[:end]) + draw(st.sampled_from([b"", b"", b"\0" * 7]))


@settings(max_examples=examples(60))
@given(messages=st.lists(spoilt(), min_size=1, max_size=6))
def test_spoilt_messages(victim: Victim, messages: list[bytes]) -> None:
    with victim.prefill.offer(victim.source.cache, [5, 6, 7], 48) as offer:
        with wire.consumer(victim.prefill.address) as fake:
            try:
                fake.say(wire.layout(), wire.fetch(offer.ticket, fetch_id=5), *messages)
                fake.control.shutdown(socket.SHUT_WR)
            except (BrokenPipeError, ConnectionResetError, OSError):
                pass  # it was thrown out before it had said all
            fake.last_words()
        victim.serves_others()


# Shared memory


def offer_arena(prefill: kvxfer.Agent, descriptors: list[int], arena_bytes: object) -> str:
    """Shake hands for shared memory with these descriptors; return the error that comes."""
    deadline = Deadline(LONG)
    with wire.open_socket(prefill.address) as control:
        first = wire.greeting(Identity("stranger", 5), transports=["shm"])
        send_frame(control, first, deadline)
        reply = recv_frame(control, deadline)
        transcript = Transcript(None, first, reply)
        send_frame(control, {"proof": transcript.proof("consumer")}, deadline)
        chosen = recv_frame(control, deadline)
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
            sock.settimeout(LONG)
            sock.connect("\0" + chosen["socket"])
            token = session_token(transcript.session_key(), "shm")
            frame = {"kind": "shm", "session": chosen["session"], "token": token}
            send_frame(sock, {**frame, "arena_bytes": arena_bytes}, deadline)
            if descriptors:
                socket.send_fds(sock, [b"a"], descriptors)
            else:
                sock.sendall(b"a")
            heard = []
            try:
                while True:
                    heard.append(recv_frame(sock, deadline))
            except (kvxfer.HandshakeError, OSError) as error:
                return str(error)


def memfd(size: int, *, seal: bool) -> int:
    fd = os.memfd_create("arena", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, size)
    if seal:
        add_seals, shrink = 1033, 2
        fcntl.fcntl(fd, add_seals, shrink)
    return fd


def test_arenas_that_cannot_be_trusted() -> None:
    with producer("shm", handshake_timeout=2.0) as prefill, consumer("shm") as decode:
        victim = Victim(prefill, decode)
        victim.serves_others()
        with tempfile.TemporaryFile() as plain:
            plain.truncate(1 << 20)
            sealed, unsealed = memfd(1 << 20, seal=True), memfd(1 << 20, seal=False)
            pipe = os.pipe()
            try:
                for descriptors, size in [
                    ([unsealed], 1 << 20),  # could be cut off under the producer: SIGBUS
                    ([plain.fileno()], 1 << 20),
                    ([sealed], (1 << 20) + 1),  # announced larger than it is
                    ([sealed], 0),
                    ([sealed], -1),
                    ([sealed], 1 << 63),
                    ([sealed], float("inf")),
                    ([sealed], None),
                    ([pipe[0]], 4096),
                    ([], 1 << 20),
                ]:
                    assert offer_arena(prefill, descriptors, size), (descriptors, size)
                    victim.serves_others()
            finally:
                for fd in (sealed, unsealed, *pipe):
                    os.close(fd)
        until(lambda: prefill.stats.peers == 1)


# A producer that breaks the rules


class Bait:
    """A consumer with one fetch of two blocks from a producer made by hand."""

    def __init__(self, decode: kvxfer.Agent, fake: wire.FakeProducer) -> None:
        self.target = Paged(SIDE)
        decode.register(self.target.cache)
        ticket = kvxfer.issue_ticket("r", [fake.reference()], num_tokens=32)
        self.fetch = decode.fetch(ticket, self.target.cache, [3, 4], timeout=LONG)
        self.peer = fake.accept()
        raw = self.peer.hear_a(wire.FETCH)
        (self.id,) = struct.unpack_from("<Q", raw, 1)
        at = 9 + 4 + 1 + 16 + 4
        (layers,) = struct.unpack_from("<I", raw, at)
        at += 4 + 4 * layers + 5 * 4 + 23
        self.chunk_bytes, _, count = struct.unpack_from("<III", raw, at)
        self.slots = struct.unpack_from(f"<{count}I", raw, at + 12)


@pytest.fixture
def bait() -> Iterator[Bait]:
    with wire.FakeProducer() as fake, consumer("tcp") as decode:
        bait = Bait(decode, fake)
        with bait.peer:
            yield bait
        until(lambda: decode.stats.peers == 0)
        assert bait.fetch.done
        stats = decode.stats
        assert (stats.fetches, stats.free_slots) == (0, stats.slots)
        # It still fetches from others.
        with producer("tcp", "good") as prefill:
            Victim(prefill, decode).serves_others()


def fails(bait: Bait, *statuses: Status) -> None:
    with pytest.raises(kvxfer.TransferError, match="'prefill'") as caught:
        bait.fetch.wait()
    assert caught.value.status in statuses
    assert bait.target.poisoned


def test_the_fake_producer_speaks_the_protocol(bait: Bait) -> None:
    """What the others rest on: with the right words the fetch gets as far as the digest."""
    bait.peer.say(wire.accept(bait.id, wire_bytes=2 * SIZE))
    notice = wire.commit(bait.id, slot=bait.slots[0], size=2 * SIZE)
    data = b"\1" * (2 * SIZE)
    bait.peer.data[0].sendall(wire.write(notice, data, offset=bait.slots[0] * (64 << 10)))
    with pytest.raises(kvxfer.TransferError, match="does not match its digest") as caught:
        bait.fetch.wait()
    assert caught.value.status is Status.CORRUPT


@pytest.mark.parametrize(
    "change",
    [
        {"num_chunks": 2},
        {"num_chunks": 0},
        {"wire_bytes": 2 * SIZE + 1},
        {"wire_bytes": 1 << 62},
        {"order": (0, 0, 0, 0, 0)},
        {"order": (0, 1, 2, 3, 9)},
        {"order": (4, 3, 2, 1, 0)},
        {"block_size": 0},
        {"block_size": 16, "slot": 16},
        {"block_size": 0xFFFFFFFF, "slot": 0xFFFFFFFE},
    ],
    ids=str,
)
def test_accepts_that_make_no_sense(bait: Bait, change: dict) -> None:
    bait.peer.say(wire.accept(bait.id, **{"wire_bytes": 2 * SIZE, **change}))
    bait.peer.close()  # where it was no nonsense after all, its end comes
    fails(bait, Status.PROTOCOL, Status.MISMATCH, Status.PEER_LOST)


def test_two_accepts(bait: Bait) -> None:
    bait.peer.say(*[wire.accept(bait.id, wire_bytes=2 * SIZE)] * 2)
    fails(bait, Status.PROTOCOL)


@pytest.mark.parametrize(
    "change",
    [
        {"slot": 1 << 31},
        {"slot": 40},
        {"chunk": 1},
        {"chunk": 0xFFFFFFFF},
        {"size": 2 * SIZE - 1},
        {"size": 1 << 31},
    ],
    ids=str,
)
@pytest.mark.parametrize("how", ["message", "write"])
def test_commits_that_make_no_sense(bait: Bait, how: str, change: dict) -> None:
    words = {"slot": bait.slots[0], "size": 2 * SIZE, **change}
    notice = wire.commit(bait.id, **words)
    bait.peer.say(wire.accept(bait.id, wire_bytes=2 * SIZE))
    if how == "message":
        bait.peer.say(notice)
    else:
        data = b"\1" * min(words["size"], 2 * SIZE)
        bait.peer.data[0].sendall(
            wire.write(notice, data, offset=words["slot"] * (64 << 10), size=words["size"])
            if words["size"] <= 2 * SIZE
            else wire.write(notice, data)
        )
        bait.peer.data[0].shutdown(socket.SHUT_WR)
    fails(bait, Status.PROTOCOL, Status.PEER_LOST)


@pytest.mark.parametrize("offset", [1, 64 << 10, 1 << 40, (1 << 64) - 1])
def test_writes_beside_their_slot(bait: Bait, offset: int) -> None:
    bait.peer.say(wire.accept(bait.id, wire_bytes=2 * SIZE))
    notice = wire.commit(bait.id, slot=bait.slots[0], size=2 * SIZE)
    where = bait.slots[0] * (64 << 10) + offset & (1 << 64) - 1
    bait.peer.data[0].sendall(wire.write(notice, b"\1" * 2 * SIZE, offset=where))
    fails(bait, Status.PROTOCOL)


@pytest.mark.parametrize("notice", [b"", b"\x05", b"\xff" * 37, bytes([wire.PING])], ids=range(4))
def test_writes_without_a_commit(bait: Bait, notice: bytes) -> None:
    bait.peer.data[0].sendall(wire.write(notice, b"\1" * 64))
    fails(bait, Status.PROTOCOL)


def test_a_write_that_stops_in_the_middle(bait: Bait) -> None:
    """Half of a chunk, then the end: the slot comes back, the blocks are as they were."""
    bait.peer.say(wire.accept(bait.id, wire_bytes=2 * SIZE))
    notice = wire.commit(bait.id, slot=bait.slots[0], size=2 * SIZE)
    raw = wire.write(notice, b"\1" * SIZE, offset=bait.slots[0] * (64 << 10), size=2 * SIZE)
    bait.peer.data[0].sendall(raw)
    bait.peer.close()
    fails(bait, Status.PEER_LOST)


def test_a_refusal_with_a_status_that_is_none(bait: Bait) -> None:
    bait.peer.say(wire.refused(bait.id, 200))
    fails(bait, Status.PROTOCOL)


def test_a_refusal_is_reported_as_it_came(bait: Bait) -> None:
    bait.peer.say(wire.refused(bait.id, 4, "because \xfe I say so"))
    with pytest.raises(kvxfer.TransferError, match="'prefill' refused: because .* I say so"):
        bait.fetch.wait()
    assert bait.target.poisoned


def test_a_refusal_that_is_no_text(bait: Bait) -> None:
    """Not UTF-8: the reason is shown as well as it can be, and nothing breaks on it."""
    bait.peer.say(wire.refused(bait.id, 4, b"because \xff\xfe"))
    with pytest.raises(kvxfer.TransferError, match="'prefill' refused: because"):
        bait.fetch.wait()


def test_a_goodbye(bait: Bait) -> None:
    bait.peer.say(bytes([wire.BYE]) + wire.text("lunch"))
    with pytest.raises(kvxfer.TransferError, match="'prefill' said goodbye: lunch") as caught:
        bait.fetch.wait()
    assert caught.value.status is Status.PEER_LOST


def test_words_of_the_other_side(bait: Bait) -> None:
    bait.peer.say(wire.layout())
    fails(bait, Status.PROTOCOL)


def test_silence(bait: Bait) -> None:
    bait.fetch.cancel()
    assert bait.peer.hear_a(wire.CANCEL) == wire.of_fetch(wire.CANCEL, bait.id)
    # A write that comes all the same goes nowhere.
    notice = wire.commit(bait.id, slot=bait.slots[0], size=2 * SIZE)
    late = wire.write(notice, b"\1" * 2 * SIZE, offset=bait.slots[0] * (64 << 10))
    bait.peer.data[0].sendall(late)
    bait.peer.say(wire.of_fetch(wire.CANCELLED, bait.id))
    assert bait.target.poisoned


def test_a_producer_that_never_says_hello() -> None:
    with wire.FakeProducer() as fake, consumer("tcp") as decode:
        target = Paged(SIDE)
        decode.register(target.cache)
        ticket = kvxfer.issue_ticket("r", [fake.reference()], num_tokens=16)
        fetch = decode.fetch(ticket, target.cache, [0], timeout=0.3)
        with (
            fake.accept(say_hello=False),
            pytest.raises(kvxfer.TransferError, match="has not said HELLO yet") as caught,
        ):
            fetch.wait()
        assert caught.value.status is Status.TIMEOUT
