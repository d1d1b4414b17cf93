"""The connection over which the two sides of a benchmark agree; the data take agents' own way.

JSON frames as in the handshake of agents, with the same proof of the shared secret, and all of them
under TLS where agents have certificates.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import secrets
import select
import socket
import threading
from collections.abc import Iterator
from typing import Any

from kvxfer import tls
from kvxfer._terminal import printable
from kvxfer.bench.case import BenchError
from kvxfer.config import Config
from kvxfer.errors import HandshakeError
from kvxfer.handshake import (
    Deadline,
    Frame,
    Transcript,
    bind_to_interface,
    closed_on_fork,
    dial,
    join_address,
    recv_frame,
    send_frame,
    split_address,
)

PROTOCOL = 1
INTRODUCTION = "this is kvxfer bench"  # to whoever expects something else here
ANSWER_TIMEOUT = 60.0
_HELLO_TIMEOUT = 5.0


class Channel:
    """One side's end."""

    def __init__(self, sock: socket.socket, peer: str) -> None:
        self._sock = sock
        self.peer = peer
        _keep_alive(sock)

    @property
    def local_host(self) -> str:
        """The address by which the other side reaches this one."""
        return str(self._sock.getsockname()[0])

    def remote(self, port: int) -> tuple[str, int]:
        """Return the host that we are connected to, with another port."""
        return str(self._sock.getpeername()[0]), port

    def send(self, frame: Frame) -> None:
        try:
            send_frame(self._sock, frame, Deadline(ANSWER_TIMEOUT))
        except OSError as error:
            raise self._lost(error) from None

    def receive(self, timeout: float = ANSWER_TIMEOUT) -> Frame:
        """Return the next frame; raise BenchError when none comes, or when it says what failed."""
        try:
            frame = recv_frame(self._sock, Deadline(timeout))
        except HandshakeError as error:
            raise self._lost(error) from None
        except TimeoutError:
            raise BenchError(f"{self.peer} has not answered for {timeout:.0f} s") from None
        except OSError as error:
            raise self._lost(error) from None
        if "failed" in frame:
            raise BenchError(f"{self.peer} says: {printable(frame['failed'])}")
        return frame

    def ask(self, do: str, **fields: object) -> Frame:
        self.send({"do": do, **fields})
        return self.receive()

    def wait(self) -> Frame | None:
        """Return the next frame, however long it takes; None when the other side has ended."""
        readable = select.poll()
        try:
            readable.register(self._sock, select.POLLIN)
            readable.poll()
            return recv_frame(self._sock, Deadline(ANSWER_TIMEOUT))
        except (HandshakeError, OSError, ValueError):
            return None  # it has ended, or was shut here

    def shut(self) -> None:
        """Wake whoever waits, here and there. From any thread."""
        with contextlib.suppress(OSError):  # it has ended already
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._sock.close()

    def _lost(self, error: Exception) -> BenchError:
        return BenchError(
            f"the connection to {self.peer} has ended ({error}); is it still running?"
        )


def connect(address: str, config: Config) -> Channel:
    """Connect to ``kvxfer bench serve``."""
    try:
        deadline = Deadline(_HELLO_TIMEOUT)
        sock = dial(address, config, deadline)
    except HandshakeError as error:
        raise BenchError(
            f"{str(error).partition(';')[0]}; is `kvxfer bench serve` running there?"
        ) from None
    try:
        sock = tls.connect(sock, split_address(address)[0], config, deadline)
        hello = {"kind": "kvxfer bench", "protocol": PROTOCOL, "nonce": secrets.token_hex(16)}
        send_frame(sock, hello, deadline)
        reply = recv_frame(sock, deadline)
        transcript = Transcript(config.secret, hello, reply)
        transcript.check("serving side", reply)
        send_frame(sock, {"proof": transcript.proof("running side")}, deadline)
        recv_frame(sock, deadline)
    except (HandshakeError, OSError) as error:
        sock.close()
        raise BenchError(f"{address} does not let us in: {error}") from None
    return Channel(sock, address)


def admit(sock: socket.socket, config: Config) -> Channel | None:
    """Answer whoever has connected; None, and the socket closed, where that is no benchmark."""
    peer = join_address(*sock.getpeername()[:2])
    try:
        deadline = Deadline(_HELLO_TIMEOUT)
        sock = tls.accept(sock, config, deadline)
        hello = recv_frame(sock, deadline)
        if hello.get("kind") != "kvxfer bench" or hello.get("protocol") != PROTOCOL:
            told = f"{INTRODUCTION}, protocol {PROTOCOL}; the other side needs the same"
            send_frame(sock, {"error": told}, deadline)
            sock.close()
            return None
        reply: dict[str, Any] = {"nonce": secrets.token_hex(16)}
        transcript = Transcript(config.secret, hello, reply)
        send_frame(sock, {**reply, "proof": transcript.proof("serving side")}, deadline)
        transcript.check("running side", recv_frame(sock, deadline))
        send_frame(sock, {}, deadline)
    except (HandshakeError, OSError):
        sock.close()
        return None
    return Channel(sock, peer)


def refuse(sock: socket.socket, config: Config, reason: str) -> None:
    """Say why not, and close."""
    with contextlib.suppress(HandshakeError, OSError):  # nobody there to be told
        deadline = Deadline(_HELLO_TIMEOUT)
        with tls.accept(sock, config, deadline) as secured:
            recv_frame(secured, deadline)
            send_frame(secured, {"error": reason}, deadline)


def listen(address: str, config: Config) -> socket.socket:
    """Return a listening socket; raise BenchError that says why there is none."""
    host, port = split_address(address)
    if not is_loopback(host) and config.secret is None and not config.insecure:
        raise BenchError(
            f"listening on {address} without a shared secret would let anybody who can reach it "
            "make this process work: set the same KVXFER_SECRET on both sides, or KVXFER_INSECURE=1"
        )
    problem = "no such address"
    try:
        found = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
    except OSError as error:
        raise BenchError(f"cannot listen on {address}: {error.strerror}") from None
    for family, kind, proto, _, target in found[:1]:
        sock = closed_on_fork(socket.socket(family, kind, proto))
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bind_to_interface(sock, config)
            sock.bind(target)
            sock.listen(16)
        except OSError as error:
            sock.close()
            problem = error.strerror or str(error)
            if error.errno == errno.EADDRINUSE:
                problem += "; choose another port, or 0 for any that is free"
        else:
            return sock
    raise BenchError(f"cannot listen on {address}: {problem}")


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


@contextlib.contextmanager
def shut_on_exit(channels: set[Channel], channel: Channel, lock: threading.Lock) -> Iterator[None]:
    """Have `channel` among those that an interrupted server shuts, for as long as it is used."""
    with lock:
        channels.add(channel)
    try:
        yield
    finally:
        with lock:
            channels.discard(channel)
        channel.close()


def _keep_alive(sock: socket.socket) -> None:
    # A host that vanishes without a word is noticed after about half a minute.
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 10)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 4)
