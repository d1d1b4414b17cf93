"""The scheduler's half of the connector: decides what is offered, fetched and given up."""

from __future__ import annotations

import secrets
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from vllm.logger import init_logger
from vllm.v1.request import RequestStatus

from kvxfer.config import Config
from kvxfer.ticket import AgentRef, issue_ticket

from . import params as wire
from .compat import cache_fields, engine_fields, layer_specs, model_name
from .messages import CacheInfo, Handshake, LoadOrder, Part, Rank, SendOrder, StepOrders, Ticket
from .plans import Plan, Planner
from .settings import Settings
from .stats import Stats
from .waits import Wait

logger = init_logger(f"vllm.{__name__}")  # below vLLM's own, whose handlers it shares

_REMEMBERED = 4096  # transfers that were used: siblings of n > 1 find the prefix in the local cache
_FINISHED = (RequestStatus.FINISHED_LENGTH_CAPPED, RequestStatus.FINISHED_STOPPED)
_LOST = "its prompt has left a sliding window"
_QUIET = 60.0  # seconds between lines of one kind in the log
Blocks = Sequence[Sequence[int]]
"""Block ids by cache group."""


@dataclass
class _Promise:
    """Concurrent flow: the decode side may be asking for what is being computed here."""

    request: Any
    transfer: str
    order: SendOrder | None = None
    """None before its last chunk is computed."""
    wait: Wait = field(default_factory=Wait)
    """To be computed."""


class Scheduler:
    """State of all requests of one engine that are sent or loaded.

    Every method is called by vLLM's scheduler, on its thread.
    """

    def __init__(self, vllm_config: Any, kv_cache_config: Any, settings: Settings) -> None:
        transfer, agent = vllm_config.kv_transfer_config, Config(**settings.agent)
        self._engine: str = transfer.engine_id
        self._consumer_only = transfer.kv_role == "kv_consumer"
        self._parallel = vllm_config.parallel_config
        self._settings, self._secret = settings, agent.secret
        # Where blocks are zeroed before use, one of vLLM's runners does so before it says what is
        # withdrawn: there only those are offered that stay allocated until the offer ends.
        self._by_layer = settings.concurrent and not kv_cache_config.needs_kv_cache_zeroing
        self._sizes: list[int] = []  # tokens of a block, by group
        self._windowed = False
        for group in range(len(kv_cache_config.kv_cache_groups)):
            specs = list(layer_specs(kv_cache_config, group).values())
            self._sizes.append(specs[0].block_size)
            self._windowed |= any(getattr(spec, "sliding_window", None) for spec in specs)
        self._fields = engine_fields(vllm_config)
        self._caches: dict[str, CacheInfo] = {}
        self._ranks: dict[str, list[Rank]] = {}
        self._agents: dict[str, Ticket] = {}  # who holds each cache, for tickets to be made of
        self._address = ""
        self._planner = Planner(
            fields=self._fields,
            ignored=() if settings.same_vllm else ("vllm version",),
            caches=self._caches,
            sizes=self._sizes,
            prefix_caching=bool(vllm_config.cache_config.enable_prefix_caching),
            secret=self._secret,
            anywhere=agent.insecure,
        )
        self._orders = StepOrders()
        self._plans: dict[str, Plan] = {}  # not yet begun
        self._loading: dict[str, str] = {}  # the transfer that is loaded, by request
        self._leaders: set[str] = set()  # the same transfers
        self._used: OrderedDict[str, None] = OrderedDict()
        self._promises: dict[str, _Promise] = {}
        self._sending: dict[str, str] = {}  # the transfer, by request that has finished
        self._renewed = self._logged = self._looked = time.monotonic()
        self._warned: dict[str, float] = {}
        self._totals = Stats()
        self.stats = Stats()
        self.logs = False
        """Whether to log what is transferred, because vLLM doesn't."""

    def set_handshakes(self, handshakes: Mapping[tuple[int, int], object]) -> None:
        """Take what the workers said; payloads of other connectors are left alone."""
        ours = {rank: each for rank, each in handshakes.items() if isinstance(each, Handshake)}
        if not ours:
            return
        agents: dict[str, list[AgentRef]] = {}
        stages = len({stage for stage, _ in ours})
        for _, handshake in sorted(ours.items()):
            for info in handshake.caches:
                layers = info.layers if stages > 1 else None
                self._caches.setdefault(info.key, info)
                rank = Rank(handshake.name, info.heads, layers)
                self._ranks.setdefault(info.key, []).append(rank)
                if handshake.address is not None:
                    agent = AgentRef(
                        name=handshake.name,
                        address=handshake.address,
                        incarnation=handshake.incarnation,
                        layers=layers,
                        heads=info.heads,
                    )
                    agents.setdefault(info.key, []).append(agent)
                    self._address = self._address or handshake.address
        self._fields.update(cache_fields(info for each in ours.values() for info in each.caches))
        model, secret = model_name(self._fields), self._secret
        for key, held in agents.items():
            self._agents[key] = issue_ticket(key, held, num_tokens=1, model=model, secret=secret)

    def on_new_request(self, request: Any) -> None:
        params = request.kv_transfer_params
        if params and params.get("do_remote_decode"):
            if not self._serves(request):
                why = "prompts of embeddings cannot be told apart"
                if not self._agents:
                    why = "this engine is kv_consumer; a proxy sent it a prefill"
                self._warn("Request %s will not be offered: %s", request.request_id, why)
                return
            self._truncate(request, params)
            if params.get("transfer_id"):
                count = request.num_prompt_tokens - (not params.get("_kvxfer_truncated"))
                transfer = wire.transfer_name(params["transfer_id"], request, count)
                if not self._promised(transfer):
                    self._promises[request.request_id] = _Promise(request, transfer)
        elif params and params.get("do_remote_prefill"):
            self._plans[request.request_id] = self._planner.plan(request, params)
        elif self._consumer_only:
            self.stats.add(prefills_without_params=1)
            self._warn(
                "Request %s came to this decode engine without kv_transfer_params, so it is "
                "prefilled here. The proxy must send the request to a prefill engine first and "
                "hand on the kv_transfer_params of its answer.",
                request.request_id,
            )

    # --- decode side ---

    def num_new_matched_tokens(self, request: Any, local: int) -> tuple[int | None, bool]:
        """Return how many tokens come from the prefill side, and that they come later."""
        plan = self._plans.get(request.request_id)
        if plan is None:
            return 0, False
        plan.local = local
        if plan.name in self._leaders and plan.end > local:
            return None, False  # a sibling loads the same; its prefix will be here then
        if plan.name in self._used or plan.end <= local:
            return 0, False
        return plan.end - local, True

    def after_alloc(self, request: Any, blocks: Any, num_external: int) -> None:
        """Order the load of what was allocated, or tell the prefill side that it is not needed."""
        name = request.request_id
        plan = self._plans.pop(name, None)
        if plan is None:
            return
        request.kv_transfer_params["do_remote_prefill"] = False  # one load for each request
        if num_external <= 0:
            self._decline(plan)
            return
        parts = self._planner.parts(plan, blocks.blocks, plan.local + num_external)
        if plan.refused is not None:
            self._decline(plan)
        else:
            wanted = {part.key for part in parts}
            self._orders.decline += [each for each in plan.tickets.items() if each[0] not in wanted]
        transfer = self._loading[name] = plan.name or name
        self._leaders.add(transfer)
        self._use(transfer)
        self._orders.load.append(LoadOrder(name, plan.peer, parts, num_external, plan.refused))

    def _renew(self) -> None:
        """Keep what waiting requests will fetch from expiring."""
        waiting = [
            p for p in self._plans.values() if p.refused is None and p.name not in self._used
        ]
        now = time.monotonic()
        if waiting and now - self._renewed > min(plan.lease for plan in waiting) / 3:
            self._renewed = now
            for plan in waiting:
                self._orders.renew += plan.tickets.values()

    def _use(self, transfer: str) -> None:
        self._used[transfer] = None
        while len(self._used) > _REMEMBERED:
            self._used.popitem(last=False)

    def _decline(self, plan: Plan) -> None:
        """Tell the prefill side that nobody will fetch this, unless somebody has."""
        if plan.name is not None and plan.name not in self._used:
            self._use(plan.name)
            self._orders.decline += plan.tickets.items()

    # --- prefill side ---

    def _serves(self, request: Any) -> bool:
        """Return whether what this engine computes for a request can be offered to others."""
        return bool(self._agents) and request.prompt_token_ids is not None

    def _promised(self, transfer: str) -> bool:
        """Return whether another sample of the same prompt offers this already."""
        return transfer in self._sending.values() or any(
            promise.transfer == transfer for promise in self._promises.values()
        )

    def _truncate(self, request: Any, params: wire.Params) -> None:
        """Leave the last prompt token to the decode side, where windows are involved.

        It computes that token anyway, and needs the window before that token, not the one after.
        """
        if not self._windowed or request.num_prompt_tokens < 2 or params.get("_kvxfer_truncated"):
            return
        if request.get_skip_reading_prefix_cache():
            return
        del request.prompt_token_ids[-1:]
        del request._all_token_ids[-1:]  # noqa: SLF001 - as vLLM's own connectors do
        request.num_prompt_tokens -= 1
        request.max_tokens = 1
        params["_kvxfer_truncated"] = True

    def _ticket(self, transfer: str, key: str, first: int, end: int) -> Ticket:
        return wire.ticket_of(self._agents[key], transfer, key, first, end, self._secret)

    def _send_order(
        self, request: Any, transfer: str, blocks: Blocks, tokens: int, *, ready: bool
    ) -> SendOrder | None:
        """Return what to offer: nothing, if a cache has lost all of it to its sliding window."""
        order = SendOrder(request.request_id, [], ready)
        for key, info in self._caches.items():
            size = self._sizes[info.group]
            ids = blocks[info.group][: -(-tokens // size)]
            lost = next((at for at, block in enumerate(ids) if block), len(ids))
            first, end = lost * (size // info.unit), -(-tokens // info.unit)
            if first >= end:
                return None
            ticket = self._ticket(transfer, key, first, end)
            order.parts.append(Part(key, ticket, list(ids[lost:]), first, end))
        return order

    def _keep_promises(self, output: Any) -> None:
        """Offer prompts whose last chunk runs in this step, layer by layer."""
        for name, promise in list(self._promises.items()):
            if promise.order is not None or name not in output.num_scheduled_tokens:
                continue
            request, tokens = promise.request, promise.request.num_prompt_tokens
            if request.num_computed_tokens + output.num_scheduled_tokens[name] < tokens:
                continue
            blocks = output.kv_connector_block_state.resolve_block_ids(name)
            order = self._send_order(request, promise.transfer, blocks, tokens, ready=False)
            if order is None:
                self._break(self._promises.pop(name), _LOST)
            else:
                promise.order = order
                self._orders.send.append(order)

    def _break(self, promise: _Promise, reason: str) -> None:
        """Tell who asks for what was promised that it will not come."""
        tickets = [self._ticket(promise.transfer, key, 0, 1) for key in self._agents]
        self._orders.withdraw.append((promise.request.request_id, tickets, reason))

    def _hold(self, request: str, transfer: str) -> None:
        self._sending[request] = transfer
        self._orders.hold.append(request)

    def _reply(self, request: Any, order: SendOrder, transfer: str, blocks: Blocks) -> wire.Params:
        tokens = min(request.num_computed_tokens, request.num_prompt_tokens)
        host, _, port = self._address.rpartition(":")
        offer = {
            "name": transfer,
            "tokens": tokens,
            "digest": wire.prompt_digest(request, tokens),
            "first": {part.key: part.first for part in order.parts if part.first},
        }
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": [list(group) for group in blocks],
            "remote_engine_id": self._engine,
            "remote_request_id": request.request_id,
            "remote_host": host,
            "remote_port": int(port) if port.isdecimal() else 0,
            "tp_size": self._parallel.tensor_parallel_size,
            "dcp_size": 1,
            "pp_size": self._parallel.pipeline_parallel_size,
            "remote_num_tokens": tokens,
            "remote_blocks_expiry_time": None,
            "transfer_mode": "pull",
            "kvxfer": {
                "v": wire.VERSION,
                "lease": self._settings.lease,
                "fields": self._fields,
                "agents": self._agents,
                "offer": offer,
                "seal": wire.seal(offer, self._secret),
            },
        }

    # --- both ---

    def build(self, output: Any) -> StepOrders:
        """Return what the workers have to do in this step."""
        for name in output.preempted_req_ids or ():
            promise = self._promises.get(name)
            if promise is not None and promise.order is not None:
                self._break(self._promises.pop(name), "the request was preempted")
        if self._by_layer:
            self._keep_promises(output)
        self._renew()
        if time.monotonic() - self._looked > 1:
            self._looked = time.monotonic()
            self._watch()
        orders, self._orders = self._orders, StepOrders()
        orders.idle = not output.total_num_scheduled_tokens
        if orders.load or orders.decline:
            orders.ranks = self._ranks
        return orders

    def update(self, output: Any) -> None:
        """Take the workers' word of what has ended; beside it stands that of other connectors."""
        for request in output.finished_recving or ():
            self._leaders.discard(self._loading.pop(request, ""))
        for request in output.finished_sending or ():
            self._sending.pop(request, None)
        if self.logs:
            self._log(output.kv_connector_stats)

    def finished(self, request: Any, blocks: Blocks) -> tuple[bool, wire.Params | None]:
        """Return whether the blocks have to stay, and what the prefill side answers."""
        name, params = request.request_id, request.kv_transfer_params
        plan = self._plans.pop(name, None)
        if plan is not None:  # it ended before it was scheduled
            params["do_remote_prefill"] = False
            self._decline(plan)
        if name in self._loading:
            self._orders.cancel.append(name)
            return False, None  # vLLM keeps the blocks until the load is reported
        if not params or not params.get("do_remote_decode") or not self._serves(request):
            return False, None
        promise = self._promises.pop(name, None)
        tokens = min(request.num_computed_tokens, request.num_prompt_tokens)
        if request.status not in _FINISHED or tokens < 1 or not any(blocks):
            if promise is None:
                return False, None
            self._break(promise, "the request was aborted")
            if promise.order is None:
                return False, None
            # A forward that reads these blocks has ended, a fetch of them may not have.
            self._hold(name, promise.transfer)
            return True, None
        if promise is None and params.get("transfer_id"):
            return False, None  # it was broken, or is another's
        transfer = promise.transfer if promise else f"{name}.{secrets.token_hex(16)}"
        order = promise.order if promise else None
        if order is None:
            order = self._send_order(request, transfer, blocks, tokens, ready=True)
            if order is None:
                if promise is not None:
                    self._break(promise, _LOST)
                return False, None
            self._orders.send.append(order)
        self._hold(name, transfer)
        return True, self._reply(request, order, transfer, blocks)

    @property
    def sending(self) -> bool:
        """Whether blocks of finished requests wait for their consumers."""
        return bool(self._sending)

    def _log(self, stats: Any) -> None:
        """Sum up what was transferred, a line a minute."""
        stats = getattr(stats, "data", {}).get("KvxferConnector", stats)  # MultiConnector's
        if isinstance(stats, Stats):
            self._totals.aggregate(stats)
        now = time.monotonic()
        if now - self._logged >= _QUIET and not self._totals.is_empty():
            summary = ", ".join(f"{name}={value}" for name, value in self._totals.reduce().items())
            logger.info("KV transfers in %.0f s: %s", now - self._logged, summary)
            self._logged, self._totals = now, Stats()

    def _watch(self) -> None:
        """Name who has not even got to the workers for long."""
        patience = self._settings.watchdog
        for name, plan in self._plans.items():
            if plan.refused is None and plan.wait.overdue(patience):
                logger.warning(
                    "Request %s has been waiting for %.0f s to be scheduled%s; %s has its KV",
                    name,
                    plan.wait.seconds,
                    ", behind one with the same prompt" if plan.name in self._leaders else "",
                    plan.peer,
                )
        for name, promise in self._promises.items():
            if promise.order is None and promise.wait.overdue(patience):
                logger.warning(
                    "Request %s has been waiting for %.0f s to be scheduled and computed; a decode "
                    "engine may wait for its KV (transfer %s)",
                    name,
                    promise.wait.seconds,
                    promise.transfer,
                )

    def _warn(self, text: str, *given: object) -> None:
        """Log what a proxy's mistake would repeat with each request."""
        now = time.monotonic()
        if now - self._warned.get(text, -_QUIET) >= _QUIET:
            self._warned[text] = now
            logger.warning(text, *given)
