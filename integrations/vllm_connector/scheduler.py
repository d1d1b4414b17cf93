"""The scheduler's half of the connector: decides what is offered, fetched and given up."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from vllm.logger import init_logger
from vllm.v1.request import RequestStatus

from kvxfer.ticket import parse_ticket

from . import params as wire
from .caches import layer_specs
from .compat import cache_fields, engine_fields
from .messages import (
    Handshake,
    LoadOrder,
    Part,
    SendOrder,
    StepOrders,
    Ticket,
)
from .plans import Plan, Planner
from .settings import Settings
from .stats import Stats
from .tickets import (
    Holders,
    collect,
    offered,
    send_part,
    templates,
)

logger = init_logger(f"vllm.{__name__}")  # below vLLM's own, whose handlers it shares

_REMEMBERED = 4096  # tickets that were used: siblings of n > 1 find the prefix in the local cache
_FINISHED = (RequestStatus.FINISHED_LENGTH_CAPPED, RequestStatus.FINISHED_STOPPED)


class Scheduler:
    """State of all requests of one engine that are sent or loaded.

    Every method is called by vLLM's scheduler, on its thread.
    """

    def __init__(
        self,
        vllm_config: Any,  # noqa: ANN401 - vllm.config.VllmConfig, not there for type checks
        kv_cache_config: Any,  # noqa: ANN401
        settings: Settings,
        secret: str | None,
        model: str,
        *,
        anywhere: bool = False,
    ) -> None:
        transfer = vllm_config.kv_transfer_config
        self._engine: str = transfer.engine_id
        self._consumer_only = transfer.kv_role == "kv_consumer"
        self._parallel = vllm_config.parallel_config
        self._settings, self._secret, self._model = settings, secret, model
        self._anywhere = anywhere
        self._prefix_caching = bool(vllm_config.cache_config.enable_prefix_caching)
        self._groups = kv_cache_config
        specs = [
            next(iter(layer_specs(kv_cache_config, group).values()))
            for group in range(len(kv_cache_config.kv_cache_groups))
        ]
        self._block_sizes = [spec.block_size for spec in specs]
        self._windowed = any(getattr(spec, "sliding_window", None) for spec in specs)
        self._fields = engine_fields(vllm_config)
        self._holders: dict[str, Holders] = {}
        self._templates: dict[str, Ticket] = {}
        self._address = ""
        self._orders = StepOrders()
        self._planner = self._make_planner()
        self._plans: dict[str, Plan] = {}  # not yet begun
        self._loading: dict[str, str] = {}  # the offer that is loaded, by request
        self._leaders: dict[str, str] = {}  # requests that load an offer, by offer
        self._used: OrderedDict[str, None] = OrderedDict()
        self._early: dict[str, Any] = {}  # concurrent flow: requests whose prefill is under way
        self._offered: dict[str, SendOrder] = {}  # offered before the request has finished
        self._sending: set[str] = set()
        self._renewed = time.monotonic()
        self._warned = 0.0
        self._warned_of_prefill = False
        self.stats = Stats()

    def set_handshakes(self, handshakes: Mapping[tuple[int, int], object]) -> None:
        """Take what the workers said; payloads of other connectors are left alone."""
        ours = {rank: each for rank, each in handshakes.items() if isinstance(each, Handshake)}
        if not ours:
            return
        self._holders = collect(ours)
        self._fields.update(cache_fields(info for each in ours.values() for info in each.caches))
        self._address = next((each.address for each in ours.values() if each.address), "")
        self._templates = templates(self._holders, self._model, self._secret)
        self._planner = self._make_planner()

    def _make_planner(self) -> Planner:
        return Planner(
            fields=self._fields,
            ignored=() if self._settings.same_vllm else ("vllm version",),
            holders=self._holders,
            block_sizes=self._sizes_of_caches(),
            tp_size=self._parallel.tensor_parallel_size,
            pp_size=self._parallel.pipeline_parallel_size,
            prefix_caching=self._prefix_caching,
            model=self._model,
            secret=self._secret,
            anywhere=self._anywhere,
        )

    def _sizes_of_caches(self) -> dict[str, int]:
        return {
            key: self._block_sizes[holders.info.group] for key, holders in self._holders.items()
        }

    def on_new_request(self, request: Any) -> None:  # noqa: ANN401 - vllm's Request
        params = request.kv_transfer_params
        if params and params.get("do_remote_decode"):
            if not self._serves(request):
                self._warn_of_prefill(request)
                return
            self._truncate(request, params)
            if params.get("transfer_id") and self._settings.concurrent:
                self._early[request.request_id] = request
        elif params and params.get("do_remote_prefill"):
            self._plans[request.request_id] = self._planner.plan(request, params)
        elif self._consumer_only:
            self.stats.add(prefills_without_params=1)
            if time.monotonic() - self._warned > 60:
                self._warned = time.monotonic()
                logger.warning(
                    "Request %s came to this decode engine without kv_transfer_params, so it is "
                    "prefilled here. The proxy must send the request to a prefill engine first and "
                    "hand on the kv_transfer_params of its answer.",
                    request.request_id,
                )

    def num_new_matched_tokens(self, request: Any, local: int) -> tuple[int | None, bool]:  # noqa: ANN401
        """Return how many tokens come from the prefill side, and that they come later."""
        plan = self._plans.get(request.request_id)
        if plan is None:
            return 0, False
        plan.local = local
        count = self._end(plan, request) - local
        if count <= 0:
            return 0, False
        if plan.offer is not None:
            leader = self._leaders.get(plan.offer)
            if leader is not None and leader != request.request_id:
                return None, False  # a sibling loads the same; its prefix will be here then
            if plan.offer in self._used:
                return 0, False
        return count, True

    def after_alloc(self, request: Any, blocks: Any, num_external: int) -> None:  # noqa: ANN401
        """Order the load of what was allocated, or tell the prefill side that it is not needed."""
        plan = self._plans.pop(request.request_id, None)
        if plan is None:
            return
        request.kv_transfer_params["do_remote_prefill"] = False  # one load for each request
        if num_external <= 0:
            self._decline(plan)
            return
        remote, refused = plan.remote, plan.refused
        parts: list[Part] = []
        if remote is not None and refused is None:
            try:
                parts = self._load_parts(plan, blocks.blocks, plan.local + num_external)
            except wire.ParamsError as error:
                refused = ("mismatch", str(error))
        if refused is not None:
            logger.error("Request %s is not loaded: %s", request.request_id, refused[1])
            self._decline(plan)
        offer = plan.offer or request.request_id
        self._remember(offer, request.request_id)
        self._loading[request.request_id] = offer
        peer = remote.engine if remote is not None else "unknown"
        self._orders.load.append(LoadOrder(request.request_id, parts, peer, refused))

    def build(self, output: Any) -> StepOrders:  # noqa: ANN401 - SchedulerOutput
        """Return what the workers have to do in this step."""
        for request in output.preempted_req_ids or ():
            if self._offered.pop(request, None) is not None:
                self._orders.withdraw.append(request)
        if self._early:
            self._offer_early(output)
        if self._plans:
            self._renew()
        orders, self._orders = self._orders, StepOrders()
        return orders

    def update(self, output: Any) -> None:  # noqa: ANN401 - KVConnectorOutput
        """Take the workers' word of what has ended; beside it stands that of other connectors."""
        for request in output.finished_recving or ():
            self._leaders.pop(self._loading.pop(request, ""), None)
        self._sending -= set(output.finished_sending or ())

    def finished(
        self,
        request: Any,  # noqa: ANN401
        blocks: tuple[list[int], ...],
    ) -> tuple[bool, wire.Params | None]:
        """Return whether the blocks have to stay, and what the prefill side answers."""
        name, params = request.request_id, request.kv_transfer_params
        self._early.pop(name, None)
        early = self._offered.pop(name, None)
        plan = self._plans.pop(name, None)
        if plan is not None:  # it ended before it was scheduled
            params["do_remote_prefill"] = False
            self._decline(plan)
        if name in self._loading:
            self._orders.cancel.append(name)
            return False, None  # vLLM keeps the blocks until the load is reported
        if not params or not params.get("do_remote_decode") or not self._serves(request):
            return False, None
        tokens = min(request.num_computed_tokens, request.num_prompt_tokens)
        if request.status not in _FINISHED or tokens < 1 or not any(blocks) or not self._holders:
            if early is not None:
                # A forward that reads these blocks has ended, a fetch of them may not have.
                self._orders.withdraw.append(name)
                self._hold(name)
                return True, None
            return False, None
        if early is None and params.get("transfer_id") and self._settings.concurrent:
            return (
                False,
                None,
            )  # it was preempted: its offer is gone, and the fetch of it has failed
        if early is None:
            parts = self._send_parts(name, blocks, tokens)
            if not parts:
                return False, None
            order = SendOrder(name, parts, ready=True)
            self._orders.send.append(order)
        else:
            order = early
        self._hold(name)
        return True, self._reply(request, order, blocks, tokens)

    @property
    def sending(self) -> bool:
        """Whether blocks of finished requests wait for their consumers."""
        return bool(self._sending)

    def _renew(self) -> None:
        """Keep what waiting requests will fetch from expiring."""
        plans = [
            plan
            for plan in self._plans.values()
            if plan.refused is None and plan.offer not in self._used
        ]
        leases = [plan.remote.lease for plan in plans if plan.remote is not None]
        now = time.monotonic()
        if leases and now - self._renewed > min(leases) / 3:
            self._renewed = now
            for plan in plans:
                self._orders.renew += plan.tickets.values()

    def _hold(self, request: str) -> None:
        self._sending.add(request)
        self._orders.hold.append(request)

    def _reply(
        self,
        request: Any,  # noqa: ANN401
        order: SendOrder,
        blocks: tuple[list[int], ...],
        tokens: int,
    ) -> wire.Params:
        return wire.prefill_reply(
            engine=self._engine,
            request=request.request_id,
            address=self._address,
            blocks=blocks,
            num_tokens=tokens,
            tp_size=self._parallel.tensor_parallel_size,
            pp_size=self._parallel.pipeline_parallel_size,
            ours={
                "tickets": {part.key: part.ticket for part in order.parts},
                "digest": wire.prompt_digest(request, tokens),
                "fields": self._fields,
                "decode_tp_size": self._settings.decode_tp_size,
                "lease": self._settings.lease,
                "block_sizes": self._sizes_of_caches(),
                "agents": self._templates,
            },
        )

    def _serves(self, request: Any) -> bool:  # noqa: ANN401
        """Return whether what this engine computes for a request can be offered to others."""
        return bool(self._templates) and request.prompt_token_ids is not None

    def _warn_of_prefill(self, request: Any) -> None:  # noqa: ANN401
        if self._warned_of_prefill:
            return
        self._warned_of_prefill = True
        why = (
            "prompts of embeddings cannot be told apart"
            if self._templates
            else "this engine is kv_consumer; a proxy sent it a prefill"
        )
        logger.warning("Request %s will not be offered: %s", request.request_id, why)

    def _send_parts(
        self, offer: str, blocks: tuple[list[int], ...], tokens: int, transfer: str | None = None
    ) -> list[Part]:
        """Return what to offer: nothing, if a cache has lost all of it to its sliding window."""
        parts = []
        for key, holders in self._holders.items():
            group = holders.info.group
            span = offered(holders, blocks[group], self._block_sizes[group], tokens)
            if span[1] <= span[0]:
                return []
            generation = None
            if transfer is not None:
                generation = wire.transfer_generation(transfer, key, self._secret)
            parts.append(
                send_part(key, holders, offer, span, self._model, self._secret, generation)
            )
        return parts

    def _offer_early(self, output: Any) -> None:  # noqa: ANN401
        """Offer prompts whose last chunk runs in this step, layer by layer."""
        for name, request in list(self._early.items()):
            count = output.num_scheduled_tokens.get(name)
            if count is None or request.num_computed_tokens + count < request.num_prompt_tokens:
                continue
            del self._early[name]
            blocks = output.kv_connector_block_state.resolve_block_ids(name)
            told = request.kv_transfer_params
            transfer = wire.transfer_name(
                str(told["transfer_id"]),
                request,
                request.num_prompt_tokens - (not told.get("_kvxfer_truncated")),
            )
            parts = self._send_parts(transfer, blocks, request.num_prompt_tokens, transfer)
            if not parts:
                continue
            self._offered[name] = order = SendOrder(name, parts, ready=False)
            self._orders.send.append(order)

    def _truncate(self, request: Any, params: wire.Params) -> None:  # noqa: ANN401
        """Leave the last prompt token to the decode side, where windows are involved.

        It computes that token anyway, and needs the window before that token, not the one after.
        """
        if not self._windowed or request.num_prompt_tokens < 2 or params.get("_kvxfer_truncated"):
            return
        if request.prompt_token_ids is None or request.get_skip_reading_prefix_cache():
            return
        del request.prompt_token_ids[-1:]
        del request._all_token_ids[-1:]  # noqa: SLF001 - as vLLM's own connectors do
        request.num_prompt_tokens -= 1
        request.max_tokens = 1
        params["_kvxfer_truncated"] = True

    def _end(self, plan: Plan, request: Any) -> int:  # noqa: ANN401
        """Return up to which token to load: the last one is computed here, to sample the next."""
        last: int = request.num_prompt_tokens - 1
        if plan.remote is None or plan.remote.num_tokens is None:
            return last
        return min(plan.remote.num_tokens, last)

    def _load_parts(self, plan: Plan, blocks: Any, end: int) -> list[Part]:  # noqa: ANN401
        tickets = plan.tickets
        parts = []
        for key, holders in self._holders.items():
            size = self._block_sizes[holders.info.group]
            ids = [0 if block.is_null else block.block_id for block in blocks[holders.info.group]]
            if key not in tickets:
                raise wire.ParamsError(f"cache {key} has no ticket")
            begin = plan.local
            while begin < end and not ids[begin // size]:
                begin = (begin // size + 1) * size  # out of the window
            units = (begin, end) if holders.unit == 1 else (begin // size, -(-end // size))
            there = parse_ticket(tickets[key], self._secret).first_token
            if there > units[0]:
                units = (self._windows_first(holders, there, size, end), units[1])
            first = units[0] // size if holders.unit == 1 else units[0]
            last = -(-end // size)
            parts.append(Part(key, tickets[key], ids[first:last], *units))
        return parts

    def _windows_first(self, holders: Holders, there: int, size: int, end: int) -> int:
        """Return the unit where the offer begins, if a sliding window needs nothing before it."""
        window = holders.info.fields.get("window", "none")
        needed = max(0, end - int(window) + 1) if window.isdigit() else 0
        if self._prefix_caching:
            needed -= needed % size  # the prefix cache keeps that block, and gives it as whole
        if there > (needed if holders.unit == 1 else needed // size):
            raise wire.ParamsError(
                f"cache {holders.info.key} is on offer from {there} (units of {holders.unit} "
                f"tokens), needed from token {needed}"
            )
        return there

    def _remember(self, offer: str, request: str) -> None:
        self._leaders[offer] = request
        self._used[offer] = None
        while len(self._used) > _REMEMBERED:
            self._used.popitem(last=False)

    def _decline(self, plan: Plan) -> None:
        """Tell the prefill side that nobody will fetch this, unless somebody has."""
        if plan.offer is None or plan.offer in self._used:
            return
        self._used[plan.offer] = None
        self._orders.decline += plan.tickets.items()
