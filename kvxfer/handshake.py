"""What the two sides of a new connection say to each other, and how they prove who they are.

The consumer connects to the producer's address and both exchange JSON frames::

    consumer                                    producer
    {kind: "peer", name, incarnation, nonce, ...} ->
                                             <- {name, incarnation, nonce, proof}
    {proof} ->
                                             <- {transport, why, session, ...} or {error, status}

With verbs and ucx, what the adapters need to know of each other follows, and either side may find
that it cannot be, when TCP takes over if both allow that::

    {endpoint} or {problem} ->
                                             <- {endpoint} or {problem}
    {connected} or {problem} ->

Both proofs are HMACs over the first two frames under the shared secret (an empty key where there is
none). The key of the session is derived in the same way and never sent; each further connection (a
data stream, a shared-memory socket) presents a token made of it. Then the sockets go to the core.

Where agents have certificates all of it is said under TLS, on each TCP connection: see `tls`.
"""

from __future__ import annotations

import base64
import dataclasses
import functools
import hashlib
import hmac
import json
import os
import socket
import struct
import time
import weakref
from pathlib import Path
from typing import Any

from kvxfer._terminal import printable
from kvxfer.config import Config
from kvxfer.errors import ConfigError, HandshakeError, Status

PROTOCOL = 2  # of the handshake; the core's messages have a version of their own
_MAX_FRAME = 64 << 10
_MAX_ENDPOINT_FRAME = 1 << 20  # of a peer that has proved itself
_MAX_PROBLEM = 2000  # characters
_TLS = (b"\x15\x03", b"\x16\x03")  # how its alerts and handshakes begin
TLS_ADVICE = "set tls_cert and tls_ca on all agents that talk to each other, or on none"
Frame = dict[str, Any]

# Sockets that the core does not own (yet). A forked child closes them: kept open there, they would
# hide the end of this process from the peer.
_sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()


def closed_on_fork(sock: socket.socket) -> socket.socket:
    _sockets.add(sock)
    return sock


def _after_fork_in_child() -> None:
    for sock in list(_sockets):
        sock.close()


os.register_at_fork(after_in_child=_after_fork_in_child)


@dataclasses.dataclass(frozen=True)
class Identity:
    """Who an agent says it is."""

    name: str
    incarnation: int

    def frame(self) -> Frame:
        return {"name": self.name, "incarnation": f"{self.incarnation:016x}"}

    @staticmethod
    def of(frame: Frame) -> Identity:
        incarnation = int(frame["incarnation"], 16)
        if not 0 <= incarnation < 1 << 64:
            raise ValueError(f"incarnation {frame['incarnation']!r:.80} has more than 64 bits")
        return Identity(str(frame["name"]), incarnation)


class Deadline:
    """A point in time that a whole conversation has to keep."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    def remaining(self) -> float:
        """Return the seconds left; raise TimeoutError when there are none."""
        left = self._end - time.monotonic()
        if left <= 0:
            raise TimeoutError("timed out")
        return left


def send_frame(sock: socket.socket, frame: Frame, deadline: Deadline) -> None:
    raw = json.dumps(frame).encode()
    rest = memoryview(struct.pack("<I", len(raw)) + raw)
    while rest:  # sendall() under TLS would have a new timeout for every record
        sock.settimeout(deadline.remaining())
        rest = rest[sock.send(rest) :]


def _recv_exactly(sock: socket.socket, size: int, deadline: Deadline) -> bytes:
    # Not one byte more: what follows the handshake belongs to the core.
    raw = bytearray()
    while len(raw) < size:
        sock.settimeout(deadline.remaining())
        piece = sock.recv(size - len(raw))
        if not piece:
            raise HandshakeError("the connection was closed during the handshake")
        raw += piece
    return bytes(raw)


def recv_frame(sock: socket.socket, deadline: Deadline, most: int = _MAX_FRAME) -> Frame:
    start = _recv_exactly(sock, 4, deadline)
    (size,) = struct.unpack("<I", start)
    if size > most:
        if start[:2] in _TLS:
            raise HandshakeError(f"the other side speaks TLS, this one does not: {TLS_ADVICE}")
        raise HandshakeError(f"not a kvxfer agent: its first frame claims {size} bytes")
    try:
        frame = json.loads(_recv_exactly(sock, size, deadline))
        # Half a surrogate pair is JSON, but no text that the core could take.
        json.dumps(frame, ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        raise HandshakeError("not a kvxfer agent: its frame is not JSON") from None
    if not isinstance(frame, dict):
        raise HandshakeError("not a kvxfer agent: its frame is not an object")
    if "error" in frame:
        status = Status(frame.get("status", "UNREACHABLE"))
        if status is Status.OK:  # fetches would end with it, and pass for delivered
            raise HandshakeError("not a kvxfer agent: its error has the status OK")
        raise HandshakeError(printable(frame["error"]), status)
    return frame


def endpoint_frame(address: bytes) -> Frame:
    return {"endpoint": base64.b64encode(address).decode()}


def problem_frame(problem: object) -> Frame:
    return {"problem": str(problem)[:_MAX_PROBLEM]}


def recv_endpoint(sock: socket.socket, deadline: Deadline) -> tuple[bytes, str | None]:
    """Return the address of the peer's adapters, or what its problem is."""
    frame = recv_frame(sock, deadline, _MAX_ENDPOINT_FRAME)
    if "problem" in frame:
        return b"", str(frame["problem"])
    return base64.b64decode(str(frame["endpoint"]), validate=True), None


def error_frame(error: HandshakeError) -> Frame:
    return {"error": str(error), "status": error.status.value}


class Transcript:
    """The first two frames, under the secret: proofs and the session key come from it."""

    def __init__(self, secret: str | None, hello: Frame, reply: Frame) -> None:
        self._key = (secret or "").encode()
        reply = {key: value for key, value in reply.items() if key != "proof"}
        raw = json.dumps([hello, reply], sort_keys=True).encode()
        self._digest = hashlib.sha256(raw).digest()

    def proof(self, side: str) -> str:
        return hmac.new(self._key, side.encode() + self._digest, "sha256").hexdigest()

    def check(self, side: str, frame: Frame) -> None:
        if not hmac.compare_digest(str(frame.get("proof")).encode(), self.proof(side).encode()):
            raise HandshakeError(
                f"the {side} does not know our shared secret: set the same secret "
                "(KVXFER_SECRET) on all agents, or none on any"
            )

    def session_key(self) -> bytes:
        return hmac.new(self._key, b"session" + self._digest, "sha256").digest()


def session_token(key: bytes, purpose: str) -> str:
    """Return what a further connection of a session presents."""
    return hmac.new(key, purpose.encode(), "sha256").hexdigest()


@functools.cache
def host_identity() -> str:
    """Return a text that is equal for processes that can share memory and Unix sockets."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    try:
        network = os.stat("/proc/self/ns/net").st_ino  # abstract socket names live in it
    except FileNotFoundError:  # a kernel without namespaces, which has one network
        network = 0
    return f"{boot}/{network}"


def split_address(address: str) -> tuple[str, int]:
    """Split ``"host:port"`` or ``"[v6]:port"``."""
    host, colon, port = address.rpartition(":")
    if not colon or not (port.isascii() and port.isdigit()) or int(port) > 65535:
        raise ConfigError(f"address {address!r} is not host:port, as 10.0.0.5:7000 or [::1]:7000")
    if ":" in host and not (host.startswith("[") and host.endswith("]")):
        raise ConfigError(f"address {address!r}: write an IPv6 host in brackets, as [::1]:7000")
    return host.strip("[]"), int(port)


def join_address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def bind_to_interface(sock: socket.socket, config: Config) -> None:
    """Make a socket use the configured network interface only."""
    if config.interface is None:
        return
    try:
        sock.setsockopt(
            socket.SOL_SOCKET, socket.SO_BINDTODEVICE, config.interface.encode() + b"\0"
        )
    except OSError as error:
        known = ", ".join(name for _, name in socket.if_nameindex())
        raise ConfigError(
            f"interface {config.interface!r}: {error.strerror}; this host has {known}"
        ) from error


def dial(address: str, config: Config, deadline: Deadline) -> socket.socket:
    """Connect to an agent's address.

    Raises
    ------
    HandshakeError
        Nobody answers there.
    """
    host, port = split_address(address)
    problem = "no address found"
    try:
        candidates = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise HandshakeError(f"cannot resolve {host!r}: {error.strerror}") from error
    for family, kind, proto, _, target in candidates:
        sock = closed_on_fork(socket.socket(family, kind, proto))
        try:
            bind_to_interface(sock, config)
            sock.settimeout(deadline.remaining())
            sock.connect(target)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        except OSError as error:
            sock.close()
            problem = error.strerror or str(error)
        else:
            return sock
    raise HandshakeError(f"cannot connect to {address}: {problem}; is the agent running there?")
