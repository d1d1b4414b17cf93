"""A peer made by hand: it can shake hands well, and then say anything.

It follows docs/wire_protocol.md by itself, but for the handshake, whose functions it borrows.
"""

from __future__ import annotations

import dataclasses
import fcntl
import os
import socket
import struct
import zlib
from typing import Any

import kvxfer
from kvtest.agents import LONG
from kvxfer import tls
from kvxfer.handshake import (
    PROTOCOL,
    Deadline,
    Identity,
    Transcript,
    host_identity,
    recv_frame,
    send_frame,
    session_token,
    split_address,
)

HELLO, LAYOUT, FETCH, ACCEPT, COMMIT, REFUSED, CREDIT, DONE = range(1, 9)
CANCEL, CANCELLED, PING, RENEW, BYE, WANT, DECLINE, DECLINED = range(9, 17)
VERSION = 4
SCHEMES = 0b11111
RAW, FP8_E4M3, FP8_E5M2, INT8 = range(4)  # codecs
NEVER = 0xFFFFFFFF


def text(value: str) -> bytes:
    raw = value.encode()
    return struct.pack("<I", len(raw)) + raw


def numbers(*values: int) -> bytes:
    return struct.pack(f"<{len(values)}I", *values)


def listed(*values: int) -> bytes:
    return numbers(len(values), *values)


def floats(*values: float) -> bytes:
    return struct.pack(f"<I{len(values)}f", len(values), *values)


def hello(
    name: str,
    incarnation: int,
    *,
    version: int = VERSION,
    slot_bytes: int = 64 << 10,
    schemes: int = SCHEMES,
) -> bytes:
    raw = struct.pack("<BHQ", HELLO, version, incarnation) + text(name)
    return raw + numbers(slot_bytes, schemes)


def layout(
    *,
    cache_id: int = 1,
    layers: tuple[str, ...] = ("layer.0",),
    planes: tuple[str, ...] = ("k", "v"),
    content: int = 16,
    heads: tuple[int, int] = (0, 4),
    block_size: int = 16,
    num_blocks: int = 24,
    element: int = 2,  # bfloat16
    views: int | None = None,
    scales: tuple[float, ...] = (),
) -> bytes:
    raw = struct.pack("<BI", LAYOUT, cache_id) + text("") + bytes([element])
    raw += numbers(num_blocks, block_size, heads[1] - heads[0], heads[0])
    raw += numbers(len(layers)) + b"".join(text(layer) for layer in layers)
    raw += numbers(len(planes)) + b"".join(text(plane) + numbers(content) for plane in planes)
    row = 2 * content
    view = struct.pack("<Qqqqq", 0, row * 4 * block_size, row * block_size, row, 2)
    raw += view * (len(layers) * len(planes) if views is None else views)
    return raw + floats(*scales)


def fetch(
    ticket: kvxfer.Ticket,
    *,
    fetch_id: int = 1,
    cache_id: int = 1,
    layers: tuple[int, ...] = (0,),
    heads: tuple[int, int] = (0, 4),
    tokens: tuple[int, int] = (0, 16),
    slot_in_block: int = 0,
    codec: int = RAW,
    panel_tokens: int = 64,
    group: int = 0,
    scale_format: int = 1,
    stretch: tuple[int, int] = (0, NEVER),
    rates: tuple[int, int] = (0, 0),
    chunk_bytes: int = 64 << 10,
    consumers: int = 1,
    slots: tuple[int, ...] = (0,),
    generation: bytes | None = None,
) -> bytes:
    raw = struct.pack("<BQ", FETCH, fetch_id) + text(ticket["offer"])
    raw += bytes.fromhex(ticket["generation"]) if generation is None else generation
    raw += numbers(cache_id) + listed(*layers) + numbers(*heads, *tokens, slot_in_block)
    raw += struct.pack("<BHHB", codec, panel_tokens, group, scale_format)
    raw += numbers(*stretch, *rates) + b"\1"
    return raw + numbers(chunk_bytes, consumers) + listed(*slots)


def accept(
    fetch_id: int,
    *,
    order: tuple[int, ...] = (0, 1, 2, 3, 4),
    per_layer: int = 0,
    num_chunks: int = 1,
    wire_bytes: int,
    block_size: int = 16,
    slot: int = 0,
    codec: int = RAW,
    element: int = 2,
    panel_tokens: int = 0,
    encodings: tuple[tuple[int, int, int], ...] = (),
    stretch: tuple[int, int] = (0, NEVER),
    scales: tuple[float, ...] = (),
    why: str = "",
) -> bytes:
    raw = struct.pack("<BQ", ACCEPT, fetch_id) + bytes([*order, per_layer])
    raw += struct.pack("<IQII", num_chunks, wire_bytes, block_size, slot)
    raw += struct.pack("<BBH", codec, element, panel_tokens)
    raw += numbers(len(encodings)) + b"".join(struct.pack("<BBH", *plane) for plane in encodings)
    return raw + numbers(*stretch) + floats(*scales) + text(why)


def commit(fetch_id: int, *, chunk: int = 0, slot: int = 0, size: int, digest: bytes = bytes(16)):
    return struct.pack("<BQIII", COMMIT, fetch_id, chunk, slot, size) + digest


def of_fetch(kind: int, fetch_id: int) -> bytes:
    """DONE, CANCEL, CANCELLED and DECLINED."""
    return struct.pack("<BQ", kind, fetch_id)


def refused(fetch_id: int, status: int, reason: bytes | str = "no", retry_ms: int = 0) -> bytes:
    raw = reason.encode() if isinstance(reason, str) else reason
    head = struct.pack("<BQBI", REFUSED, fetch_id, status, len(raw))
    return head + raw + numbers(retry_ms)


def decline(
    ticket: kvxfer.Ticket,
    *,
    fetch_id: int = 1,
    cache_id: int = 1,
    consumers: int = 1,
    given_up: int = 0,
) -> bytes:
    raw = struct.pack("<BQ", DECLINE, fetch_id) + text(ticket["offer"])
    raw += bytes.fromhex(ticket["generation"]) + numbers(cache_id, consumers)
    return raw + bytes([given_up])


def credit(fetch_id: int, *slots: int) -> bytes:
    return struct.pack("<BQ", CREDIT, fetch_id) + listed(*slots)


def write(notice: bytes, data: bytes, *, offset: int = 0, size: int | None = None) -> bytes:
    """What a data stream carries."""
    size = len(data) if size is None else size
    return struct.pack("<4sIQQ", b"KVXW", len(notice), size, offset) + notice + data


@dataclasses.dataclass
class FakePeer:
    """One end of a link over TCP. `data` are the sockets of the data streams."""

    identity: Identity
    control: socket.socket
    data: list[socket.socket]
    said: int = 0  # messages
    heard: int = 0

    def say(self, *messages: bytes) -> None:
        for message in messages:
            check = zlib.crc32(message, self.said)
            self.said += 1
            self.control.sendall(numbers(len(message), check) + message)

    def raw(self, data: bytes) -> None:
        self.control.sendall(data)

    def hear(self) -> bytes | None:
        """Return the next message; None when the other side has closed the link."""
        try:
            header = self._exactly(8)
            if header is None:
                return None
            size, check = struct.unpack("<II", header)
            message = self._exactly(size)
        except ConnectionError:
            return None
        if message is not None:
            assert check == zlib.crc32(message, self.heard)
            self.heard += 1
        return message

    def hear_a(self, kind: int) -> bytes:
        """Return the next message of a kind, and skip those before."""
        while True:
            message = self.hear()
            assert message is not None, f"the link was closed before a message of kind {kind} came"
            if message[0] == kind:
                return message

    def last_words(self) -> list[bytes]:
        """Return all that the other side still says before it closes the link."""
        heard = []
        while (message := self.hear()) is not None:
            heard.append(message)
        return heard

    def _exactly(self, size: int) -> bytes | None:
        raw = b""
        while len(raw) < size:
            piece = self.control.recv(size - len(raw))
            if not piece:
                return None
            raw += piece
        return raw

    def close(self) -> None:
        for sock in (self.control, *self.data):
            sock.close()

    def __enter__(self) -> FakePeer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def open_socket(address: str) -> socket.socket:
    sock = socket.create_connection(split_address(address), LONG)
    sock.settimeout(LONG)
    return sock


def greeting(identity: Identity, **changes: Any) -> dict[str, Any]:
    """The first frame of a consumer."""
    return {
        "kvxfer": PROTOCOL,
        "kind": "peer",
        **identity.frame(),
        "nonce": os.urandom(16).hex(),
        "host": host_identity(),
        "transports": ["tcp"],
        "streams": 1,
        **changes,
    }


def consumer(
    address: str,
    name: str = "stranger",
    *,
    secret: str | None = None,
    streams: int = 1,
    say_hello: bool = True,
    transport: str = "tcp",
    config: kvxfer.Config | None = None,
) -> FakePeer:
    """Connect to an agent as a consumer would, over TCP or shm; `config` is for TLS."""
    identity = Identity(name, int.from_bytes(os.urandom(8), "little"))
    deadline = Deadline(LONG)

    def dial() -> socket.socket:
        sock = open_socket(address)
        return tls.connect(sock, split_address(address)[0], config, deadline) if config else sock

    control = dial()
    first = greeting(identity, streams=streams, transports=[transport])
    send_frame(control, first, deadline)
    reply = recv_frame(control, deadline)
    transcript = Transcript(secret, first, reply)
    transcript.check("producer", reply)
    send_frame(control, {"proof": transcript.proof("consumer")}, deadline)
    chosen = recv_frame(control, deadline)
    data = []
    if transport == "shm":
        control.close()
        control = _join_shm(chosen, transcript.session_key(), deadline)
    for index in range(streams if transport == "tcp" else 0):
        stream = dial()
        token = session_token(transcript.session_key(), f"data{index}")
        frame = {"kind": "data", "session": chosen["session"], "index": index, "token": token}
        send_frame(stream, frame, deadline)
        recv_frame(stream, deadline)
        tls.leave(stream, deadline)
        stream.settimeout(LONG)
        data.append(stream)
    if transport == "tcp":
        tls.leave(control, deadline)
    control.settimeout(LONG)
    peer = FakePeer(identity, control, data)
    if say_hello:
        peer.say(hello(name, identity.incarnation))
        peer.hear_a(HELLO)
    return peer


def _join_shm(chosen: dict[str, Any], key: bytes, deadline: Deadline) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.settimeout(LONG)
    sock.connect("\0" + chosen["socket"])
    size = 1 << 20
    frame = {"kind": "shm", "session": chosen["session"], "token": session_token(key, "shm")}
    send_frame(sock, {**frame, "arena_bytes": size}, deadline)
    arena = os.memfd_create("arena", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(arena, size)
        fcntl.fcntl(arena, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
        socket.send_fds(sock, [b"a"], [arena])
    finally:
        os.close(arena)
    recv_frame(sock, deadline)
    return sock


class FakeProducer:
    """Listens like a producer's agent; `accept` shakes hands with the next consumer."""

    def __init__(self, name: str = "prefill") -> None:
        self.identity = Identity(name, int.from_bytes(os.urandom(8), "little"))
        self._listening = socket.create_server(("127.0.0.1", 0))
        self._listening.settimeout(LONG)
        self.address = f"127.0.0.1:{self._listening.getsockname()[1]}"

    def reference(self) -> kvxfer.AgentRef:
        return kvxfer.AgentRef(
            name=self.identity.name,
            address=self.address,
            incarnation=self.identity.incarnation,
        )

    def next_socket(self) -> socket.socket:
        sock, _ = self._listening.accept()
        sock.settimeout(LONG)
        return sock

    def accept(self, *, say_hello: bool = True, slot_bytes: int = 64 << 10) -> FakePeer:
        deadline = Deadline(LONG)
        control = self.next_socket()
        first = recv_frame(control, deadline)
        reply = {"kvxfer": PROTOCOL, **self.identity.frame(), "nonce": os.urandom(16).hex()}
        transcript = Transcript(None, first, reply)
        send_frame(control, {**reply, "proof": transcript.proof("producer")}, deadline)
        transcript.check("consumer", recv_frame(control, deadline))
        chosen = {"transport": "tcp", "why": "made by hand", "session": "s", "socket": ""}
        send_frame(control, chosen, deadline)
        data = []
        for _ in range(first["streams"]):
            stream = self.next_socket()
            recv_frame(stream, deadline)
            send_frame(stream, {"ok": True}, deadline)
            stream.settimeout(LONG)
            data.append(stream)
        control.settimeout(LONG)
        peer = FakePeer(Identity.of(first), control, data)
        if say_hello:
            me = self.identity
            peer.say(hello(me.name, me.incarnation, slot_bytes=slot_bytes))
            peer.hear_a(HELLO)
        return peer

    def close(self) -> None:
        self._listening.close()

    def __enter__(self) -> FakeProducer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
