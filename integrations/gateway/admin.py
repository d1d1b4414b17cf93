"""`/admin`: engines register and are drained, prefixes are placed. Needs the admin key."""

from __future__ import annotations

import asyncio
import hmac
from typing import Any

from aiohttp import web

from kvxfer.errors import InvalidError
from kvxfer.serving.checks import at_least, positive

from .engines import Engine
from .gateway import Gateway
from .prewarm import read_prefix
from .prompts import BadRequestError
from .replies import error_response
from .settings import Entry

KEEP_EVERY = 60.0  # seconds


class Admin:
    """Answers what operators and engines ask. Clients have no access: this is where addresses that
    the gateway connects to come from."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    def add_routes(self, app: web.Application) -> None:
        """Add the paths."""
        app.router.add_get("/admin/engines", self._guarded(self.engines))
        app.router.add_post("/admin/engines", self._guarded(self.register))
        app.router.add_delete("/admin/engines", self._guarded(self.remove))
        app.router.add_get("/admin/prewarm", self._guarded(self.prewarmed))
        app.router.add_post("/admin/prewarm", self._guarded(self.prewarm))

    async def engines(self, request: web.Request) -> web.Response:
        """Return the state of every engine."""
        return web.json_response({"engines": [described(one) for one in self._gateway.pool]})

    async def register(self, request: web.Request) -> web.Response:
        """Add an engine, or take its heartbeat."""
        entry = Entry.read(await _body(request))
        engine = self._gateway.pool.register(entry)
        return web.json_response(
            {**described(engine), "heartbeat_within": self._gateway.settings.register_ttl}
        )

    async def remove(self, request: web.Request) -> web.Response:
        """Drain an engine; with ``wait=SECONDS`` answer when it is gone, or not yet."""
        url = request.query.get("url", "")
        engine = self._gateway.pool.get(url)
        if engine is None:
            return error_response(404, f"there is no engine at {url!r}")
        engine.dismissed = True
        task = self._gateway.pool.drain(engine)
        try:
            wait = float(request.query.get("wait", 0))
        except ValueError:
            return error_response(400, "wait is a number of seconds")
        if wait > 0:
            await asyncio.wait({task}, timeout=min(wait, self._gateway.settings.drain_timeout))
        done = task.done() and not task.cancelled()
        return web.json_response(
            {**described(engine), "removed": done, "idle": bool(done and task.result())},
            status=200 if done else 202,
        )

    async def prewarm(self, request: web.Request) -> web.Response:
        """Place prefixes on all decode engines; with `keep_seconds`, keep them there."""
        body = await _body(request)
        if not isinstance(body, dict) or not isinstance(body.get("prefixes"), list):
            raise BadRequestError('write {"prefixes": [{"prompt": ...} or {"messages": ...}]}')
        keep, every = body.get("keep_seconds", 0), body.get("every_seconds", KEEP_EVERY)
        if not isinstance(keep, (int, float)) or not isinstance(every, (int, float)):
            raise BadRequestError("keep_seconds and every_seconds are numbers of seconds")
        at_least("keep_seconds", keep)
        positive("every_seconds", every)
        prewarmer = self._gateway.prewarmer
        report = await prewarmer.warm([read_prefix(one) for one in body["prefixes"]])
        if keep > 0:
            prewarmer.keep(every, keep)
        return web.json_response({"prefixes": report})

    async def prewarmed(self, request: web.Request) -> web.Response:
        """Return what became of the prefixes."""
        return web.json_response({"prefixes": self._gateway.prewarmer.report()})

    def _guarded(self, handler: Any) -> Any:  # noqa: ANN401 - an aiohttp handler
        async def guarded(request: web.Request) -> web.StreamResponse:
            key = self._gateway.settings.admin_key
            if key is None:
                return error_response(403, "/admin is closed: the gateway has no admin key")
            if not is_key(request, key):
                return error_response(401, "/admin needs the admin key")
            try:
                response: web.StreamResponse = await handler(request)
                return response
            except (InvalidError, BadRequestError) as error:
                return error_response(400, str(error))

        return guarded


def is_key(request: web.Request, key: str) -> bool:
    """Whether a request has this key."""
    given = request.headers.get("Authorization", "").removeprefix("Bearer ")
    return hmac.compare_digest(given.encode(errors="surrogateescape"), key.encode())


def described(engine: Engine) -> dict[str, Any]:
    """Return what is known of an engine."""
    return {
        "url": engine.url,
        "role": engine.role.value,
        "state": engine.state,
        "source": engine.source,
        "models": list(engine.model_ids),
        "inflight": engine.inflight,
        "inflight_tokens": round(engine.inflight_tokens),
        "load": round(engine.load, 4),
        "tokens_per_second": engine.rate.rate,
        "prefix_blocks": len(engine.index),
    }


async def _body(request: web.Request) -> Any:  # noqa: ANN401 - what JSON carries
    try:
        return await request.json()
    except ValueError as error:
        raise BadRequestError(f"the body is no JSON: {error}") from error
