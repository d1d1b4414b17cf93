"""The shared secret: where it comes from, where it never shows, and what it keeps out."""

from __future__ import annotations

import json
import logging
import socket
import threading
from pathlib import Path

import pytest
from kvtest import wire
from kvtest.agents import LONG, consumer, producer, until
from kvtest.caches import Geometry, Paged

import kvxfer
from kvxfer.handshake import (
    Deadline,
    Identity,
    Transcript,
    recv_frame,
    send_frame,
    split_address,
)

SIDE = Geometry(layers=("a",), content=8, num_blocks=4)
SECRET = "correct horse battery staple"


def fetch_from(prefill: kvxfer.Agent, decode: kvxfer.Agent) -> kvxfer.Ticket:
    source, target = Paged(SIDE, 1), Paged(SIDE)
    prefill.register(source.cache)
    decode.register(target.cache)
    ticket = prefill.offer(source.cache, [0, 1], 32).ticket
    decode.fetch(ticket, target.cache, [2, 3], timeout=LONG).wait()
    return ticket


def test_from_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "secret"
    file.write_text(SECRET + "\n")
    assert kvxfer.Config(secret_file=str(file)).secret == SECRET
    monkeypatch.setenv("KVXFER_SECRET_FILE", str(file))
    assert kvxfer.Config().secret == SECRET
    assert kvxfer.Config().replace(window=1).secret == SECRET
    assert kvxfer.Config(secret="another").secret == "another"
    with producer("tcp") as prefill, consumer("tcp", secret=SECRET) as decode:
        fetch_from(prefill, decode)


@pytest.mark.parametrize(
    ("content", "words"),
    [(None, "No such file"), (b"", "is empty"), (b"\n", "is empty"), (b"\xff\xfe", "not text")],
)
def test_files_that_hold_none(tmp_path: Path, content: bytes | None, words: str) -> None:
    file = tmp_path / "secret"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(kvxfer.ConfigError, match=f"secret_file.*{words}"):
        kvxfer.Config(secret_file=str(file))


class Recorder:
    """Passes a connection on to an agent and keeps what was said."""

    def __init__(self, address: str) -> None:
        self._target = address
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listening.getsockname()[1]}"
        self.said: list[bytearray] = []  # by each connecting side
        self.heard = bytearray()
        self._threads: list[threading.Thread] = []
        self._begin(self._accept)

    def _begin(self, work, *args: object) -> None:
        thread = threading.Thread(target=work, args=args, daemon=True)
        thread.start()
        self._threads.append(thread)

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listening.accept()
            except OSError:
                return
            server = socket.create_connection(split_address(self._target), LONG)
            said = bytearray()
            self.said.append(said)
            self._begin(self._pump, client, server, said)
            self._begin(self._pump, server, client, self.heard)

    @staticmethod
    def _pump(source: socket.socket, target: socket.socket, kept: bytearray) -> None:
        try:
            while data := source.recv(1 << 16):
                kept += data
                target.sendall(data)
        except OSError:
            pass
        source.close()
        target.close()

    def close(self) -> None:
        self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()
        for thread in self._threads:
            thread.join(LONG)


def test_it_never_shows(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    """Not in tickets, reprs, messages of errors, logs, nor on the wire."""
    caplog.set_level(logging.DEBUG)
    shown: list[str] = []
    with (
        producer("tcp", secret=SECRET) as prefill,
        consumer("tcp", secret=SECRET) as decode,
        consumer("tcp", "stranger", secret="wrong") as stranger,
    ):
        recorder = Recorder(prefill.address)
        reference = kvxfer.AgentRef(name="prefill", address=recorder.address)
        source, target = Paged(SIDE, 1), Paged(SIDE)
        prefill.register(source.cache)
        decode.register(target.cache)
        ticket = kvxfer.issue_ticket("r", [reference], num_tokens=32, secret=SECRET)
        offer = prefill.offer(source.cache, [0, 1], ticket=ticket)
        fetch = decode.fetch(ticket, target.cache, [2, 3], timeout=LONG)
        fetch.wait()
        shown += [json.dumps(ticket), repr(prefill), repr(decode), repr(fetch), repr(offer)]
        shown += [repr(prefill.config), str(prefill.config), kvxfer.Config.describe()]
        shown += [repr(fetch.report), repr(source.cache)]
        with pytest.raises(kvxfer.TicketError) as forged:
            stranger.fetch(ticket, target.cache, [2, 3])
        with pytest.raises(kvxfer.HandshakeError) as refused:
            stranger.connect("prefill", prefill.address)
        shown += [repr(forged.value), repr(refused.value)]
        with pytest.raises(kvxfer.ConfigError) as wrong:
            prefill.config.replace(secret=SECRET.encode())
        shown.append(repr(wrong.value))
    recorder.close()
    shown += [record.getMessage() for record in caplog.records]
    wire_bytes = b"".join(map(bytes, recorder.said)) + bytes(recorder.heard)
    assert len(wire_bytes) > 1000
    shown.append(wire_bytes.decode("latin-1"))
    for text in shown:
        assert SECRET not in text
        assert SECRET.encode().hex() not in text


def test_a_conversation_cannot_be_replayed() -> None:
    """All that a consumer said, said again: the producer's nonce is another."""
    with producer("tcp", secret=SECRET) as prefill, consumer("tcp", secret=SECRET) as decode:
        recorder = Recorder(prefill.address)
        decode.connect("prefill", recorder.address)
        until(lambda: prefill.stats.peers == 1)
        said = [bytes(one) for one in recorder.said]
        for one in said:  # the handshake, then each data connection
            with wire.open_socket(prefill.address) as sock:
                sock.sendall(one)
                deadline = Deadline(LONG)
                assert refused(sock, deadline)
        assert prefill.stats.peers == 1
    recorder.close()


def refused(sock: socket.socket, deadline: Deadline) -> bool:
    """Whether the conversation ends with an error, or with the connection."""
    for _ in range(3):
        try:
            recv_frame(sock, deadline)
        except (kvxfer.HandshakeError, OSError):
            return True
    return False


@pytest.mark.parametrize(
    "change", [{"transports": ["tcp"]}, {"host": "elsewhere"}, {"streams": 1}, {"name": "other"}]
)
def test_what_was_changed_on_the_way_is_refused(change: dict) -> None:
    """A man in the middle who takes away what is better, shared memory say, is found out."""
    with producer("auto", secret=SECRET) as prefill:
        sock = wire.open_socket(prefill.address)
        with sock:
            deadline = Deadline(LONG)
            hello = wire.greeting(Identity("decode", 7), transports=["shm", "tcp"], streams=2)
            send_frame(sock, {**hello, **change}, deadline)
            reply = recv_frame(sock, deadline)
            honest = Transcript(SECRET, hello, reply)  # of what the consumer has sent
            with pytest.raises(kvxfer.HandshakeError, match="secret"):
                honest.check("producer", reply)
            send_frame(sock, {"proof": honest.proof("consumer")}, deadline)
            with pytest.raises(kvxfer.HandshakeError, match="secret"):
                recv_frame(sock, deadline)
        assert prefill.stats.peers == 0


@pytest.mark.parametrize("version", [0, -1, "1", None, 1.5, 10**9])
def test_other_versions_are_refused(version: object) -> None:
    with producer("tcp", secret=SECRET) as prefill, wire.open_socket(prefill.address) as sock:
        deadline = Deadline(LONG)
        send_frame(sock, wire.greeting(Identity("decode", 7), kvxfer=version), deadline)
        with pytest.raises(kvxfer.HandshakeError, match="speaks handshake"):
            recv_frame(sock, deadline)


def test_a_ticket_without_the_secret_makes_nobody_connect() -> None:
    """Who can't sign can't make an agent dial an address of their choice."""
    with socket.create_server(("127.0.0.1", 0)) as trap, consumer("tcp", secret=SECRET) as decode:
        trap.settimeout(0.2)
        target = Paged(SIDE)
        decode.register(target.cache)
        address = f"127.0.0.1:{trap.getsockname()[1]}"
        reference = kvxfer.AgentRef(name="prefill", address=address)
        for secret in (None, "guess"):
            ticket = kvxfer.issue_ticket("r", [reference], num_tokens=16, secret=secret)
            with pytest.raises(kvxfer.TicketError):
                decode.fetch(ticket, target.cache, [0])
        honest = kvxfer.issue_ticket("r", [reference], num_tokens=16, secret=SECRET)
        honest["agents"][0]["address"] = "10.0.0.1:1"
        with pytest.raises(kvxfer.TicketError):
            decode.fetch(honest, target.cache, [0])
        with pytest.raises(TimeoutError):
            trap.accept()


def test_strangers_cannot_keep_others_out_for_long() -> None:
    """More connections than are served at once, all silent: they end by their deadline."""
    with (
        producer("tcp", secret=SECRET, handshake_timeout=1.0) as prefill,
        consumer("tcp", secret=SECRET) as decode,
    ):
        threads = threading.active_count()
        idle = [socket.create_connection(split_address(prefill.address), LONG) for _ in range(300)]
        try:
            until(lambda: threading.active_count() > threads)
            # No more than are allowed; the others wait, or were turned away.
            assert threading.active_count() - threads <= 256 + 1
            until(lambda: connects(decode, prefill))
        finally:
            for sock in idle:
                sock.close()
        fetch_from(prefill, decode)
        until(lambda: threading.active_count() <= threads)


def connects(decode: kvxfer.Agent, prefill: kvxfer.Agent) -> bool:
    try:
        decode.connect("prefill", prefill.address)
    except kvxfer.HandshakeError:
        return False
    return True


def test_a_stranger_cannot_make_an_agent_hold_much() -> None:
    """A frame that claims more than a handshake has is refused before anything is kept of it."""
    with producer("tcp", secret=SECRET) as prefill, wire.open_socket(prefill.address) as sock:
        sock.sendall(((64 << 10) + 1).to_bytes(4, "little"))
        with pytest.raises(kvxfer.HandshakeError, match="claims"):
            recv_frame(sock, Deadline(LONG))
