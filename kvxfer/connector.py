"""The consumer's side of the handshake: from a producer's address to a link in the core."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import socket

from kvxfer import _core, tls
from kvxfer.config import Config
from kvxfer.errors import Error, HandshakeError, ResourceError, Status
from kvxfer.fabrics import NAMES, Fabrics
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


@dataclasses.dataclass(frozen=True)
class Connection:
    """What a handshake has come to."""

    identity: Identity
    rdma: bool


def allowed_transports(config: Config) -> list[str]:
    """Return the transports that these settings allow, best first."""
    allowed = ["shm", *NAMES, "tcp"] if config.transport == "auto" else [config.transport]
    if config.require == "gpudirect-rdma":
        return [name for name in allowed if name == "verbs"]
    return [name for name in allowed if config.require is None or name in NAMES]


def means_rdma(config: Config) -> bool:
    """Return whether ucx is to be RDMA with these settings: it is, unless asked for by name."""
    return config.transport != "ucx" or config.require is not None


def offered_transports(config: Config, fabrics: Fabrics) -> tuple[list[str], dict[str, str]]:
    """Return those of them that can be used, and by name why others can't."""
    offered: list[str] = []
    problems: dict[str, str] = {}
    for name in allowed_transports(config):
        if name == "ucx" and config.transport == "auto" and config.require is None:
            continue  # it is not proven well enough to be taken unasked
        if name == "ucx" and "verbs" in offered:
            continue  # it could do no more
        if name in NAMES:
            problem = fabrics.problem(name, rdma=means_rdma(config))
            if problem is not None:
                problems[name] = problem
                continue
        offered.append(name)
    return offered, problems


def connect(
    core: _core.Agent,
    peer: int,
    identity: Identity,
    config: Config,
    fabrics: Fabrics,
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
                core, peer, identity, config, fabrics, address, name, incarnation, sock, deadline
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
    fabrics: Fabrics,
    address: str,
    name: str,
    incarnation: int | None,
    sock: socket.socket,
    deadline: Deadline,
) -> Connection:
    offered, problems = offered_transports(config, fabrics)
    if not offered:
        asked = (
            f"require={config.require!r}" if config.require else f"transport {config.transport!r}"
        )
        why_not = "; ".join(problems.values())
        raise HandshakeError(f"{asked} cannot be had here: {why_not}", Status.NO_RESOURCES)
    hello: Frame = {
        "kvxfer": PROTOCOL,
        "kind": "peer",
        **identity.frame(),
        "nonce": os.urandom(16).hex(),
        "host": host_identity(),
        "transports": offered,
        "streams": config.tcp_streams,
        "rdma": means_rdma(config),
    }
    for lacking, problem in problems.items():
        hello[f"no_{lacking}"] = str(problem_frame(problem)["problem"])
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
    if transport in NAMES:
        opened = _open_fabric(fabrics, transport, sock, deadline, rdma=means_rdma(config))
        if not isinstance(opened, str):
            link, rdma = opened
            core.attach(peer=peer, link=link, incarnation=found.incarnation, inbound=False, why=why)
            return Connection(found, rdma)
        if not chosen["fallback"]:
            raise HandshakeError(f"{transport} was asked for, but: {opened}")
        transport, why = "tcp", f"{transport} cannot be: {opened}"
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
    return Connection(found, rdma=False)


def _open_fabric(
    fabrics: Fabrics, transport: str, sock: socket.socket, deadline: Deadline, *, rdma: bool
) -> tuple[_core.Link, bool] | str:
    """Return a link and whether it is RDMA, or what the problem is.

    The link has a descriptor of `sock` of its own.
    """
    try:
        endpoint = fabrics.endpoint(transport, with_arena=True, rdma=rdma)
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
        found = link, endpoint.rdma
    send_frame(sock, {"connected": True}, deadline)
    tls.leave(sock, deadline)
    return found


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
