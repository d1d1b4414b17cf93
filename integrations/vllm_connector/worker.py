"""The worker's half of the connector: makes offers, fetches, and reports each end once."""

from __future__ import annotations

import select
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.logger import init_logger

import kvxfer
from kvxfer import Fetch, Offer, Status
from kvxfer.cover import cover
from kvxfer.ticket import issue_ticket, parse_ticket

from .caches import LocalCache, describe, scratch
from .messages import (
    Handshake,
    LoadOrder,
    SendOrder,
    StepOrders,
    Ticket,
)
from .settings import Settings
from .stats import Stats

logger = init_logger(f"vllm.{__name__}")  # below vLLM's own, whose handlers it shares

_REST = 0.02  # seconds
_RELEASE_TIMEOUT = 10.0  # seconds; a pack of one chunk is all that can be under way
# After these the prefill side knows, or cannot be told.
_SETTLED = {Status.STALE, Status.EXPIRED, Status.PEER_LOST, Status.UNREACHABLE, Status.CLOSED}


@dataclass
class _Load:
    """A request that is being fetched, one fetch for each cache."""

    order: LoadOrder
    began: float
    running: int = 0
    fetches: dict[str, Fetch] = field(default_factory=dict)
    """By cache."""
    declined: set[str] = field(default_factory=set)
    """Caches of which this rank needs nothing, and has said so."""
    failure: tuple[str, str] | None = None
    """Reason and message of the first."""
    settled: bool = False
    warned: float = 0.0


@dataclass
class _Send:
    """A request that is offered, one offer for each cache of this rank."""

    request: str
    began: float
    offers: list[Offer] = field(default_factory=list)
    held: bool = False
    """Whether the scheduler waits for the end; before that nothing is reported."""
    warned: float = 0.0


@dataclass
class Results:
    sent: set[str] = field(default_factory=set)
    loaded: set[str] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)


class Worker:
    """All transfers of one rank. Every method is called on the worker's main thread."""

    def __init__(
        self,
        vllm_config: Any,  # noqa: ANN401 - vllm.config.VllmConfig, not there for type checks
        kv_cache_config: Any,  # noqa: ANN401
        settings: Settings,
        model: str,
    ) -> None:
        self._vllm_config, self._kv_cache_config = vllm_config, kv_cache_config
        self._settings, self._model = settings, model
        transfer, parallel = vllm_config.kv_transfer_config, vllm_config.parallel_config
        config = kvxfer.Config(**settings.agent)
        listen = None
        if transfer.is_kv_producer:
            host = settings.host or (_own_address() if config.secret else "127.0.0.1")
            rank = parallel.data_parallel_index * parallel.world_size + parallel.rank
            port = settings.port + rank if settings.port else 0
            listen = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
            if config.transport == "loopback":
                listen = "loopback:"
        self._agent = kvxfer.Agent(
            f"{transfer.engine_id}/{parallel.rank}", listen=listen, config=config
        )
        self._ends = select.poll()  # with its descriptor, poll() returns what has ended
        self._ends.register(self._agent.fileno(), select.POLLIN)
        self._resting = time.monotonic()
        self._listens = listen is not None
        self._caches: dict[str, LocalCache] = {}
        self._scratch: dict[tuple[str, str, int], kvxfer.Cache] = {}
        self._loads: dict[str, _Load] = {}
        self._sends: dict[str, _Send] = {}
        self._by_fetch: dict[Fetch, _Load] = {}
        self._declining: dict[Fetch, float] = {}
        self._filling: list[Offer] = []  # offers whose layers become ready in this step
        self._layers: dict[Offer, frozenset[str]] = {}
        self._results = Results()
        self._looked = time.monotonic()
        self.stats = Stats()

    def register(self, tensors: Mapping[str, torch.Tensor]) -> None:
        for local in describe(self._vllm_config, self._kv_cache_config, tensors, self._model):
            self._agent.register(local.cache)
            self._caches[local.info.key] = local
            logger.info("%s %s: %r", self._agent.name, local.info.key, local.cache)

    def handshake(self) -> Handshake:
        return Handshake(
            self._agent.name,
            self._agent.address if self._listens else None,
            self._agent.incarnation,
            [local.info for local in self._caches.values()],
        )

    def step(self, orders: StepOrders) -> None:
        """Do what the scheduler has ordered. Blocks only for packs of what it withdraws."""
        for request in orders.withdraw:
            self._withdraw(request)
        for send in orders.send:
            self._send(send)
        for request in orders.hold:
            self._sends.setdefault(request, _Send(request, time.monotonic())).held = True
        for load in orders.load:
            self._load(load)
        for request in orders.cancel:
            self._cancel(request)
        for key, ticket in orders.decline:
            self._decline(key, ticket)
        for ticket in orders.renew:
            try:
                self._agent.renew(ticket)
            except kvxfer.Error as error:
                logger.debug("renew: %s", error)

    def layer_written(self, layer: str) -> None:
        """Say that this layer's KV of the running step is in its blocks."""
        for offer in self._filling:
            if layer in self._layers[offer]:
                offer.mark_ready(layer)

    def step_written(self) -> None:
        """Say that all KV of this step is in its blocks."""
        for offer in self._filling:
            offer.mark_all_ready()
        self._filling.clear()

    def results(self, *, idle: bool = False) -> Results:
        """Return what has ended since the last call: each request once.

        `idle` says that this step computed nothing.
        """
        self._rest(idle)
        for handle in self._agent.poll():
            if isinstance(handle, Fetch):
                self._fetch_ended(handle)
        for send in [send for send in self._sends.values() if send.held]:
            if all(offer.released for offer in send.offers):
                self._send_ended(send)
        now = time.monotonic()
        if now - self._looked > 1:
            self._looked = now
            self._watch(now)
        results, self._results = self._results, Results()
        return results

    def close(self) -> None:
        self._agent.close()

    def _rest(self, idle: bool) -> None:
        """Wait a moment for the next end, where vLLM would look again a millisecond later.

        The longer it has been so the longer, as a new request has to wait as well.
        """
        now = time.monotonic()
        waits = self._by_fetch or any(send.held for send in self._sends.values())
        if not idle or not waits or self._results.loaded or self._results.sent:
            self._resting = now
            return
        self._ends.poll(1e3 * min(_REST, (now - self._resting) / 20))

    # --- prefill side ---

    def _send(self, order: SendOrder) -> None:
        send = self._sends.setdefault(order.request, _Send(order.request, time.monotonic()))
        for part in order.parts:
            local = self._caches.get(part.key)
            agents = [agent["name"] for agent in part.ticket["agents"]]
            if local is None or self._agent.name not in agents:
                continue  # another rank holds the same and was chosen
            try:
                offer = self._agent.offer(
                    local.cache,
                    part.blocks,
                    ticket=part.ticket,
                    lease=self._settings.lease,
                    consumers=self._consumers(local),
                    ready=order.ready,
                )
            except kvxfer.Error:
                # Whoever asks for it waits in vain until its deadline, and recomputes.
                logger.exception("Request %s cannot be offered", order.request)
                continue
            send.offers.append(offer)
            if not order.ready:
                self._layers[offer] = frozenset(local.info.layers)
                self._filling.append(offer)

    def _consumers(self, local: LocalCache) -> int:
        """Return how many ranks of a decode engine fetch from this one."""
        ranks = self._settings.decode_tp_size
        begin, end = local.info.heads
        total: int = self._vllm_config.model_config.get_total_num_kv_heads()
        if end - begin == 1 and self._vllm_config.model_config.use_mla:
            return ranks
        each = max(1, total // ranks)
        firsts = [rank * total // ranks for rank in range(ranks)]
        return max(1, sum(first < end and first + each > begin for first in firsts))

    def _withdraw(self, request: str) -> None:
        send = self._sends.get(request)
        if send is None:
            return
        for offer in send.offers:
            offer.release()
            if offer in self._filling:
                self._filling.remove(offer)
        for offer in send.offers:
            offer.wait(_RELEASE_TIMEOUT)
        if not send.held:
            self._forget(send)

    def _send_ended(self, send: _Send) -> None:
        self._results.sent.add(send.request)
        statuses = {offer.status for offer in send.offers}
        if Status.EXPIRED in statuses:
            self.stats.add(leases_expired=1)
            logger.warning(
                "Request %s: nobody fetched its KV within %.3g s, its blocks are free again",
                send.request,
                self._settings.lease,
            )
        elif statuses - {Status.OK}:
            self.stats.add(sends_ended=1)
        elif statuses:
            self.stats.add(sends=1)
            self.stats.took("send_seconds", time.monotonic() - send.began)
        self._forget(send)

    def _forget(self, send: _Send) -> None:
        for offer in send.offers:
            self._layers.pop(offer, None)
        del self._sends[send.request]

    # --- decode side ---

    def _load(self, order: LoadOrder) -> None:
        load = _Load(order, time.monotonic(), failure=order.refused)
        self._loads[order.request] = load
        if order.refused is None:
            for part in order.parts:
                local = self._caches.get(part.key)
                if local is None:
                    continue
                if part.first >= part.end:
                    self._decline(part.key, part.ticket)
                    load.declined.add(part.key)
                    continue
                try:
                    fetch = self._agent.fetch(
                        part.ticket,
                        local.cache,
                        part.blocks,
                        tokens=slice(part.first, part.end),
                        timeout=self._settings.load_timeout,
                        codec=self._settings.codec if local.info.unit == 1 else "raw",
                    )
                except kvxfer.Error as error:
                    load.failure = load.failure or ("refused", str(error))
                    break
                load.fetches[part.key] = fetch
                load.running += 1
                self._by_fetch[fetch] = load
        if load.failure is not None:
            for fetch in load.fetches.values():
                fetch.cancel()
        if not load.running:
            self._load_ended(load)

    def _fetch_ended(self, fetch: Fetch) -> None:
        if self._declining.pop(fetch, None) is not None:
            return
        load = self._by_fetch.pop(fetch, None)
        if load is None:
            return
        load.running -= 1
        error = fetch.error
        if error is not None:
            load.settled |= error.status in _SETTLED
            if load.failure is None:
                load.failure = (error.status.value.lower(), str(error))
            for other in load.fetches.values():  # no use without this one
                other.cancel()
        if not load.running:
            self._load_ended(load)

    def _load_ended(self, load: _Load) -> None:
        order, seconds = load.order, time.monotonic() - load.began
        del self._loads[order.request]
        self._results.loaded.add(order.request)
        tokens = max(
            ((part.end - part.first) * self._unit(part.key) for part in order.parts), default=0
        )
        if load.failure is None:
            reports = [fetch.report for fetch in load.fetches.values()]
            self.stats.add(
                loads=1,
                loaded_bytes=sum(report.bytes for report in reports),
                wire_bytes=sum(report.wire_bytes for report in reports),
                loaded_tokens=tokens,
                chunks=sum(report.chunks for report in reports),
            )
            self.stats.took("load_seconds", seconds)
            return
        self._results.failed.add(order.request)
        reason, message = load.failure
        self.stats.failed(reason)
        self.stats.add(recomputed_tokens=tokens)
        if reason in ("stale", "expired"):
            self.stats.add(stale_tickets=1)
        if reason != "cancelled":
            logger.error(
                "Request %s: loading %d tokens from %s failed after %.3f s: %s",
                order.request,
                tokens,
                order.peer,
                seconds,
                message,
            )
        if not load.settled:
            for part in order.parts:
                fetch = load.fetches.get(part.key)
                fetched = fetch is not None and fetch.error is None
                if not fetched and part.key not in load.declined:
                    self._decline(part.key, part.ticket)

    def _unit(self, key: str) -> int:
        local = self._caches.get(key)
        return 1 if local is None else local.info.unit

    def _cancel(self, request: str) -> None:
        load = self._loads.get(request)
        if load is not None:
            load.failure = load.failure or ("cancelled", "the request was aborted")
            for fetch in load.fetches.values():
                fetch.cancel()

    def _decline(self, key: str, ticket: Ticket) -> None:
        """Tell the agents that this rank would fetch from that it will not.

        The protocol knows no word for it, but a fetch of one token of one layer and head does it:
        the offer counts it as its consumer's.
        """
        local = self._caches.get(key)
        if local is None:
            return
        secret = self._agent.config.secret
        try:
            parsed = parse_ticket(ticket, secret)
            layers = local.cache.layout.layers
            for index, held, head, _ in cover(parsed.agents, layers, local.info.heads):
                place = (key, layers[held[0]], head)
                if place not in self._scratch:
                    self._scratch[place] = self._agent.register(scratch(local, *place[1:]))
                least = issue_ticket(
                    parsed.offer_id,
                    [parsed.agents[index]],
                    num_tokens=parsed.num_tokens,
                    first_token=parsed.first_token,
                    generation=parsed.generation,
                    model=parsed.model,
                    secret=secret,
                )
                tokens = slice(parsed.first_token, parsed.first_token + 1)
                fetch = self._agent.fetch(
                    least,
                    self._scratch[place],
                    [0],
                    tokens=tokens,
                    first_slot=0,
                    codec="raw",  # no codec takes a single element of a packed block
                    timeout=self._settings.load_timeout,  # the offer may be made only then
                )
                self._declining[fetch] = time.monotonic()
                self.stats.add(declined=1)
        except kvxfer.Error as error:
            logger.warning("An offer cannot be declined, its lease will end it: %s", error)

    # --- both ---

    def _watch(self, now: float) -> None:
        patience = self._settings.watchdog
        for load in self._loads.values():
            if now - max(load.began, load.warned) > patience:
                load.warned = now
                logger.warning(
                    "Request %s has been waiting for its KV from %s for %.0f s; it fails after "
                    "%.0f s",
                    load.order.request,
                    load.order.peer,
                    now - load.began,
                    self._settings.load_timeout,
                )
        for send in self._sends.values():
            if send.held and now - max(send.began, send.warned) > patience:
                send.warned = now
                logger.warning(
                    "Request %s has been waiting for a decode engine to fetch its KV for %.0f s; "
                    "without a word from one its lease ends after %.0f s",
                    send.request,
                    now - send.began,
                    self._settings.lease,
                )


def _own_address() -> str:
    from vllm.utils.network_utils import get_ip

    return str(get_ip())
