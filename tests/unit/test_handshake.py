"""The handshake: who may connect, what the other gets told, and what strangers can do to it."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import struct
import threading

import pytest
from kvtest import wire
from kvtest.agents import LONG, has_ipv6, until
from kvtest.caches import Geometry, Paged

import kvxfer
from kvxfer.handshake import (
    Deadline,
    Identity,
    Transcript,
    host_identity,
    join_address,
    recv_frame,
    send_frame,
    session_token,
    split_address,
)

SIDE = Geometry(layers=("layer.0",), num_blocks=4)
STRANGER = Identity("stranger", 7)


def works(prefill: kvxfer.Agent, **knobs: object) -> None:
    """A consumer that behaves is served."""
    source, target = Paged(SIDE, seed=1), Paged(SIDE)
    with kvxfer.Agent("decode", **knobs) as decode:
        prefill.register(source.cache)
        decode.register(target.cache)
        offer = prefill.offer(source.cache, range(4), 64)
        decode.fetch(offer.ticket, target.cache, range(4)).wait(LONG)
        assert target.same_as(source)
        assert offer.wait(LONG) is kvxfer.Status.OK
    prefill.unregister(source.cache)


def closed(sock: socket.socket) -> bool:
    try:
        return sock.recv(1) == b""
    except ConnectionError:
        return True


# Addresses


@pytest.mark.parametrize(
    ("address", "parts"),
    [
        ("127.0.0.1:7000", ("127.0.0.1", 7000)),
        ("[::1]:7000", ("::1", 7000)),
        ("prefill.example:0", ("prefill.example", 0)),
        (":7000", ("", 7000)),
    ],
)
def test_addresses(address: str, parts: tuple[str, int]) -> None:
    assert split_address(address) == parts
    assert join_address(*parts) == address


@pytest.mark.parametrize(
    "address", ["", "host", "host:", "host:port", "host:-1", "host:65536", "host:7e3", "1.2.3.4:²"]
)
def test_addresses_that_are_none(address: str) -> None:
    with pytest.raises(kvxfer.ConfigError, match=r"not host:port, as 10.0.0.5:7000"):
        split_address(address)


def test_ipv6_needs_brackets() -> None:
    with pytest.raises(kvxfer.ConfigError, match="in brackets"):
        split_address("::1:7000")


# Listening


@pytest.mark.parametrize("host", ["0.0.0.0", "[::]", "", "10.1.2.3"])
def test_listening_beyond_loopback_needs_a_secret(host: str) -> None:
    with pytest.raises(kvxfer.ConfigError, match=r"secret= \(KVXFER_SECRET\).*insecure=True"):
        kvxfer.Agent("prefill", listen=f"{host}:0")


@pytest.mark.parametrize("knobs", [{"secret": "s"}, {"insecure": True}], ids=str)
def test_listening_beyond_loopback(knobs: dict) -> None:
    with kvxfer.Agent("prefill", listen="0.0.0.0:0", advertise="127.0.0.1", **knobs) as prefill:
        assert prefill.address.startswith("127.0.0.1:")
        works(prefill, secret=knobs.get("secret"))


def test_localhost_is_loopback() -> None:
    with kvxfer.Agent("prefill", listen="localhost:0") as prefill:
        works(prefill)


def test_listening_where_somebody_else_does() -> None:
    with kvxfer.Agent("prefill", listen="127.0.0.1:0") as prefill:
        with pytest.raises(
            kvxfer.ResourceError, match=f"cannot listen on {prefill.address}.*in use"
        ):
            kvxfer.Agent("other", listen=prefill.address)
        works(prefill)


@pytest.mark.parametrize("host", ["no.such.host.invalid", "1.2.3"])
def test_listening_on_a_host_that_is_not_here(host: str) -> None:
    with pytest.raises(
        (kvxfer.ConfigError, kvxfer.ResourceError), match=f"cannot listen on .*{host}"
    ):
        kvxfer.Agent("prefill", listen=f"{host}:0", insecure=True)


def test_listening_on_an_address_of_another_host() -> None:
    with pytest.raises(kvxfer.ResourceError, match="cannot listen on 192.0.2.1:0"):
        kvxfer.Agent("prefill", listen="192.0.2.1:0", insecure=True)


def test_an_interface_that_does_not_exist() -> None:
    for listen in ("127.0.0.1:0", None):
        with pytest.raises(kvxfer.ConfigError, match="interface 'nosuch0'.*this host has .*lo"):
            kvxfer.Agent("prefill", listen=listen, interface="nosuch0")


def test_a_chosen_interface() -> None:
    probe = socket.socket()
    try:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, b"lo\0")
    except OSError as error:
        pytest.skip(f"this process may not bind sockets to an interface: {error}")
    finally:
        probe.close()
    knobs = {"interface": "lo", "transport": "tcp"}
    with kvxfer.Agent("prefill", listen="127.0.0.1:0", **knobs) as prefill:
        works(prefill, **knobs)


# Secrets


def test_a_shared_secret() -> None:
    with kvxfer.Agent("prefill", listen="127.0.0.1:0", secret="one") as prefill:
        for transport in ("shm", "tcp"):
            works(prefill, secret="one", transport=transport)


@pytest.mark.parametrize(("theirs", "ours"), [("one", "two"), ("one", None), (None, "two")])
def test_different_secrets(theirs: str | None, ours: str | None) -> None:
    with (
        kvxfer.Agent("prefill", listen="127.0.0.1:0", secret=theirs) as prefill,
        kvxfer.Agent("decode", secret=ours) as decode,
    ):
        with pytest.raises(kvxfer.HandshakeError, match="does not know our shared secret: set"):
            decode.connect("prefill", prefill.address)
        works(prefill, secret=theirs)


def test_proofs_are_bound_to_side_and_conversation() -> None:
    hello, reply = {"nonce": "a"}, {"nonce": "b"}
    ours = Transcript("secret", hello, reply)
    assert ours.proof("consumer") != ours.proof("producer")
    for other in (
        Transcript("other", hello, reply),
        Transcript("secret", {"nonce": "c"}, reply),
        Transcript("secret", hello, {"nonce": "c"}),
    ):
        assert other.proof("consumer") != ours.proof("consumer")
        assert other.session_key() != ours.session_key()
        with pytest.raises(kvxfer.HandshakeError, match="consumer does not know"):
            other.check("consumer", {"proof": ours.proof("consumer")})
    for wrong in (None, "", 7, "ä"):
        with pytest.raises(kvxfer.HandshakeError):
            ours.check("consumer", {"proof": wrong})
    assert Transcript("secret", hello, {**reply, "proof": "x"}).proof("p") == ours.proof("p")
    key = ours.session_key()
    assert session_token(key, "data0") != session_token(key, "data1")


# A producer that nobody should believe


def fails(address: str, words: str, name: str = "prefill", **knobs: object) -> None:
    with kvxfer.Agent("decode", **knobs) as decode:
        with pytest.raises(kvxfer.HandshakeError, match=words):
            decode.connect(name, address)
        # The same by a fetch: its handle tells.
        reference = kvxfer.AgentRef(name=name, address=address)
        ticket = kvxfer.issue_ticket("r", [reference], num_tokens=1, secret=decode.config.secret)
        target = Paged(SIDE)
        decode.register(target.cache)
        fetch = decode.fetch(ticket, target.cache, [0], timeout=LONG)
        with pytest.raises(kvxfer.TransferError, match=words) as caught:
            fetch.wait()
        assert caught.value.status in (kvxfer.Status.UNREACHABLE, kvxfer.Status.STALE)
        with kvxfer.Agent("prefill", listen="127.0.0.1:0", secret=decode.config.secret) as prefill:
            decode.connect("prefill", prefill.address)


def test_a_port_that_nobody_listens_on() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        address = f"127.0.0.1:{listening.getsockname()[1]}"
    fails(address, f"cannot connect to {address}.*refused; is the agent running there")


def test_a_host_that_does_not_exist() -> None:
    fails("no.such.host.invalid:7000", "cannot resolve 'no.such.host.invalid'")


@pytest.mark.parametrize("address", ["nonsense", "::1:7000", "host:99999", ""])
def test_an_address_that_is_none(address: str) -> None:
    fails(address, "not host:port|in brackets")


def test_a_listener_that_never_accepts() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        address = f"127.0.0.1:{listening.getsockname()[1]}"
        fails(
            address,
            f"'prefill' at {address} did not finish the handshake within 0.3 s",
            handshake_timeout=0.3,
        )


def test_a_producer_that_stops_in_the_middle() -> None:
    with wire.FakeProducer() as fake, kvxfer.Agent("decode", handshake_timeout=0.5) as decode:
        accepted = threading.Thread(target=lambda: sockets.append(fake.next_socket()))
        sockets: list[socket.socket] = []
        accepted.start()
        with pytest.raises(kvxfer.HandshakeError, match="did not finish the handshake"):
            decode.connect("prefill", fake.address)
        accepted.join(LONG)
        sockets[0].close()


def answer(frames: list[bytes | dict]) -> str:
    """Listen for ever in a thread that answers each connection with these; return the address."""
    listening = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        with listening:
            for _ in range(2):  # `fails` connects twice
                sock, _ = listening.accept()
                with sock, contextlib.suppress(OSError):  # a reset, and ENOTCONN after one
                    for frame in frames:
                        if isinstance(frame, dict):
                            raw = json.dumps(frame).encode()
                            frame = struct.pack("<I", len(raw)) + raw
                        sock.sendall(frame)
                    sock.shutdown(socket.SHUT_WR)
                    while sock.recv(4096):
                        pass

    threading.Thread(target=serve, daemon=True).start()
    return f"127.0.0.1:{listening.getsockname()[1]}"


@pytest.mark.parametrize(
    ("frames", "words"),
    [
        ([b"HTTP/1.1 400 Bad Request\r\n\r\n"], "not a kvxfer agent: its first frame claims"),
        ([b""], "closed during the handshake"),
        ([b"\x05\0\0\0{"], "closed during the handshake"),
        ([b"\x01\0\0\0{"], "not a kvxfer agent: its frame is not JSON"),
        ([b"\x02\0\0\0[]"], "not a kvxfer agent: its frame is not an object"),
        ([struct.pack("<I", 20000) + b"[" * 20000], "not a kvxfer agent"),
        ([b"\x04\0\0\0\xff\xfe\xff\xfe"], "not a kvxfer agent"),
        ([{}], "malformed frame"),
        ([{"kvxfer": 99}], "speaks handshake 99, this side 2"),
        ([{"kvxfer": 2, "proof": "00"}], "does not know our shared secret"),
        ([{"error": "go away", "status": "NO_RESOURCES"}], "go away"),
        ([{"error": "go away", "status": "NO SUCH STATUS"}], "go away|malformed"),
        ([{"error": "fine", "status": "OK"}], "its error has the status OK"),
        ([{"error": {"a": 1}, "status": None}], "a|malformed"),
        ([{"error": "\ud800", "status": "STALE"}], "not a kvxfer agent"),
    ],
    ids=range(15),
)
def test_a_producer_that_talks_nonsense(frames: list, words: str) -> None:
    with kvxfer.Agent("decode") as decode:
        address = answer(frames)
        for _ in range(2):
            with pytest.raises(kvxfer.HandshakeError, match=words):
                decode.connect("prefill", address)


def test_a_fetch_is_not_over_because_a_stranger_says_ok() -> None:
    target = Paged(SIDE)
    with kvxfer.Agent("decode") as decode:
        decode.register(target.cache)
        address = answer([{"error": "fine", "status": "OK"}])
        agents = [kvxfer.AgentRef(name="prefill", address=address)]
        ticket = kvxfer.issue_ticket("request", agents, num_tokens=64)
        with pytest.raises(kvxfer.TransferError) as caught:
            decode.fetch(ticket, target.cache, range(4)).wait(LONG)
        assert caught.value.status is kvxfer.Status.UNREACHABLE
        assert target.poisoned


# A consumer that nobody should believe


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


def test_ipv6() -> None:
    if not has_ipv6():
        pytest.skip("this host has no IPv6 loopback address ::1")
    for transport in ("shm", "tcp"):
        with kvxfer.Agent("prefill", listen="[::1]:0", transport=transport) as prefill:
            assert prefill.address.startswith("[::1]:")
            works(prefill, transport=transport)


def test_a_host_whose_kernel_has_no_namespaces(monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.stat

    def stat(path: str, *args: object, **options: object) -> os.stat_result:
        if str(path).startswith("/proc/self/ns/"):
            raise FileNotFoundError(path)
        return real(path, *args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr("kvxfer.handshake.os.stat", stat)
    assert host_identity.__wrapped__().endswith("/0")
