"""Engines that speak as vLLM does, fail in every way we could think of, and count their blocks."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

_numbers = itertools.count()
ENGINES: dict[str, FakeEngine] = {}  # by engine id: how a decode engine finds a prefill engine


@dataclass
class Faults:
    """What an engine does wrong. Lists are used up, one entry for each request."""

    statuses: list[int] = field(default_factory=list)
    body: bytes = b'{"error": {"message": "made up", "type": "InternalServerError", "code": 500}}'
    delay: float = 0.0
    """Before anything is answered."""

    admit_delay: float = 0.0
    """Until a request has reached the scheduler; who leaves earlier leaves no trace there."""

    hang: bool = False
    drop: bool = False
    """Close the connection without an answer."""

    garbage: bytes | None = None
    no_params: bool = False
    cut_after: int | None = None
    """Pieces of a stream after which the connection breaks."""

    hang_after: int | None = None
    stream_error: bool = False
    loads_fail: bool = False
    """A decode engine prefills again although KV was on offer."""

    after_fetch: float = 0.0
    """Seconds between KV that has arrived and the answer."""

    lease: float = 300.0
    """Seconds after which an offer that nobody has fetched or declined is gone."""

    unhealthy: bool = False
    gap: float = 0.0
    """Between the pieces of a stream."""


class FakeEngine:
    """One engine on a port of its own."""

    def __init__(self, model: str = "m", kvxfer: bool = True, details: bool = False) -> None:
        self.model, self.kvxfer, self.details = model, kvxfer, details
        self.faults = Faults()
        self.requests: list[tuple[str, Any, dict[str, Any]]] = []
        self.port = 0
        self.active = 0
        self.aborted: list[str] = []
        self.answered: list[str] = []
        self._runner: web.AppRunner | None = None
        self._boot()

    def _boot(self) -> None:
        self.id = f"engine-{next(_numbers)}"
        ENGINES[self.id] = self
        self.held: dict[str, int] = {}
        """Offers whose blocks nobody has fetched or declined."""

        self.declined: set[str] = set()
        self.counts = {"loads": 0, "declined": 0, "loaded_tokens": 0}
        self.failed_loads = 0
        self.prompt_tokens = 0
        self.cache: set[tuple[Any, ...]] = set()

    async def start(self) -> FakeEngine:
        app = web.Application(client_max_size=1 << 26)
        for path in ("/v1/completions", "/v1/chat/completions"):
            app.router.add_post(path, self._complete)
        app.router.add_get("/health", self._health)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_post("/tokenize", self._tokenize)
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.05)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self.port).start()
        self.port = self._runner.addresses[0][1]
        return self

    async def stop(self) -> None:
        if self._runner is not None:
            runner, self._runner = self._runner, None
            await runner.cleanup()

    async def restart(self) -> None:
        """Come back on the same port as another process."""
        await self.stop()
        self._boot()
        await self.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def name(self) -> str:
        return f"127.0.0.1:{self.port}"

    def bodies(self, kind: str) -> list[dict[str, Any]]:
        """Return what it was asked: to "prefill", to "fetch" or to do "all" by itself."""
        found = []
        for _, headers, body in self.requests:
            if headers.get("X-Request-Id", "").startswith("canary"):
                continue
            params = body.get("kv_transfer_params") or {}
            asked = "all"
            if params.get("do_remote_decode"):
                asked = "prefill"
            elif params.get("do_remote_prefill"):
                asked = "fetch"
            if asked == kind:
                found.append(body)
        return found

    # --- handlers ---

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response(status=503 if self.faults.unhealthy else 200)

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": self.model}]})

    async def _tokenize(self, request: web.Request) -> web.Response:
        body = await request.json()
        text = body.get("prompt") or json.dumps(body.get("messages"))
        return web.json_response({"tokens": list(text.encode()), "count": len(text)})

    async def _metrics(self, request: web.Request) -> web.Response:
        lines = [
            f'vllm:num_requests_running{{model_name="{self.model}"}} {self.active}',
            'vllm:kv_cache_usage_perc{engine="0"} 0.25',
            'vllm:cache_config_info{block_size="16",num_gpu_blocks="1000"} 1',
            f"vllm:prompt_tokens_total {self.prompt_tokens}",
        ]
        if self.kvxfer:
            lines += [f"vllm:kvxfer_{name}_total {n}" for name, n in self.counts.items()]
            lines += [f'vllm:kvxfer_failures_total{{reason="made up"}} {self.failed_loads}']
        return web.Response(text="\n".join(lines) + "\n")

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        body = json.loads(await request.read())
        name = request.headers.get("X-Request-Id", "?")
        self.requests.append((request.path, request.headers.copy(), body))
        self.active += 1
        state = {"admitted": False, "params": None}
        try:
            response = await self._answer(request, body, name, state)
            self.answered.append(name)
            return response
        except asyncio.CancelledError:
            self.aborted.append(name)
            if state["admitted"] and state["params"]:
                self._decline(state["params"])
            raise
        finally:
            self.active -= 1

    async def _answer(
        self, request: web.Request, body: dict[str, Any], name: str, state: dict[str, Any]
    ) -> web.StreamResponse:
        faults = self.faults
        params = body.get("kv_transfer_params") or {}
        await asyncio.sleep(faults.admit_delay)
        state["admitted"] = True
        if params.get("do_remote_prefill"):
            state["params"] = params
        if faults.delay:
            await asyncio.sleep(faults.delay)
        if faults.hang:
            await asyncio.sleep(3600)
        if faults.drop:
            request.transport.abort()
            await asyncio.sleep(3600)
        if faults.statuses:
            status = faults.statuses.pop(0)
            if status != 200:
                return web.Response(
                    status=status, body=faults.body, content_type="application/json"
                )
        if faults.garbage is not None:
            return web.Response(body=faults.garbage, content_type="application/json")
        tokens = prompt_of(body)
        cached = 0
        if params.get("do_remote_prefill"):
            cached = await self._fetch(params, tokens)
            state["params"] = None
            await asyncio.sleep(faults.after_fetch)
        elif tuple(tokens) in self.cache:
            cached = len(tokens) - 1
        self.cache.add(tuple(tokens))
        self.prompt_tokens += len(tokens)
        texts = [f" {number}" for number in output(tokens, body.get("max_tokens") or 4)]
        if body.get("stream"):
            return await self._stream(request, texts)
        answer: dict[str, Any] = {
            "id": f"cmpl-{name}",
            "choices": [{"index": 0, "text": "".join(texts), "finish_reason": "length"}],
            "usage": {"prompt_tokens": len(tokens), "completion_tokens": len(texts)},
        }
        if self.details:
            answer["usage"]["prompt_tokens_details"] = {"cached_tokens": cached}
        if params.get("do_remote_decode") and not faults.no_params:
            answer["kv_transfer_params"] = self._offer(params, tokens)
        return web.json_response(answer)

    async def _stream(self, request: web.Request, texts: list[str]) -> web.StreamResponse:
        faults = self.faults
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        if faults.stream_error:
            error = {"error": {"message": "made up", "type": "InternalServerError", "code": 500}}
            await response.write(b"data: " + json.dumps(error).encode() + b"\n\n")
            return response
        for count, text in enumerate(texts):
            if count == faults.cut_after:
                request.transport.abort()
                await asyncio.sleep(3600)
            if count == faults.hang_after:
                await asyncio.sleep(3600)
            await response.write(event(text))
            await asyncio.sleep(faults.gap)
        await response.write(b"data: [DONE]\n\n")
        return response

    # --- KV that moves ---

    def _offer(self, params: dict[str, Any], tokens: list[int]) -> dict[str, Any]:
        name = params.get("transfer_id") or f"offer-{next(_numbers)}"
        if name not in self.declined:
            self.held[name] = len(tokens)
            asyncio.get_running_loop().call_later(self.faults.lease, self.held.pop, name, None)
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_engine_id": self.id,
            "remote_request_id": name,
            "remote_host": "127.0.0.1",
            "kvxfer": {
                "v": 2,
                "lease": self.faults.lease,
                "fields": {},
                "agents": {"g0": {"agents": [{"address": "127.0.0.1:1"}]}},
                "offer": {"name": name, "tokens": len(tokens), "digest": "", "first": {}},
            },
        }

    async def _fetch(self, params: dict[str, Any], tokens: list[int]) -> int:
        prefill = ENGINES[params["remote_engine_id"]]
        name = params.get("transfer_id") or params["remote_request_id"]
        while name not in prefill.held:  # it is being prefilled
            await asyncio.sleep(0.002)
        del prefill.held[name]
        if self.faults.loads_fail:
            self.failed_loads += 1
            return 0
        self.counts["loads"] += 1
        self.counts["loaded_tokens"] += len(tokens) - 1
        return len(tokens) - 1

    def _decline(self, params: dict[str, Any]) -> None:
        prefill = ENGINES[params["remote_engine_id"]]
        name = params.get("transfer_id") or params["remote_request_id"]
        prefill.held.pop(name, None)
        prefill.declined.add(name)
        self.counts["declined"] += 1


def event(text: str) -> bytes:
    return b"data: " + json.dumps({"choices": [{"index": 0, "text": text}]}).encode() + b"\n\n"


def prompt_of(body: dict[str, Any]) -> list[int]:
    prompt = body.get("prompt", json.dumps(body.get("messages")))
    if isinstance(prompt, str):
        return list(prompt.encode())
    return sum(prompt, []) if prompt and isinstance(prompt[0], list) else list(prompt)


def output(tokens: list[int], count: int) -> list[int]:
    """Return what any engine of the model answers."""
    state, found = sum(tokens) + len(tokens), []
    for _ in range(count):
        state = (state * 1103515245 + 12345) % 2**31
        found.append(state % 997)
    return found


@contextlib.asynccontextmanager
async def engines(prefill: int, decode: int, **how: Any):
    """Run so many engines."""
    found = [await FakeEngine(**how).start() for _ in range(prefill + decode)]
    try:
        yield found[:prefill], found[prefill:]
    finally:
        for engine in found:
            await engine.stop()
