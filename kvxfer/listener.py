"""The producer's side of the handshake: a listening address, and a thread that answers at it."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import os
import secrets
import selectors
import socket
import threading
import time
from dataclasses import dataclass, field

from kvxfer import _core, tls
from kvxfer.config import Config
from kvxfer.connector import allowed_transports
from kvxfer.errors import ConfigError, Error, HandshakeError, ResourceError, Status
from kvxfer.fabrics import NAMES, Fabrics
from kvxfer.handshake import (
    PROTOCOL,
    Deadline,
    Frame,
    Identity,
    Transcript,
    bind_to_interface,
    closed_on_fork,
    endpoint_frame,
    error_frame,
    host_identity,
    join_address,
    problem_frame,
    recv_endpoint,
    recv_frame,
    send_frame,
    session_token,
    split_address,
)

# Connections at once; more are turned away, so that nobody can fill the process with threads.
_MAX_HANDSHAKES = 256
# Of these, consumers, whose handshake ends when their data connections have come: so there must be
# room for those.
_MAX_CONSUMERS = 192
_PATIENCE = 0.2  # seconds that a connection waits for its turn
_MAX_STREAMS = 64
_MAX_ARENA = 1 << 46  # bytes; more than any address space here


@dataclass
class _Session:
    """A consumer that has proved itself and is opening its further connections."""

    peer: Identity
    key: bytes
    why: str
    streams: dict[int, socket.socket] = field(default_factory=dict)
    claimed: set[int] = field(default_factory=set)  # streams that have come
    expected: int = 0
    complete: threading.Event = field(default_factory=threading.Event)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class Listener:
    """Accepts consumers for one agent.

    Parameters
    ----------
    core, identity, config, fabrics
        Of the agent.
    listen
        ``"host:port"``; port 0 picks a free one.
    """

    def __init__(
        self,
        core: _core.Agent,
        identity: Identity,
        config: Config,
        fabrics: Fabrics,
        listen: str,
    ) -> None:
        host, port = split_address(listen)
        if not _is_loopback(host) and config.secret is None and not config.insecure:
            raise ConfigError(
                f"listening on {listen} without a shared secret would let anybody who can reach it "
                "read KV caches: set secret= (KVXFER_SECRET) on all agents, listen on 127.0.0.1, "
                "or say insecure=True"
            )
        self._core, self._identity, self._config = core, identity, config
        self._fabrics = fabrics
        self._sessions: dict[str, _Session] = {}
        self._lock = threading.Lock()
        self._slots = threading.Semaphore(_MAX_HANDSHAKES)
        self._consumers = threading.Semaphore(_MAX_CONSUMERS)
        self._tcp = self._bind(host, port)
        try:
            bound = self._tcp.getsockname()[1]
            self.address = join_address(self._public_host(host), bound)
            self._socket_name = f"kvxfer-{os.getpid()}-{secrets.token_hex(8)}"
            self._unix = closed_on_fork(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            self._unix.bind("\0" + self._socket_name)
            self._unix.listen(128)
            self._wake_read, self._wake_write = map(closed_on_fork, socket.socketpair())
        except BaseException:
            self._tcp.close()
            raise
        self._thread = threading.Thread(target=self._accept, name="kvxfer-listen", daemon=True)
        self._thread.start()

    def _bind(self, host: str, port: int) -> socket.socket:
        try:
            family, kind, proto, _, target = socket.getaddrinfo(
                host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )[0]
            sock = closed_on_fork(socket.socket(family, kind, proto))
        except OSError as error:
            raise ConfigError(f"cannot listen on {host!r}: {error.strerror}") from error
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bind_to_interface(sock, self._config)
            sock.bind(target)
            sock.listen(128)
        except OSError as error:
            sock.close()
            raise ResourceError(
                f"cannot listen on {join_address(host, port)}: {error.strerror}"
            ) from error
        except BaseException:
            sock.close()
            raise
        return sock

    def _public_host(self, host: str) -> str:
        if self._config.advertise is not None:
            return self._config.advertise
        return socket.gethostname() if host in ("", "0.0.0.0", "::") else host

    def close(self) -> None:
        """Stop listening. Handshakes under way end by their deadlines."""
        self._wake_write.close()
        if threading.current_thread() is not self._thread:
            self._thread.join(self._config.handshake_timeout)
        for sock in (self._tcp, self._unix, self._wake_read):
            sock.close()

    def _accept(self) -> None:
        with selectors.DefaultSelector() as selector:
            for sock in (self._tcp, self._unix, self._wake_read):
                sock.setblocking(False)
                selector.register(sock, selectors.EVENT_READ)
            while True:
                for key, _ in selector.select():
                    if key.fileobj is self._wake_read:
                        return
                    assert isinstance(key.fileobj, socket.socket)
                    self._take(key.fileobj)

    def _take(self, listening: socket.socket) -> None:
        try:
            connection, _ = listening.accept()
        except OSError as error:
            # It has gone again; or no descriptors are left, and it keeps waiting.
            if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                time.sleep(_PATIENCE)
            return
        closed_on_fork(connection)
        if not self._slots.acquire(timeout=_PATIENCE):
            connection.close()
            return
        serve = threading.Thread(
            target=self._serve, args=(connection,), name="kvxfer-handshake", daemon=True
        )
        try:
            serve.start()
        except RuntimeError:  # no more threads
            self._slots.release()
            connection.close()

    def _serve(self, connection: socket.socket) -> None:
        deadline = Deadline(self._config.handshake_timeout)
        try:
            with connection, self._secured(connection, deadline) as secured:
                try:
                    self._answer(secured, deadline)
                except HandshakeError as error:
                    send_frame(secured, error_frame(error), deadline)
                except Error as error:
                    send_frame(secured, error_frame(HandshakeError(str(error))), deadline)
        except (OSError, ConfigError, KeyError, TypeError, ValueError, OverflowError):
            # A stranger, or a peer that went away: it is told by the closed connection.
            pass
        finally:
            self._slots.release()

    def _secured(self, connection: socket.socket, deadline: Deadline) -> socket.socket:
        if connection.family == socket.AF_UNIX:  # which does not leave the host
            return connection
        return tls.accept(connection, self._config, deadline)

    def _answer(self, connection: socket.socket, deadline: Deadline) -> None:
        hello = recv_frame(connection, deadline)
        if connection.family == socket.AF_UNIX:
            self._take_shm(connection, hello, deadline)
        elif hello["kind"] == "data":
            self._take_stream(connection, hello, deadline)
        elif hello["kind"] == "peer":
            if not self._consumers.acquire(blocking=False):
                raise HandshakeError(
                    f"agent {self._identity.name!r} is busy: {_MAX_CONSUMERS} consumers are "
                    "connecting at this moment; try again",
                    Status.BUSY,
                )
            try:
                self._take_peer(connection, hello, deadline)
            finally:
                self._consumers.release()

    def _take_peer(self, connection: socket.socket, hello: Frame, deadline: Deadline) -> None:
        if hello["kvxfer"] != PROTOCOL:
            raise HandshakeError(f"this side speaks handshake {PROTOCOL}, not {hello['kvxfer']}")
        reply: Frame = {"kvxfer": PROTOCOL, **self._identity.frame(), "nonce": os.urandom(16).hex()}
        transcript = Transcript(self._config.secret, hello, reply)
        send_frame(connection, {**reply, "proof": transcript.proof("producer")}, deadline)
        transcript.check("consumer", recv_frame(connection, deadline))
        transport, why = self._choose(hello)
        name = secrets.token_hex(16)
        session = _Session(Identity.of(hello), transcript.session_key(), why)
        session.expected = int(hello["streams"])
        if not 1 <= session.expected <= _MAX_STREAMS:
            raise HandshakeError(
                f"{session.expected} data streams were asked for, 1 to {_MAX_STREAMS} can be had"
            )
        fallback = "tcp" in hello["transports"] and "tcp" in allowed_transports(self._config)
        chosen: Frame = {"transport": transport, "why": why, "session": name}
        chosen["socket"], chosen["fallback"] = self._socket_name, fallback
        with self._lock:
            self._sessions[name] = session
        try:
            send_frame(connection, chosen, deadline)
            if transport in NAMES:
                rdma = self._has_to_be_rdma(hello)
                problem = self._attach_fabric(transport, connection, session, deadline, rdma=rdma)
                if problem is None or not fallback:
                    return
                transport, session.why = "tcp", f"{transport} cannot be: {problem}"
            if not session.complete.wait(deadline.remaining()):
                return
            if transport == "tcp":
                try:
                    tls.leave(connection, deadline)
                    self._attach_tcp(connection, session)
                except Error:
                    # Closing, most likely. The consumer's core has the link already: a frame of the
                    # handshake would make no sense to it, the end of the connection does.
                    return
        finally:
            with self._lock:
                self._sessions.pop(name, None)
                for stream in session.streams.values():
                    stream.close()

    def _has_to_be_rdma(self, hello: Frame) -> bool:
        """Return whether ucx, if it is taken, has to be RDMA."""
        return bool(hello.get("rdma", True)) or self._config.require is not None

    def _choose(self, hello: Frame) -> tuple[str, str]:
        theirs = [str(name) for name in hello["transports"]]
        ours = allowed_transports(self._config)
        same_host = hello["host"] == host_identity()
        common = [name for name in ours if name in theirs]
        if "shm" in common and same_host:
            return "shm", "both agents run on one host"
        without = [
            f"{name} for the consumer: {hello[f'no_{name}']}"
            for name in NAMES
            if f"no_{name}" in hello
        ]
        rdma = self._has_to_be_rdma(hello)
        for name in [name for name in ours if name in NAMES]:
            if name == "ucx" and (name not in common or "verbs" in common):
                continue  # not wanted, so not loaded
            if (problem := self._fabrics.problem(name, rdma=rdma)) is not None:
                ours.remove(name)
                common = [other for other in common if other != name]
                without.append(f"{name} for the producer: {problem}")
        apart = "the agents run on different hosts, or in containers that share no network"
        if "verbs" in common:
            if "shm" in common:
                return "verbs", f"{apart}, and both have RDMA adapters"
            set_to = "both agents are" if theirs == ours == ["verbs"] else "one of the agents is"
            return "verbs", f"{set_to} set to verbs"
        if "ucx" in common:
            if rdma:
                return "ucx", "RDMA is required, and verbs reaches no adapter that UCX does"
            set_to = "both agents are" if theirs == ours == ["ucx"] else "one of the agents is"
            return "ucx", f"{set_to} set to ucx"
        reason = "".join(f"; no {name}" for name in without)
        if "tcp" in common:
            if "shm" in common:
                return "tcp", apart + reason
            set_to = "both agents are" if theirs == ours == ["tcp"] else "one of the agents is"
            return "tcp", f"{set_to} set to tcp"
        raise HandshakeError(
            f"no transport in common: the consumer allows {', '.join(theirs)}, the producer "
            f"{', '.join(ours) or 'none'}{'' if same_host else ', and they are not on one host'}"
            f"{reason}"
        )

    def _session(self, hello: Frame, purpose: str) -> _Session:
        with self._lock:
            session = self._sessions.get(str(hello["session"]))
        if session is None or not secrets.compare_digest(
            str(hello["token"]).encode(), session_token(session.key, purpose).encode()
        ):
            raise HandshakeError(
                "the session of this connection is not known, or its token is wrong"
            )
        return session

    def _take_shm(self, connection: socket.socket, hello: Frame, deadline: Deadline) -> None:
        session = self._session(hello, "shm")
        connection.settimeout(deadline.remaining())
        _, descriptors, _, _ = socket.recv_fds(connection, 1, 1, socket.MSG_CMSG_CLOEXEC)
        if len(descriptors) != 1:
            raise HandshakeError("the consumer sent no arena")
        # A socket object would refuse a memfd: this only owns the descriptor.
        arena = os.fdopen(descriptors[0], "rb", buffering=0)
        with arena:
            self._attach_shm(
                connection, session, arena.fileno(), int(hello["arena_bytes"]), deadline
            )

    def _attach_shm(
        self,
        connection: socket.socket,
        session: _Session,
        arena_fd: int,
        arena_bytes: int,
        deadline: Deadline,
    ) -> None:
        if not 0 < arena_bytes < _MAX_ARENA:
            raise HandshakeError(f"an arena of {arena_bytes} bytes cannot be mapped")
        peer = self._core.add_peer(session.peer.name)
        try:
            send_frame(connection, {"ok": True}, deadline)
            handed_over = os.dup(arena_fd)  # may fail: before the socket has no owner but the core
            self._core.attach_shm(
                peer=peer,
                control_fd=connection.detach(),
                arena_fd=handed_over,
                arena_bytes=arena_bytes,
                incarnation=session.peer.incarnation,
                inbound=True,
                why=session.why,
            )
        except BaseException:
            self._core.fail_peer(peer, "UNREACHABLE", "the handshake failed")
            raise
        session.complete.set()

    def _take_stream(self, connection: socket.socket, hello: Frame, deadline: Deadline) -> None:
        index = int(hello["index"])
        session = self._session(hello, f"data{index}")
        if not 0 <= index < session.expected:
            raise HandshakeError(f"data stream {index} was not expected")
        with self._lock:
            if index in session.claimed:
                raise HandshakeError(f"data stream {index} came twice")
            session.claimed.add(index)
        send_frame(connection, {"ok": True}, deadline)
        tls.leave(connection, deadline)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with self._lock:
            session.streams[index] = closed_on_fork(socket.socket(fileno=connection.detach()))
            if len(session.streams) == session.expected:
                session.complete.set()

    def _attach_fabric(
        self,
        transport: str,
        connection: socket.socket,
        session: _Session,
        deadline: Deadline,
        *,
        rdma: bool,
    ) -> str | None:
        """Connect the adapters and hand the link over; return what the problem is, if any."""
        remote, said = recv_endpoint(connection, deadline)
        if said is not None:
            return said
        try:
            with contextlib.closing(
                self._fabrics.endpoint(transport, with_arena=False, rdma=rdma)
            ) as endpoint:
                # Before the consumer: once that has connected, there is no way back to TCP.
                link = endpoint.connect(control_fd=os.dup(connection.fileno()), remote=remote)
                address = endpoint.address
        except Error as error:
            problem = f"the producer: {error}"
            send_frame(connection, problem_frame(problem), deadline)
            return problem
        send_frame(connection, endpoint_frame(address), deadline)
        answer = recv_frame(connection, deadline)
        if "problem" in answer:
            return str(answer["problem"])
        tls.leave(connection, deadline)
        peer = self._core.add_peer(session.peer.name)
        try:
            self._core.attach(
                peer=peer,
                link=link,
                incarnation=session.peer.incarnation,
                inbound=True,
                why=session.why,
            )
        except Error:
            # Closing, most likely. As below: only the end of the connection makes sense now.
            self._core.fail_peer(peer, "UNREACHABLE", "the handshake failed")
        return None

    def _attach_tcp(self, connection: socket.socket, session: _Session) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        peer = self._core.add_peer(session.peer.name)
        with self._lock:
            streams = [session.streams.pop(index) for index in range(session.expected)]
        try:
            self._core.attach_tcp(
                peer=peer,
                control_fd=connection.detach(),
                data_fds=[stream.detach() for stream in streams],
                incarnation=session.peer.incarnation,
                inbound=True,
                why=session.why,
            )
        except BaseException:
            self._core.fail_peer(peer, "UNREACHABLE", "the handshake failed")
            raise
