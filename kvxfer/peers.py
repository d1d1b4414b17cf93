"""The producers that an agent is connected to."""

from __future__ import annotations

import threading
import weakref

from kvxfer import _core
from kvxfer.config import Config
from kvxfer.connector import connect
from kvxfer.errors import ClosedError, HandshakeError, ResourceError, Status
from kvxfer.fabrics import Fabrics
from kvxfer.handshake import Identity
from kvxfer.ticket import AgentRef

LOOPBACK = "loopback:"

# Agents of this process that consumers can reach by loopback, by address.
_listening: weakref.WeakValueDictionary[str, Peers] = weakref.WeakValueDictionary()


class Peer:
    """A producer that an agent is connected, or being connected, to."""

    def __init__(self, core_id: int) -> None:
        self.id = core_id
        self.identity: Identity | None = None
        self.rdma = False
        self.failure: HandshakeError | None = None
        self.settled = threading.Event()


class Peers:
    """Finds or makes the connection to a producer.

    Parameters
    ----------
    core, identity, config, fabrics
        Of the agent.
    lock
        The agent's: held by callers of `get` until what they start on the peer is in the core.
    """

    def __init__(
        self,
        core: _core.Agent,
        identity: Identity,
        config: Config,
        fabrics: Fabrics,
        lock: threading.Lock,
    ) -> None:
        self._core, self._identity, self._config, self._lock = core, identity, config, lock
        self._fabrics = fabrics
        # By address and name, and whether it has to be RDMA, by what connections require.
        self._connected: dict[tuple[str, str, str | None], Peer] = {}
        self._dialling: dict[tuple[AgentRef, str | None], Peer] = {}

    def listen(self) -> str:
        """Let agents of this process connect by loopback; return the address."""
        address = f"{LOOPBACK}{self._identity.incarnation:016x}"
        _listening[address] = self
        return address

    def get(self, agent: AgentRef, require: str | None = None) -> Peer:
        """Return the connection to an agent, which may have just been begun. Needs the lock.

        `require` as in `Config`, for this connection.
        """
        agent = AgentRef(name=agent.name, address=agent.address, incarnation=agent.incarnation)
        require = require or self._config.require
        connected = self.find(agent, require)
        if connected is not None:
            return connected
        # Not connected; or this is an older ticket, or one from after a restart of which the news
        # has not arrived yet: ask who is there. A connection that works is kept until then.
        dialling = self._dialling.get((agent, require))
        if dialling is not None and self._core.peer_alive(dialling.id):
            return dialling
        peer = Peer(self._core.add_peer(agent.name))
        try:
            threading.Thread(
                target=self._connect,
                args=(agent, peer, require),
                name="kvxfer-connect",
                daemon=True,
            ).start()
        except RuntimeError as error:
            message = f"connecting to {agent.name!r}: {error}; check the limit on threads"
            self._core.fail_peer(peer.id, Status.NO_RESOURCES.value, message)
            raise ResourceError(message) from error
        # Its thread ends by taking the lock, which our caller holds.
        self._dialling[agent, require] = peer
        return peer

    def find(self, agent: AgentRef, require: str | None = None) -> Peer | None:
        """Return the connection to an agent if there is one. Needs the lock."""
        for kind in (require, "rdma" if require is None else None):
            peer = self._connected.get((agent.address, agent.name, kind))
            if peer is None or not self._core.peer_alive(peer.id):
                continue
            if require is not None and not peer.rdma:
                continue
            assert peer.identity is not None
            if agent.incarnation in (None, peer.identity.incarnation):
                return peer
        return None

    def attach_loopback(self, producer: Peers, faults: _core.LoopbackFaults) -> None:
        """Connect to an agent of this process over a link on which these things go wrong."""
        identity = producer._identity  # noqa: SLF001 - of this class
        peer = Peer(self._core.add_peer(identity.name))
        self._attach_loopback(producer, peer, faults)
        peer.settled.set()
        with self._lock:
            self._connected[producer.listen(), identity.name, None] = peer

    def _connect(self, agent: AgentRef, peer: Peer, require: str | None) -> None:
        try:
            if agent.address.startswith(LOOPBACK):
                if require is not None:
                    raise HandshakeError(f"require={require!r} contradicts loopback")
                self._connect_loopback(agent, peer)
            else:
                connection = connect(
                    self._core,
                    peer.id,
                    self._identity,
                    self._config.replace(require=require),
                    self._fabrics,
                    agent.address,
                    agent.name,
                    agent.incarnation,
                )
                peer.identity, peer.rdma = connection.identity, connection.rdma
        except HandshakeError as error:
            # Not that one itself: its traceback would keep what was being made alive.
            peer.failure = HandshakeError(str(error), error.status)
        except Exception as error:  # noqa: BLE001 - whatever it was, those who wait must hear of it
            peer.failure = HandshakeError(f"connecting to {agent.name!r}: {error}")
        try:
            # With the lock a fetch that was given this peer is in the core before it fails there.
            with self._lock:
                if self._dialling.get((agent, require)) is peer:
                    del self._dialling[agent, require]
                if peer.failure is None:
                    self._forget_lost()
                    key = (agent.address, agent.name, require)
                    # Two may have been dialled at once, for tickets with and without incarnation.
                    before = self._connected.get(key)
                    if before is not None:
                        self._core.retire_peer(before.id)
                    self._connected[key] = peer
                else:
                    self._fail(peer, peer.failure)
        finally:
            peer.settled.set()

    def _forget_lost(self) -> None:
        for key, peer in list(self._connected.items()):
            if not self._core.peer_alive(peer.id):
                del self._connected[key]

    def _connect_loopback(self, agent: AgentRef, peer: Peer) -> None:
        producer = _listening.get(agent.address)
        if producer is None or producer._identity.name != agent.name:  # noqa: SLF001
            raise HandshakeError(
                f"agent {agent.name!r} at {agent.address} is not in this process, which loopback "
                "is for; if it has restarted, ask for a new ticket",
                Status.STALE,
            )
        self._attach_loopback(producer, peer, _core.LoopbackFaults())

    def _attach_loopback(self, producer: Peers, peer: Peer, faults: _core.LoopbackFaults) -> None:
        other = producer._core  # noqa: SLF001
        peer.identity = producer._identity  # noqa: SLF001
        _core.Agent.attach_loopback(
            consumer=self._core,
            consumer_peer=peer.id,
            consumer_incarnation=self._identity.incarnation,
            producer=other,
            producer_peer=other.add_peer(self._identity.name),
            producer_incarnation=peer.identity.incarnation,
            faults=faults,
        )

    def _fail(self, peer: Peer, error: HandshakeError) -> None:
        try:
            self._core.fail_peer(peer.id, error.status.value, str(error))
        except ClosedError:
            pass  # then everything that waited has been told already
