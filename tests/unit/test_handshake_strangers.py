"""The handshake, from the producer: what strangers can do to it, and what they learn."""

from __future__ import annotations

import contextlib
import os
import socket
import struct

import pytest
from kvtest import wire
from kvtest.agents import LONG, until, works

import kvxfer
from kvxfer.handshake import (
    Deadline,
    Identity,
    Transcript,
    recv_frame,
    send_frame,
    session_token,
)

STRANGER = Identity("stranger", 7)


def closed(sock: socket.socket) -> bool:
    try:
        return sock.recv(1) == b""
    except ConnectionError:
        return True


@pytest.fixture
def prefill():
    with kvxfer.Agent("prefill", listen="127.0.0.1:0", secret="secret") as agent:
        yield agent
        works(agent, secret="secret")


def first_reply(address: str, frame: dict | bytes) -> dict | None:
    """Send one frame; return the answer, None when the connection is closed instead."""
    with wire.open_socket(address) as sock:
        if isinstance(frame, bytes):
            with contextlib.suppress(OSError):  # a reset, and ENOTCONN after one
                sock.sendall(frame)
                sock.shutdown(socket.SHUT_WR)
        else:
            send_frame(sock, frame, Deadline(LONG))
        try:
            return recv_frame(sock, Deadline(LONG))
        except kvxfer.HandshakeError as error:
            return None if "closed" in str(error) else {"error": str(error)}
        except ConnectionError:
            return None


@pytest.mark.parametrize(
    "garbage",
    [
        b"",
        b"\0",
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        os.urandom(200),
        struct.pack("<I", 0xFFFFFFFF),
        struct.pack("<I", 20000) + b"[" * 20000,
        struct.pack("<I", 20000) + b'{"a":' * 4000,
        struct.pack("<I", 2) + b"[]",
        struct.pack("<I", 4) + b"null",
        struct.pack("<I", 5) + b"\xff\xff\xff\xff\xff",
        struct.pack("<I", 6000) + b"9" * 6000,
    ],
    ids=range(11),
)
def test_a_consumer_that_sends_garbage(prefill: kvxfer.Agent, garbage: bytes) -> None:
    reply = first_reply(prefill.address, garbage)
    assert reply is None or "not a kvxfer agent" in reply["error"]


@pytest.mark.parametrize(
    "changes",
    [
        {"kvxfer": 99},
        {"kvxfer": None},
        {"kind": "data"},
        {"kind": "shm"},
        {"kind": "data", "session": "s", "token": "t", "index": 0},
        {"kind": "data", "session": "s", "token": "t", "index": float("inf")},
        {"kind": "data", "session": ["s"], "token": {}, "index": "x"},
    ],
    ids=str,
)
def test_a_first_frame_that_makes_no_sense(prefill: kvxfer.Agent, changes: dict) -> None:
    reply = first_reply(prefill.address, wire.greeting(STRANGER, **changes))
    assert reply is None or "error" in reply


def converse(address: str, changes: dict, secret: str | None = "secret") -> dict | None:
    """Shake hands up to the proof; return what follows."""
    with wire.open_socket(address) as sock:
        first = wire.greeting(STRANGER, **changes)
        deadline = Deadline(LONG)
        send_frame(sock, first, deadline)
        reply = recv_frame(sock, deadline)
        transcript = Transcript(secret, first, reply)
        send_frame(sock, {"proof": transcript.proof("consumer")}, deadline)
        try:
            return recv_frame(sock, deadline)
        except kvxfer.HandshakeError as error:
            return None if "closed" in str(error) else {"error": str(error)}
        except ConnectionError:
            return None


@pytest.mark.parametrize("secret", [None, "wrong"])
def test_a_consumer_without_the_secret_learns_nothing(
    prefill: kvxfer.Agent, secret: str | None
) -> None:
    reply = converse(prefill.address, {}, secret)
    assert reply is not None
    assert list(reply) == ["error"]
    assert "consumer does not know our shared secret" in reply["error"]


@pytest.mark.parametrize(
    "changes",
    [
        {"streams": 0},
        {"streams": -1},
        {"streams": 1 << 40},
        {"streams": float("inf")},
        {"streams": float("nan")},
        {"streams": None},
        {"streams": "many"},
        {"transports": []},
        {"transports": ["carrier-pigeon"]},
        {"transports": [1, None]},
        {"transports": None},
        {"transports": {"tcp": 1}, "streams": []},
        {"name": None, "streams": {}},
        {"incarnation": "not hex"},
        {"incarnation": None},
        {"incarnation": 5},
        {"incarnation": "-5"},
        {"incarnation": "1" + 16 * "0"},
    ],
    ids=str,
)
def test_a_proven_consumer_that_makes_no_sense(prefill: kvxfer.Agent, changes: dict) -> None:
    reply = converse(prefill.address, changes)
    assert reply is None or "error" in reply


def test_a_consumer_that_makes_no_sense_to_the_core_leaves_nothing_behind() -> None:
    """All of its connections have come, and then its incarnation is none."""
    with kvxfer.Agent("prefill", listen="127.0.0.1:0") as prefill:
        works(prefill)
        before = len(os.listdir("/proc/self/fd"))
        for incarnation in ("-5", "1" + 16 * "0"):
            assert converse(prefill.address, {"incarnation": incarnation}, None) is None
        until(lambda: len(os.listdir("/proc/self/fd")) <= before)
        assert prefill.stats.peers == 0


def test_a_frame_that_lacks_a_part(prefill: kvxfer.Agent) -> None:
    for key in wire.greeting(STRANGER):
        frame = wire.greeting(STRANGER)
        del frame[key]
        with wire.open_socket(prefill.address) as sock:
            deadline = Deadline(LONG)
            send_frame(sock, frame, deadline)
            try:
                reply = recv_frame(sock, deadline)
                transcript = Transcript("secret", frame, reply)
                send_frame(sock, {"proof": transcript.proof("consumer")}, deadline)
                recv_frame(sock, deadline)
            except (kvxfer.HandshakeError, ConnectionError):
                pass
            else:
                assert key == "nonce", f"a frame without {key} was taken"


def refusal(sock: socket.socket) -> str:
    """Return the error that comes, now or behind an answer that came too early."""
    try:
        while recv_frame(sock, Deadline(LONG)):
            pass
    except kvxfer.HandshakeError as error:
        return str(error)


def test_data_streams_need_the_token_of_their_session(prefill: kvxfer.Agent) -> None:
    deadline = Deadline(LONG)
    with wire.open_socket(prefill.address) as control:
        first = wire.greeting(STRANGER, streams=2)
        send_frame(control, first, deadline)
        reply = recv_frame(control, deadline)
        transcript = Transcript("secret", first, reply)
        send_frame(control, {"proof": transcript.proof("consumer")}, deadline)
        session = recv_frame(control, deadline)["session"]
        key = transcript.session_key()
        for index, token, words in [
            (0, "0" * 64, "not known, or its token is wrong"),
            (0, session_token(key, "data1"), "token is wrong"),
            (0, session_token(key, "shm"), "token is wrong"),
            (2, session_token(key, "data2"), "data stream 2 was not expected"),
            (-1, session_token(key, "data-1"), "data stream -1 was not expected"),
        ]:
            frame = {"kind": "data", "session": session, "index": index, "token": token}
            with wire.open_socket(prefill.address) as stream:
                send_frame(stream, frame, deadline)
                assert words in refusal(stream)
        # And each index is good for one.
        token = session_token(key, "data0")
        frame = {"kind": "data", "session": session, "index": 0, "token": token}
        with wire.open_socket(prefill.address) as one, wire.open_socket(prefill.address) as two:
            send_frame(one, frame, deadline)
            assert recv_frame(one, deadline) == {"ok": True}
            send_frame(two, frame, deadline)
            assert "data stream 0 came twice" in refusal(two)


def test_slow_handshakes_do_not_keep_others_out() -> None:
    """Many say one byte and wait."""
    with kvxfer.Agent("prefill", listen="127.0.0.1:0") as prefill:
        slow = [wire.open_socket(prefill.address) for _ in range(32)]
        for sock in slow:
            sock.sendall(b"\x10")
        works(prefill)
        for sock in slow:
            sock.close()


def test_handshakes_have_a_deadline() -> None:
    """However slowly somebody talks, one byte after the other: he is thrown out."""
    with kvxfer.Agent("prefill", listen="127.0.0.1:0", handshake_timeout=0.3) as prefill:
        with wire.open_socket(prefill.address) as silent, wire.open_socket(prefill.address) as slow:
            slow.sendall(b"\x10\0\0\0{")
            assert closed(slow)
            assert closed(silent)
        works(prefill)


def begun(address: str, streams: int) -> tuple[socket.socket, str, bytes]:
    """Shake hands until the data streams are due; return the connection, the session, its key."""
    deadline = Deadline(LONG)
    sock = wire.open_socket(address)
    first = wire.greeting(STRANGER, streams=streams)
    send_frame(sock, first, deadline)
    transcript = Transcript(None, first, recv_frame(sock, deadline))
    send_frame(sock, {"proof": transcript.proof("consumer")}, deadline)
    return sock, recv_frame(sock, deadline)["session"], transcript.session_key()


def test_a_whole_cluster_may_connect_at_once() -> None:
    """Consumers that wait for their data streams to be taken leave room for those."""
    with kvxfer.Agent("prefill", listen="127.0.0.1:0", handshake_timeout=LONG) as prefill:
        consumers = [begun(prefill.address, streams=2) for _ in range(100)]
        for control, session, key in consumers:
            for index in range(2):
                token = session_token(key, f"data{index}")
                with wire.open_socket(prefill.address) as stream:
                    frame = {"kind": "data", "session": session, "index": index, "token": token}
                    send_frame(stream, frame, Deadline(LONG))
                    assert recv_frame(stream, Deadline(LONG)) == {"ok": True}
            control.close()
        works(prefill)


def test_a_cluster_that_is_too_large_is_told_to_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvxfer.listener._MAX_CONSUMERS", 3)
    with kvxfer.Agent("prefill", listen="127.0.0.1:0", handshake_timeout=LONG) as prefill:
        consumers = [begun(prefill.address, streams=1)[0] for _ in range(3)]
        with kvxfer.Agent("decode") as decode:
            with pytest.raises(kvxfer.HandshakeError, match="'prefill' is busy.*again") as caught:
                decode.connect("prefill", prefill.address)
            assert caught.value.status is kvxfer.Status.BUSY
        for sock in consumers:
            sock.close()


def test_more_handshakes_than_allowed_are_turned_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvxfer.listener._MAX_HANDSHAKES", 20)
    with kvxfer.Agent("prefill", listen="127.0.0.1:0", handshake_timeout=LONG) as prefill:
        sockets = [wire.open_socket(prefill.address) for _ in range(22)]
        # The last ones find all places taken, which the deadline does not free in this test.
        assert closed(sockets[-1])
        for sock in sockets:
            sock.close()
        # All of them have gone: there is room again, at the latest when their threads have seen it.
        for _ in range(100):
            with kvxfer.Agent("decode") as decode:
                try:
                    decode.connect("prefill", prefill.address)
                except kvxfer.HandshakeError:
                    continue
                break
        works(prefill)


def test_an_agent_closes_in_the_middle_of_handshakes() -> None:
    prefill = kvxfer.Agent("prefill", listen="127.0.0.1:0")
    sockets = [wire.open_socket(prefill.address) for _ in range(4)]
    for sock in sockets:
        send_frame(sock, wire.greeting(STRANGER), Deadline(LONG))
        recv_frame(sock, Deadline(LONG))
    prefill.close()
    for sock in sockets:
        sock.close()
