"""The handshake, from the consumer: who may listen and connect, and what it is told."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import struct
import threading

import pytest
from kvtest import wire
from kvtest.agents import LONG, has_ipv6, works
from kvtest.caches import Geometry, Paged

import kvxfer
from kvxfer.handshake import (
    Transcript,
    host_identity,
    join_address,
    session_token,
    split_address,
)

SIDE = Geometry(layers=("layer.0",), num_blocks=4)


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
