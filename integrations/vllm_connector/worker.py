"""The worker's half of the connector: makes offers, fetches, and reports each end once."""

from __future__ import annotations

import select
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from vllm.logger import init_logger

import kvxfer
from kvxfer import Fetch, Offer, Ranks, Status

from .caches import LocalCache, describe
from .compat import engine_fields, model_name
from .messages import Handshake, LoadOrder, Refusal, SendOrder, StepOrders, Ticket
from .settings import Settings
from .stats import Stats
from .waits import Wait

logger = init_logger(f"vllm.{__name__}")  # below vLLM's own, whose handlers it shares

_REST = 0.005, 0.02  # seconds, at first and at most
_RELEASE_TIMEOUT = 10.0  # seconds; a pack of one chunk is all that can be under way
_GONE = Status.STALE, Status.EXPIRED


@dataclass
class _Load:
    """A request that is being fetched, one fetch for each cache."""

    order: LoadOrder
    failure: Refusal | None
    """The first."""
    wait: Wait = field(default_factory=Wait)
    fetches: dict[str, Fetch] = field(default_factory=dict)
    """By cache."""
    running: int = 0


@dataclass
class _Send:
    """A request that is offered, one offer for each cache of this rank."""

    request: str
    wait: Wait = field(default_factory=Wait)
    offers: list[Offer] = field(default_factory=list)
    held: bool = False
    """Whether the scheduler waits for the end; before that nothing is reported."""


@dataclass
class Results:
    sent: set[str] = field(default_factory=set)
    loaded: set[str] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)


class Worker:
    """All transfers of one rank. Every method is called on the worker's main thread."""

    def __init__(self, vllm_config: Any, kv_cache_config: Any, settings: Settings) -> None:
        self._vllm_config, self._kv_cache_config = vllm_config, kv_cache_config
        self._settings = settings
        transfer, parallel = vllm_config.kv_transfer_config, vllm_config.parallel_config
        config = kvxfer.Config(**settings.agent)
        self._listens: bool = transfer.is_kv_producer
        self._agent = kvxfer.Agent(
            f"{transfer.engine_id}/{parallel.rank}",
            listen=_address(settings, config, parallel) if self._listens else None,
            config=config,
        )
        self._ends = select.poll()  # with its descriptor, poll() returns what has ended
        self._ends.register(self._agent.fileno(), select.POLLIN)
        self._resting = time.monotonic()
        self._caches: dict[str, LocalCache] = {}
        self._on_gpu = False
        # Each of a step's micro-batches writes a part of a layer.
        self._whole_layers = not parallel.use_ubatching
        # Ranks of other replicas wait for this one's steps, and for its empty ones as well.
        self._rests = parallel.data_parallel_size == 1
        self._in_flight: int = vllm_config.max_concurrent_batches  # steps, at most
        self._idle = 0  # how many steps, to the last, have computed nothing
        self._to_load: list[LoadOrder] = []
        self._ranks: dict[str, Ranks] = {}
        self._loads: dict[str, _Load] = {}
        self._sends: dict[str, _Send] = {}
        self._by_fetch: dict[Fetch, _Load] = {}
        self._filling: dict[Offer, frozenset[str]] = {}  # whose layers become ready in this step
        self._results = Results()
        self._looked = time.monotonic()
        self._sent = 0, 0
        self._refused = 0
        self.stats = Stats()

    def register(self, tensors: Mapping[str, torch.Tensor]) -> None:
        try:
            model = model_name(engine_fields(self._vllm_config))
            for local in describe(self._vllm_config, self._kv_cache_config, tensors, model):
                self._agent.register(local.cache)
                self._caches[local.info.key] = local
                self._on_gpu |= local.cache.on_gpu
                logger.info("%s %s: %r", self._agent.name, local.info.key, local.cache)
        except Exception:
            self._agent.close()  # the engine does not start, and nobody else would
            raise
        if self._agent.config.transport not in ("shm", "loopback"):
            kvxfer.codec_rates()  # now, and not at the first request

    def handshake(self) -> Handshake:
        return Handshake(
            self._agent.name,
            self._agent.address if self._listens else None,
            self._agent.incarnation,
            [local.info for local in self._caches.values()],
        )

    def step(self, orders: StepOrders) -> None:
        """Do what the scheduler has ordered, before anything of the step is computed.

        Blocks only for packs of what it withdraws.
        """
        # A rank of vLLM's V1 runner that is not the last of its pipeline doesn't hear of a step's
        # end where there are drafts. What it launched is before this on the stream.
        self.step_written()
        self._idle = self._idle + 1 if orders.idle else 0
        if orders.load or orders.hold:
            self._resting = time.monotonic()
        for key, ranks in orders.ranks.items():
            if key in self._caches:
                self._ranks[key] = Ranks(
                    own=[rank.name for rank in ranks].index(self._agent.name),
                    heads=[rank.heads for rank in ranks],
                    layers=[rank.layers or () for rank in ranks] if ranks[0].layers else None,
                )
        for send in orders.send:
            self._send(send)
        for request in orders.hold:
            self._sends.setdefault(request, _Send(request)).held = True
        for request, tickets, reason in orders.withdraw:
            self._withdraw(request, tickets, reason)
        self._to_load += orders.load
        if not self._on_gpu:
            # The last step's forward is over, so blocks that were allocated since can be written
            # while this step computes.
            self.start_loads()
        for request in orders.cancel:
            self._cancel(request)
        for key, ticket in orders.decline:
            self._decline(key, ticket)
        for ticket in orders.renew:
            try:
                self._agent.renew(ticket)
            except kvxfer.Error as error:
                logger.debug("renew: %s", error)

    def start_loads(self) -> None:
        """Fetch what was ordered.

        On a GPU nothing is written before torch's current stream has got to where it is now: call
        it behind what may still zero, read or write the blocks.
        """
        loads, self._to_load = self._to_load, []
        for load in loads:
            self._load(load)

    def layer_written(self, layer: str) -> None:
        """Say that this layer's KV of the running step is in its blocks.

        On a GPU: that it will be when torch's current stream gets to where it is now.
        """
        if not self._filling or not self._whole_layers:
            return
        if self._on_gpu and torch.cuda.is_current_stream_capturing():
            return  # it records what this would wait for, and doesn't do it
        for offer in [offer for offer, layers in self._filling.items() if layer in layers]:
            self._mark(offer, layer)

    def step_written(self) -> None:
        """Say that all KV of this step is in its blocks."""
        for offer in list(self._filling):
            self._mark(offer)
        self._filling.clear()

    def results(self) -> Results:
        """Return what has ended since the last call: each request once."""
        self._rest()
        for handle in self._agent.poll():
            if isinstance(handle, Fetch):
                self._fetch_ended(handle)
        for send in [send for send in self._sends.values() if send.held]:
            if all(offer.released for offer in send.offers):
                self._send_ended(send)
        if time.monotonic() - self._looked > 1:
            self._looked = time.monotonic()
            self._watch()
        results, self._results = self._results, Results()
        return results

    def close(self) -> None:
        self._agent.close()

    def _rest(self) -> None:
        """Wait a moment for the next end, where vLLM would look again a millisecond later.

        The longer it has been so the longer, as a new request has to wait as well. So would the
        results of a step that is under way behind which empty ones were scheduled.
        """
        if not self._rests or self._idle < self._in_flight:
            return
        waits = self._by_fetch or any(send.held for send in self._sends.values())
        if not waits or self._results.loaded or self._results.sent:
            return
        least, most = _REST
        self._ends.poll(1e3 * min(most, max(least, (time.monotonic() - self._resting) / 20)))

    def _mark(self, offer: Offer, layer: str | None = None) -> None:
        """Say that a layer, or all, is ready; a failure ends this offer, and not the forward."""
        try:
            offer.mark_all_ready() if layer is None else offer.mark_ready(layer)
        except kvxfer.Error:
            logger.exception("What was computed cannot be sent; the decode engine recomputes")
            del self._filling[offer]
            offer.release()

    # --- prefill side ---

    def _send(self, order: SendOrder) -> None:
        send = self._sends.setdefault(order.request, _Send(order.request))
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
                    ready=order.ready,
                )
            except kvxfer.Error as error:
                logger.exception("Request %s cannot be offered", order.request)
                self._agent.reject(part.ticket, str(error))
                continue
            send.offers.append(offer)
            if not order.ready:
                self._filling[offer] = frozenset(local.info.layers)

    def _withdraw(self, request: str, tickets: list[Ticket], reason: str) -> None:
        for ticket in tickets:
            self._agent.reject(ticket, reason)
        send = self._sends.get(request)
        if send is None:
            return
        for offer in send.offers:
            self._filling.pop(offer, None)
            if not send.held:
                # The blocks are somebody else's in this step. However the offer ends, they are free
                # then; if it doesn't, this raises: better no engine than a wrong byte.
                offer.wait(_RELEASE_TIMEOUT)
        if not send.held:
            del self._sends[request]

    def _send_ended(self, send: _Send) -> None:
        del self._sends[send.request]
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
            self.stats.took("send_seconds", send.wait.seconds)
        counts = self._agent.stats
        sent = counts.bytes_sent, counts.wire_bytes_sent
        self.stats.add(sent_bytes=sent[0] - self._sent[0], sent_wire_bytes=sent[1] - self._sent[1])
        self._sent = sent

    # --- decode side ---

    def _load(self, order: LoadOrder) -> None:
        load = self._loads[order.request] = _Load(order, order.refused)
        for part in order.parts if order.refused is None else ():
            local = self._caches.get(part.key)
            if local is None:
                continue
            try:
                fetch = self._agent.fetch(
                    part.ticket,
                    local.cache,
                    part.blocks,
                    tokens=slice(part.first, part.end),
                    timeout=self._settings.load_timeout,
                    codec=self._settings.codec if local.info.unit == 1 else "raw",
                    ranks=self._ranks[part.key],
                )
            except kvxfer.Error as error:
                self._give_up(load, ("refused", str(error)))
                break
            load.fetches[part.key] = fetch
            load.running += 1
            self._by_fetch[fetch] = load
        if not load.running:
            self._load_ended(load)

    def _cancel(self, request: str) -> None:
        why = "cancelled", "the request was aborted"
        if request in self._loads:
            self._give_up(self._loads[request], why)
        self._to_load = [
            replace(load, refused=load.refused or why) if load.request == request else load
            for load in self._to_load
        ]

    def _give_up(self, load: _Load, failure: Refusal) -> None:
        load.failure = load.failure or failure
        for fetch in load.fetches.values():  # no use without all of them
            fetch.cancel(done=True)

    def _fetch_ended(self, fetch: Fetch) -> None:
        load = self._by_fetch.pop(fetch, None)
        if load is None:
            return
        load.running -= 1
        if fetch.error is not None:
            self._give_up(load, (fetch.error.status.value.lower(), str(fetch.error)))
        if not load.running:
            self._load_ended(load)

    def _load_ended(self, load: _Load) -> None:
        order, seconds = load.order, load.wait.seconds
        del self._loads[order.request]
        self._results.loaded.add(order.request)
        if load.failure is None:
            reports = [fetch.report for fetch in load.fetches.values()]
            self.stats.add(
                loads=1,
                loaded_bytes=sum(report.bytes for report in reports),
                wire_bytes=sum(report.wire_bytes for report in reports),
                loaded_tokens=order.tokens,
                chunks=sum(report.chunks for report in reports),
            )
            self.stats.took("load_seconds", seconds)
            return
        self._results.failed.add(order.request)
        reason, message = load.failure
        self.stats.failed(reason)
        self.stats.add(recomputed_tokens=order.tokens)
        if reason in [status.value.lower() for status in _GONE]:
            self.stats.add(stale_tickets=1)
        if reason != "cancelled":
            logger.error(
                "Request %s: loading %d tokens from %s failed after %.3f s: %s",
                order.request,
                order.tokens,
                order.peer,
                seconds,
                message,
            )
        for part in order.parts:
            if part.key not in load.fetches:
                self._decline(part.key, part.ticket)

    def _decline(self, key: str, ticket: Ticket) -> None:
        """Tell the agents that this rank would fetch from that it will not."""
        local = self._caches.get(key)
        if local is None:
            return
        timeout = self._settings.load_timeout  # the offer may be made only then
        try:
            self._agent.decline(ticket, local.cache, ranks=self._ranks[key], timeout=timeout)
            self.stats.add(declined=1)
        except kvxfer.Error as error:
            logger.warning("An offer cannot be declined, its lease will end it: %s", error)

    # --- both ---

    def _watch(self) -> None:
        refusals = self._agent.metrics()["ends"]["refusals"]
        refused = sum(refusals.get(status.value, 0) for status in _GONE)
        if refused > self._refused:
            self.stats.add(stale_refused=refused - self._refused)
            self._refused = refused
        for load in self._loads.values():
            if load.wait.overdue(self._settings.watchdog):
                logger.warning(
                    "Request %s has been waiting for its KV from %s for %.0f s; it fails after "
                    "%.0f s",
                    load.order.request,
                    load.order.peer,
                    load.wait.seconds,
                    self._settings.load_timeout,
                )
        for send in self._sends.values():
            if send.held and send.wait.overdue(self._settings.watchdog):
                logger.warning(
                    "Request %s has been waiting for a decode engine to fetch its KV for %.0f s; "
                    "without a word from one its lease ends after %.0f s",
                    send.request,
                    send.wait.seconds,
                    self._settings.lease,
                )


def _address(settings: Settings, config: kvxfer.Config, parallel: Any) -> str:
    """Return where a rank of the prefill side listens."""
    if config.transport == "loopback":
        return "loopback:"
    host = settings.host
    if host is None and config.secret:
        from vllm.utils.network_utils import get_ip

        host = str(get_ip())
    host = host or "127.0.0.1"
    rank = parallel.data_parallel_index * parallel.world_size + parallel.rank
    port = settings.port + rank if settings.port else 0
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
