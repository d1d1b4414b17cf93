"""The consumer's side of the handshake: from a producer's address to a link in the core."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import socket

from kvxfer import _core, tls
from kvxfer.config import Config
from kvxfer.errors import Error, HandshakeError, ResourceError, Status
from kvxfer.handshake import (
    PROTOCOL,
    Deadline,
    Frame,
    Identity,
    Transcript,
    closed_on_fork,
    dial,
    endpoint_frame,
    host_identity,
    problem_frame,
    recv_endpoint,
    recv_frame,
    send_frame,
    session_token,
    split_address,
)
from kvxfer.verbs import Adapters

RDMA = ("verbs",)  # what require="rdma" is content with


@dataclasses.dataclass(frozen=True)
class Connection:
    """What a handshake has come to."""

    identity: Identity
    transport: str


def allowed_transports(config: Config) -> list[str]:
    """Return the transports that these settings allow, best first."""
    allowed = ["shm", "verbs", "tcp"] if config.transport == "auto" else [config.transport]
    return [name for name in allowed if config.require is None or name in RDMA]


def offered_transports(config: Config, adapters: Adapters) -> tuple[list[str], str | None]:
    """Return those of them that can be used, and why verbs can't, if it can't."""
    allowed = allowed_transports(config)
    problem = adapters.problem() if "verbs" in allowed else None
    return [name for name in allowed if name != "verbs" or problem is None], problem


def connect(
    core: _core.Agent,
    peer: int,
    identity: Identity,
    config: Config,
    adapters: Adapters,
    address: str,
    name: str,
    incarnation: int | None,
) -> Connection:
    """Connect to the agent `name` at `address` and hand the link to the core as `peer`.

    Returns
    -------
    Connection
        With the agent that answered.

    Raises
    ------
    HandshakeError
        It cannot be reached, is another agent or incarnation, or refuses us.
    """
    deadline = Deadline(config.handshake_timeout)
    try:
        with _dial(address, config, deadline) as sock:
            return _converse(
                core, peer, identity, config, adapters, address, name, incarnation, sock, deadline
            )
    except TimeoutError:
        raise HandshakeError(
            f"agent {name!r} at {address} did not finish the handshake within "
            f"{config.handshake_timeout} s"
        ) from None
    except HandshakeError as error:
        if repr(name) in str(error):
            raise
        raise HandshakeError(f"{name!r} at {address}: {error}", error.status) from error
    except ResourceError as error:
        raise HandshakeError(str(error), Status.NO_RESOURCES) from error
    except Error as error:
        raise HandshakeError(f"connecting to {name!r}: {error}") from error
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise HandshakeError(f"{address} answered with a malformed frame: {error!r}") from error
    except OSError as error:
        raise HandshakeError(f"lost {name!r} at {address} during the handshake: {error}") from error


def _dial(address: str, config: Config, deadline: Deadline) -> socket.socket:
    with contextlib.ExitStack() as failing:
        sock = failing.enter_context(dial(address, config, deadline))
        secured = tls.connect(sock, split_address(address)[0], config, deadline)
        failing.pop_all()
    return secured


def _converse(
    core: _core.Agent,
    peer: int,
    identity: Identity,
    config: Config,
    adapters: Adapters,
    address: str,
    name: str,
    incarnation: int | None,
    sock: socket.socket,
    deadline: Deadline,
) -> Connection:
    offered, no_verbs = offered_transports(config, adapters)
    if not offered:
        asked = f"require={config.require!r}" if config.require else "transport 'verbs'"
        raise HandshakeError(f"{asked} cannot be had here: {no_verbs}", Status.NO_RESOURCES)
    hello: Frame = {
        "kvxfer": PROTOCOL,
        "kind": "peer",
        **identity.frame(),
        "nonce": os.urandom(16).hex(),
        "host": host_identity(),
        "transports": offered,
        "streams": config.tcp_streams,
    }
    if no_verbs is not None:
        hello["no_verbs"] = str(problem_frame(no_verbs)["problem"])
    send_frame(sock, hello, deadline)
    reply = recv_frame(sock, deadline)
    if reply["kvxfer"] != PROTOCOL:
        raise HandshakeError(f"{address} speaks handshake {reply['kvxfer']}, this side {PROTOCOL}")
    transcript = Transcript(config.secret, hello, reply)
    transcript.check("producer", reply)
    found = Identity.of(reply)
    if found.name != name:
        raise HandshakeError(f"{address} is agent {found.name!r}, not {name!r}", Status.STALE)
    if incarnation is not None and found.incarnation != incarnation:
        raise HandshakeError(
            f"agent {name!r} has restarted since the ticket was issued (incarnation "
            f"{incarnation:016x} then, {found.incarnation:016x} now): its offers are gone, "
            "ask for a new ticket",
            Status.STALE,
        )
    send_frame(sock, {"proof": transcript.proof("consumer")}, deadline)
    chosen = recv_frame(sock, deadline)
    key = transcript.session_key()
    session, why = str(chosen["session"]), str(chosen["why"])
    transport = str(chosen["transport"])
    if transport == "verbs":
        link = _open_verbs(adapters, sock, deadline)
        if not isinstance(link, str):
            core.attach_verbs(
                peer=peer, link=link, incarnation=found.incarnation, inbound=False, why=why
            )
            return Connection(found, "verbs")
        if not chosen["fallback"]:
            raise HandshakeError(f"verbs was asked for, but: {link}")
        transport, why = "tcp", f"verbs cannot be: {link}"
    if transport == "shm":
        control = _open_shm(core, str(chosen["socket"]), session, key, deadline)
        core.attach_shm(
            peer=peer,
            control_fd=control.detach(),
            arena_fd=-1,
            arena_bytes=0,
            incarnation=found.incarnation,
            inbound=False,
            why=why,
        )
    elif transport == "tcp":
        streams = _open_streams(address, config, session, key, deadline)
        tls.leave(sock, deadline)
        core.attach_tcp(
            peer=peer,
            control_fd=sock.detach(),
            data_fds=[stream.detach() for stream in streams],
            incarnation=found.incarnation,
            inbound=False,
            why=why,
        )
    else:
        raise HandshakeError(f"{address} chose {transport!r:.80}, which is not known here")
    return Connection(found, transport)


def _open_verbs(
    adapters: Adapters, sock: socket.socket, deadline: Deadline
) -> _core.VerbsLink | str:
    """Return the link, which has a descriptor of `sock` of its own, or what its problem is."""
    try:
        endpoint = adapters.endpoint(with_arena=True)
    except Error as error:
        problem = f"the consumer: {error}"
        send_frame(sock, problem_frame(problem), deadline)
        return problem
    with contextlib.closing(endpoint):
        send_frame(sock, endpoint_frame(endpoint.address), deadline)
        remote, said = recv_endpoint(sock, deadline)
        if said is not None:
            return said
        try:
            link = endpoint.connect(control_fd=os.dup(sock.fileno()), remote=remote)
        except Error as error:
            problem = f"the consumer: {error}"
            send_frame(sock, problem_frame(problem), deadline)
            return problem
    send_frame(sock, {"connected": True}, deadline)
    tls.leave(sock, deadline)
    return link


def _open_shm(
    core: _core.Agent, name: str, session: str, key: bytes, deadline: Deadline
) -> socket.socket:
    arena = core.arena_fd()
    sock = closed_on_fork(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
    try:
        sock.settimeout(deadline.remaining())
        sock.connect("\0" + name)
        hello: Frame = {"kind": "shm", "session": session, "token": session_token(key, "shm")}
        hello["arena_bytes"] = core.arena_bytes()
        send_frame(sock, hello, deadline)
        socket.send_fds(sock, [b"a"], [arena])
        recv_frame(sock, deadline)
    except BaseException:
        sock.close()
        raise
    return sock


def _open_streams(
    address: str, config: Config, session: str, key: bytes, deadline: Deadline
) -> list[socket.socket]:
    streams: list[socket.socket] = []
    try:
        for index in range(config.tcp_streams):
            stream = _dial(address, config, deadline)
            streams.append(stream)
            purpose = f"data{index}"
            hello: Frame = {"kind": "data", "session": session, "index": index}
            hello["token"] = session_token(key, purpose)
            send_frame(stream, hello, deadline)
        for stream in streams:
            recv_frame(stream, deadline)
            tls.leave(stream, deadline)
    except BaseException:
        for stream in streams:
            stream.close()
        raise
    return streams
