"""The agent: one endpoint of transfers in one process."""

from __future__ import annotations

import atexit
import hashlib
import logging
import os
import secrets
import socket
import threading
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from operator import index
from types import TracebackType
from typing import Any

from kvxfer import _core
from kvxfer._arguments import check_seconds, token_range
from kvxfer._streams import stream_handle
from kvxfer.cache import Cache
from kvxfer.codecs import Codec
from kvxfer.config import Config, check_require
from kvxfer.cover import Part, Ranks, cover
from kvxfer.errors import ClosedError, ConfigError, InvalidError, TicketError, TransferError
from kvxfer.fabrics import Fabrics
from kvxfer.handles import Fetch, Offer
from kvxfer.handshake import Identity, bind_to_interface
from kvxfer.listener import Listener
from kvxfer.peers import LOOPBACK, Peers
from kvxfer.telemetry import FailureTraces, Metrics, metrics_of, write_trace
from kvxfer.ticket import AgentRef, ParsedTicket, Ticket, issue_ticket, parse_ticket

_MAX_NAME = 1024  # bytes that the wire carries

# Every open agent of this process: closed at exit, and told of a fork.
_agents: weakref.WeakSet[Agent] = weakref.WeakSet()
_used_for_good: list[Cache] = []  # of GPUs that were given up


class Agent:
    """One endpoint, which offers and fetches KV caches.

    Parameters
    ----------
    name
        Unique among the agents that meet, and the same after a restart: ``"prefill-0"``.
    listen
        ``"host:port"`` where consumers connect; port 0 picks a free one. None for an agent that
        only fetches. ``"loopback:"`` for agents of one process, with ``transport="loopback"``.
    config
        Settings; `Config()`, which reads the environment, when left out.
    **knobs
        Single settings, as ``secret="..."``; they win over `config`.

    Examples
    --------
    >>> prefill = kvxfer.Agent("prefill-0", listen="127.0.0.1:0")
    >>> cache = prefill.register(kvxfer.Cache({"layer.0": (k, v)}, axes="BHNC"))
    >>> offer = prefill.offer(cache, blocks=[3, 9, 12], num_tokens=700)
    >>> fetch = decode.fetch(offer.ticket, other_cache, blocks=[7, 1, 4])
    >>> fetch.wait()
    """

    def __init__(
        self,
        name: str,
        *,
        listen: str | None = None,
        config: Config | None = None,
        **knobs: Any,  # noqa: ANN401 - any of Config's fields
    ) -> None:
        if not 1 <= len(name.encode()) <= _MAX_NAME:
            raise InvalidError(f"an agent's name must have 1 to {_MAX_NAME} bytes: {name!r:.80}")
        self._config = (config or Config()).replace(**knobs)
        self._identity = Identity(name, secrets.randbits(64))
        # Numbered names must spread too, which the low bits of a CRC don't.
        self._spread = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big")
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._registering = threading.Lock()  # before the other
        self._closed = True  # until all of it is there
        self._listener: Listener | None = None
        self._caches: dict[Cache, int] = {}
        self._handles: weakref.WeakValueDictionary[int, Fetch | Offer] = (
            weakref.WeakValueDictionary()
        )
        self._kept: dict[int, Fetch | Offer] = {}  # have callbacks that were not called yet
        self._ended: list[Fetch | Offer] = []  # for poll to return
        loopback = self._config.transport == "loopback"
        if listen is not None and loopback != listen.startswith(LOOPBACK):
            raise ConfigError(
                f"listen={listen!r} does not go with transport={self._config.transport!r}: "
                "loopback: is for agents of one process with transport='loopback'"
            )
        with socket.socket() as probe:  # says now what the first connection would say
            bind_to_interface(probe, self._config)
        options = self._config.core_options(name, self._identity.incarnation)
        self._core = _core.Agent(options)
        self._fabrics = Fabrics(self._core, self._config)
        self._peers = Peers(self._core, self._identity, self._config, self._fabrics, self._lock)
        try:
            if listen is None:
                self._address: str | None = None
            elif loopback:
                self._address = self._peers.listen()
            else:
                self._listener = Listener(
                    self._core, self._identity, self._config, self._fabrics, listen
                )
                self._address = self._listener.address
        except BaseException:
            self._core.close()
            raise
        folder = self._config.trace_dir
        self._failures = None if folder is None else FailureTraces(folder)
        self._closed = False
        _agents.add(self)

    @property
    def name(self) -> str:
        return self._identity.name

    @property
    def incarnation(self) -> int:
        """A number that is new at each start, by which old tickets are told from new ones."""
        return self._identity.incarnation

    @property
    def config(self) -> Config:
        return self._config

    @property
    def address(self) -> str:
        """Where consumers connect: what tickets name."""
        if self._address is None:
            raise InvalidError(
                f"agent {self.name!r} does not listen, so it cannot offer: make it with "
                "listen='127.0.0.1:0'"
            )
        return self._address

    def reference(
        self, *, layers: Sequence[str] | None = None, heads: tuple[int, int] | None = None
    ) -> AgentRef:
        """Return how a ticket names this agent; `layers` and `heads` when it holds only a slice."""
        return AgentRef(
            name=self.name,
            address=self.address,
            incarnation=self.incarnation,
            layers=None if layers is None else tuple(layers),
            heads=heads,
        )

    def register(self, cache: Cache) -> Cache:
        """Register an engine's cache, once, before offers and fetches name it. Returns it."""
        with self._registering:
            with self._lock:
                self._check_open()
                if cache in self._caches:
                    return cache
            # The first on a GPU loads its runtime: seconds, which nothing else waits for.
            made = self._core.register_cache(cache.layout, cache.on_gpu)
            with self._lock:
                self._caches[cache] = made
        return cache

    def unregister(self, cache: Cache) -> None:
        """Forget a cache, so that its memory may be freed.

        On return it is registered with no adapter any more, which may take seconds where peers use
        the direct path.

        Raises
        ------
        InvalidError
            Offers or fetches still use it, or it is not registered.
        """
        with self._lock:
            cache_id = self._cache_id(cache)
            del self._caches[cache]
        try:
            self._core.unregister_cache(cache_id)
        except BaseException:
            with self._lock:
                self._caches[cache] = cache_id
            raise

    def offer(
        self,
        cache: Cache,
        blocks: Iterable[int],
        num_tokens: int | None = None,
        *,
        id: str | None = None,  # noqa: A002 - the word of the design
        ticket: Ticket | None = None,
        first_token: int = 0,
        lease: float = 30.0,
        consumers: int = 1,
        ready: bool = True,
        stream: object = None,
    ) -> Offer:
        """Offer the KV of one request. Its blocks must not change until the offer is released.

        Parameters
        ----------
        cache
            A registered cache.
        blocks
            Block ids, in the order of the tokens; token `first_token` is in slot 0 of the first.
        num_tokens
            Tokens on offer; the last block may be partly filled.
        id
            Unique among the open offers of this agent, as a request id. Drawn when left out.
        ticket
            From `issue_ticket`, when the ticket was made elsewhere: id, generation and tokens come
            from it.
        lease
            Seconds after which the blocks are released if no consumer was heard from.
        consumers
            Fetches after which the offer has done its duty and is released. It waits for more
            where a consumer tells of more (`ranks` of `fetch`). A decline counts as a fetch.
        ready
            False: the KV is still being computed, and `Offer.mark_ready` tells layer by layer.
        stream
            Of a cache on a GPU: nothing is read before this stream has done what it was told until
            now. Of torch, of CuPy, or the runtime's handle; left out, torch's current stream where
            the tensors are torch's, else the default stream.

        Raises
        ------
        InvalidError
            Blocks out of range or too few, an id in use, a cache that is not registered.
        """
        check_seconds("lease", lease)
        consumers = index(consumers)
        if not 1 <= consumers < 1 << 32:
            raise InvalidError(f"consumers is {consumers}: an offer is for at least one")
        if ticket is None:
            if num_tokens is None:
                raise InvalidError("offer() needs num_tokens, or a ticket that says them")
            # A ticket made here covers all that the cache holds.
            layout = cache.layout
            heads = (layout.first_head, layout.first_head + layout.num_heads)
            ticket = issue_ticket(
                id if id is not None else secrets.token_hex(8),
                [self.reference(heads=heads)],
                num_tokens=num_tokens,
                first_token=first_token,
                model=layout.model,
                secret=self._config.secret,
            )
        parsed = parse_ticket(ticket, self._config.secret)
        with self._lock:
            core = self._core.offer(
                id=parsed.offer_id,
                generation=parsed.generation,
                cache=self._cache_id(cache),
                table=_core.BlockTable(blocks, parsed.first_token, 0),
                num_tokens=parsed.num_tokens,
                lease=lease,
                consumers=consumers,
                ready=ready,
                stream=stream_handle(stream, cache),
            )
            offer = Offer(core, cache, ticket, self._watch)
            self._handles[core.handle] = offer
        return offer

    def fetch(
        self,
        ticket: Ticket,
        cache: Cache,
        blocks: Iterable[int],
        *,
        tokens: slice | None = None,
        first_slot: int | None = None,
        timeout: float = 30.0,
        codec: str | Codec | None = None,
        ranks: Ranks | None = None,
        require: str | None = None,
        stream: object = None,
    ) -> Fetch:
        """Start to fetch the KV of an offer into local blocks; returns at once.

        All layers and kv heads of `cache` are fetched, from whichever agents of the ticket hold
        them. What is in the last block behind the last token is zeroed.

        Parameters
        ----------
        ticket
            From `Offer.ticket` or `issue_ticket`.
        cache
            A registered cache. Its block size, axis order, plane arrangement and element type may
            differ from the producer's; model, planes and head size may not. Floats become this
            cache's floats, divided by its scales; the report counts what did not fit.
        blocks
            Block ids, distinct; more than needed are left alone.
        tokens
            Positions in the request, as ``slice(512, 4096)`` when a prefix is here already. Left
            out: all that are on offer. ``blocks[0]`` is the block of the first of them.
        first_slot
            Slot of the first token in ``blocks[0]``; its position modulo the block size when left
            out, as in a paged cache.
        timeout
            Seconds until the fetch fails with TIMEOUT.
        codec
            Encoding on the wire, as ``"int8"``, ``"auto"`` or `tiered`; `codecs` says which there
            are. Left out, `Config.codec`, which is ``"raw"``: elements as they are.
        ranks
            All ranks of this consumer, where several fetch an offer, each its slice: every producer
            then expects as many fetches as there are ranks that need it. Left out, its offer ends
            after ``offer(consumers=...)``. All ranks pass it, or none.
        require
            ``"rdma"``: fail, with the reason, where it would go by anything else;
            ``"gpudirect-rdma"``: also where it would be staged in host memory instead of being
            written into this GPU's. Left out, `Config.require`.
        stream
            Of a cache on a GPU, as in `offer`: nothing is written before.

        Raises
        ------
        TicketError
            The ticket is damaged, forged, of another version or another model, or its agents don't
            hold all of the cache's layers and heads.
        InvalidError
            Blocks out of range, repeated or too few; tokens not on offer; a cache that is not
            registered; an unknown codec or option; ranks of which the cache is none.
        """
        check_seconds("timeout", timeout)
        if require is not None:
            check_require(require, self._config)
        spec = Codec.parse(self._config.codec if codec is None else codec)
        parsed = parse_ticket(ticket, self._config.secret)
        layout = cache.layout
        if not cache.writable:
            raise InvalidError(f"{cache!r} has read-only tensors: nothing can be fetched into it")
        if parsed.model and layout.model and parsed.model != layout.model:
            raise TicketError(
                f"ticket for offer {parsed.offer_id!r} is for model {parsed.model!r}, the cache is "
                f"of {layout.model!r}"
            )
        begin, end = token_range(tokens, parsed.first_token, parsed.num_tokens)
        slot = begin % layout.block_size if first_slot is None else index(first_slot)
        if not 0 <= slot < layout.block_size:
            raise InvalidError(f"first_slot is {slot}, a block has {layout.block_size} slots")
        table = _core.BlockTable(blocks, begin, slot)
        parts, consumers = self._share(parsed, cache, ranks)
        handle = stream_handle(stream, cache)
        gpudirect_only = (require or self._config.require) == "gpudirect-rdma"
        with self._lock:
            cache_id = self._cache_id(cache)
            # Checks come before the first connection is made.
            table.validate(layout, begin, end, True)

            def start() -> _core.Fetch:
                return self._core.fetch(
                    offer_id=parsed.offer_id,
                    generation=parsed.generation,
                    cache=cache_id,
                    table=table,
                    num_tokens=end - begin,
                    timeout=timeout,
                    parts=[
                        (
                            self._peers.get(parsed.agents[agent], require).id,
                            layers,
                            head,
                            head_end,
                            consumers[agent],
                        )
                        for agent, layers, head, head_end in parts
                    ],
                    codec=spec.core_spec(parsed.first_token + parsed.num_tokens),
                    stream=handle,
                    gpudirect_only=gpudirect_only,
                )

            return self._start(start, cache)

    def decline(
        self, ticket: Ticket, cache: Cache, *, ranks: Ranks | None = None, timeout: float = 30.0
    ) -> Fetch:
        """Tell the agents that `fetch` would fetch from that it will not; returns at once.

        Their offers count it as a fetch that is done, so they end without waiting for their lease.
        Nothing is moved, no layer is waited for, and the caches need not fit together. An agent
        that declines twice for one cache, or what it has fetched into it, is counted once.

        Returns
        -------
        Fetch
            Ends OK when each of them has noted it, or has no such offer any more. One that is not
            made yet is waited for. It goes on when nobody holds the handle.

        Parameters
        ----------
        ticket, cache, ranks
            As in `fetch`.
        timeout
            Seconds until it ends with TIMEOUT, and is taken back where the offer was not made yet.

        Raises
        ------
        TicketError
            As in `fetch`.
        InvalidError
            A cache that is not registered; ranks of which it is none.
        """
        check_seconds("timeout", timeout)
        parsed = parse_ticket(ticket, self._config.secret)
        parts, consumers = self._share(parsed, cache, ranks)
        agents = list(dict.fromkeys(agent for agent, *_ in parts))
        with self._lock:
            cache_id = self._cache_id(cache)

            def start() -> _core.Fetch:
                peers = {self._peers.get(parsed.agents[agent]).id: agent for agent in agents}
                return self._core.decline(
                    offer_id=parsed.offer_id,
                    generation=parsed.generation,
                    cache=cache_id,
                    timeout=timeout,
                    parts=[(peer, consumers[agent]) for peer, agent in peers.items()],
                )

            return self._start(start, cache)

    def reject(self, ticket: Ticket, reason: str = "") -> None:
        """Say that the offer which a ticket promised will not be made.

        Fetches that wait for it end with WITHDRAWN and the reason, and so do those that come later,
        as long as this agent remembers: the last 4096 offers that have ended. Declines end OK. An
        offer of the ticket that is open ends, too, with WITHDRAWN; its blocks are free once it is
        released.

        Raises
        ------
        TicketError
            The ticket is damaged, forged or of another version.
        """
        parsed = parse_ticket(ticket, self._config.secret)
        with self._lock:
            self._check_open()
            self._core.reject(parsed.offer_id, parsed.generation, reason)

    def renew(self, ticket: Ticket) -> None:
        """Extend the lease of an offer that is to be fetched later, where its agents are connected.

        A running fetch renews by itself.
        """
        parsed = parse_ticket(ticket, self._config.secret)
        with self._lock:
            self._check_open()
            for agent in parsed.agents:
                peer = self._peers.find(agent, self._config.require)
                if peer is not None:
                    self._core.renew(peer.id, parsed.offer_id, parsed.generation)

    def connect(self, name: str, address: str) -> None:
        """Connect to a producer ahead of the first fetch, and wait for it.

        Raises
        ------
        HandshakeError
            It cannot be reached, is another agent, or refuses us.
        """
        with self._lock:
            self._check_open()
            peer = self._peers.get(AgentRef(name=name, address=address))
        peer.settled.wait()  # bounded by the handshake's own deadline
        if peer.failure is not None:
            raise peer.failure

    def fileno(self) -> int:
        """Return a descriptor that is readable when `poll` has something, for loops of engines."""
        self._check_open()
        return self._core.event_fd()

    def poll(self) -> list[Fetch | Offer]:
        """Return the fetches and offers that have ended since the last call; runs their callbacks.

        Collects from the first call of `fileno` on. Handles that nobody holds any more are left
        out, unless they have a callback. When a callback raises, that comes out here, and the next
        call goes on behind it.
        """
        descriptor = self.fileno()
        with self._lock:  # or one that another thread has just started would not be found yet
            found = [self._handles.get(handle) for handle in self._core.poll()]
        self._ended += [handle for handle in found if handle is not None]
        # Some ended before ends were collected, or got their callbacks later.
        late = [handle for handle in list(self._kept.values()) if handle._ended]  # noqa: SLF001
        try:
            for handle in [*self._ended, *late]:
                handle._run_callbacks()  # noqa: SLF001 - ours
                self._kept.pop(handle._core.handle, None)  # noqa: SLF001
        except BaseException:
            os.eventfd_write(descriptor, 1)
            raise
        ended, self._ended = self._ended, []
        return ended

    @property
    def stats(self) -> _core.AgentStats:
        """Counts of what the agent holds: offers, fetches, peers, slots, bytes."""
        return self._core.stats()

    def metrics(self) -> Metrics:
        """Return all counters and histograms as plain values: see docs/telemetry.md."""
        return metrics_of(self._core)

    def dump_trace(self, path: str | os.PathLike[str], reason: str = "") -> None:
        """Write the last events of this agent to a file, which ``kvxfer trace`` shows.

        Works after `close` too.

        Parameters
        ----------
        path
            It is overwritten.
        reason
            What the file says it was written for.
        """
        write_trace(self._core, self.name, path, reason)

    def close(self) -> None:
        """End everything with CLOSED, tell the peers, join the threads.

        About a second at worst. After direct fetches three, and the time that the system needs to
        unpin the caches; where a GPU is writing into blocks, or into another process's memory,
        until it is done or has had `gpu_timeout`. On return no memory of any cache is read or
        written any more, unless a GPU was given up: a warning is logged then, and its blocks must
        not be used for anything else before the process ends. Memory of GPUs that are still busy
        after that, for five seconds at most, is freed when they get there, and a warning logged.
        Not bounded is a call of a GPU's driver that hangs while a cache is registered with
        adapters.
        """
        with self._lock:
            if self._closed or os.getpid() != self._pid:
                return
            self._closed = True
        if self._listener is not None:
            self._listener.close()
        busy, given_up = self._core.close()
        if given_up:
            _used_for_good.extend(self._caches)
            logging.getLogger("kvxfer.agent").warning(
                "agent %r was closed, but %d of its GPUs had been given up: they may still use "
                "blocks of its caches, which must not be used for anything else before this "
                "process ends; the tensors are kept until then",
                self.name,
                given_up,
            )
        if busy:
            logging.getLogger("kvxfer.agent").warning(
                "agent %r was closed, but %d of its GPUs did not get done: memory of them is freed "
                "when they do, or when this process ends",
                self.name,
                busy,
            )
        self._fabrics.close()
        self._caches.clear()
        self._kept.clear()
        _agents.discard(self)

    def __del__(self) -> None:
        if not getattr(self, "_closed", True) and os.getpid() == self._pid:
            what = f"agent {self.name!r} was not closed: close() it, or make it in a with statement"
            warnings.warn(what, ResourceWarning, stacklevel=2, source=self)
            self.close()

    def __enter__(self) -> Agent:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        where = self._address or "not listening"
        return f"<kvxfer.Agent {self.name!r} {'closed' if self._closed else where}>"

    def _check_open(self) -> None:
        if os.getpid() != self._pid:
            raise ClosedError(
                f"agent {self.name!r} was made before a fork() and does not exist in the child: "
                "make a new agent there, or start the child with spawn instead of fork"
            )
        if self._closed:
            raise ClosedError(f"agent {self.name!r} is closed")

    def _share(
        self, ticket: ParsedTicket, cache: Cache, ranks: Ranks | None
    ) -> tuple[list[Part], Counter[int]]:
        """Return what to fetch from whom, and by agent how many do."""
        layout = cache.layout
        heads = (layout.first_head, layout.first_head + layout.num_heads)
        if ranks is not None:
            return ranks.share(ticket, layout.layers, heads)
        parts = cover(ticket.agents, layout.layers, heads, self._spread)
        return parts, Counter({agent for agent, *_ in parts})

    def _start(self, start: Callable[[], _core.Fetch], cache: Cache) -> Fetch:
        """Wrap what the core has started. Needs the lock."""
        try:
            core = start()
        except TransferError:  # a connection ended just after it was found: make a new one
            core = start()
        fetch = Fetch(core, cache, self._watch, self._trace_failure)
        self._handles[core.handle] = fetch
        return fetch

    def _cache_id(self, cache: Cache) -> int:
        self._check_open()
        known = self._caches.get(cache)
        if known is None:
            raise InvalidError(
                f"{cache!r} is not registered with agent {self.name!r}: register() it"
            )
        return known

    def _trace_failure(self, reason: str) -> None:
        if self._failures is not None:
            self._failures.note(self._core, self.name, reason)

    def _watch(self, handle: Fetch | Offer) -> None:
        """Keep a handle that has got a callback, and have `poll` look at it if it has ended."""
        descriptor = self.fileno()
        self._kept[handle._core.handle] = handle  # noqa: SLF001 - ours
        if handle._ended:  # noqa: SLF001
            os.eventfd_write(descriptor, 1)


def _close_all() -> None:
    for agent in list(_agents):
        agent.close()


def _after_fork_in_child() -> None:
    for agent in list(_agents):
        agent._lock = threading.Lock()  # noqa: SLF001 - its holder may not exist here
        agent._registering = threading.Lock()  # noqa: SLF001
    _agents.clear()


atexit.register(_close_all)
os.register_at_fork(after_in_child=_after_fork_in_child)
