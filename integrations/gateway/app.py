"""The gateway's address: OpenAI's paths, health, metrics and /admin."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import time
import uuid
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
from aiohttp import web

from kvxfer.serving.prometheus import CONTENT_TYPE

from .admin import Admin, is_key
from .admission import RefusedError
from .gateway import Gateway
from .legs import Kind, LegError
from .prompts import CHAT, COMPLETIONS, BadRequestError, Call
from .replies import error_response
from .settings import Role, Settings

logger = logging.getLogger("kvxfer.gateway")
GATEWAY: web.AppKey[Gateway] = web.AppKey("gateway", Gateway)
UNANSWERED = (aiohttp.ClientError, asyncio.TimeoutError, OSError)
PASSED_ON = ("traceparent", "tracestate")
_ID = re.compile(r"[\w.:-]{1,128}", re.ASCII)


def make_app(settings: Settings) -> web.Application:
    """Return the application. Run it so that handlers are cancelled when their client leaves."""
    gateway = Gateway(settings)
    app = web.Application(client_max_size=settings.max_body)
    app[GATEWAY] = gateway
    routes = Routes(gateway)
    app.cleanup_ctx.append(routes.lifetime)
    for path in (COMPLETIONS, CHAT):
        app.router.add_post(path, routes.complete)
    app.router.add_get("/v1/models", routes.models)
    app.router.add_get("/health", routes.health)
    app.router.add_get("/metrics", routes.metrics)
    Admin(gateway).add_routes(app)
    return app


class Routes:
    """Handlers of what clients ask."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._ids: set[str] = set()

    async def lifetime(self, app: web.Application) -> AsyncIterator[None]:
        """Start and stop the gateway with the application."""
        try:
            await self._gateway.start()
            yield
        finally:
            await self._gateway.stop()

    async def complete(self, request: web.Request) -> web.StreamResponse:
        """Answer a completion or chat completion."""
        arrived = time.monotonic()
        name = self._name(request)
        self._ids.add(name)
        status = 500
        try:
            response = await self._complete(request, name, arrived)
            status = response.status
            return response
        except web.HTTPException as error:
            status = error.status
            raise
        except asyncio.CancelledError:
            status = 499  # the client left
            raise
        finally:
            self._ids.discard(name)
            self._gateway.metrics.requests.add(request.path, str(status))

    async def models(self, request: web.Request) -> web.Response:
        """Return what the decode engines serve, in the words of one of them."""
        if not self._admitted(request):
            return error_response(401, "the key is not known here")
        gateway = self._gateway
        for engine in gateway.pool.usable(Role.DECODE, None):
            timeout = aiohttp.ClientTimeout(total=gateway.settings.health_timeout)
            headers = self._headers(request, "models")
            try:
                async with gateway.legs.session.get(
                    engine.at("/v1/models"), headers=headers, timeout=timeout
                ) as answer:
                    body = await answer.read()
                    return web.Response(
                        status=answer.status, body=body, content_type=answer.content_type
                    )
            except UNANSWERED as error:
                logger.warning("%s: models: %r", engine.name, error)
        return error_response(503, "no decode engine answers", retry_after=2)

    async def health(self, request: web.Request) -> web.Response:
        """Answer 200 while a request can be served."""
        pool = self._gateway.pool
        up = {role.value: len(pool.usable(role, None)) for role in Role}
        return web.json_response(up, status=200 if up[Role.DECODE.value] else 503)

    async def metrics(self, request: web.Request) -> web.Response:
        """Return the metrics."""
        text = self._gateway.exposition()
        return web.Response(body=text.encode(), headers={"Content-Type": CONTENT_TYPE})

    async def _complete(
        self, request: web.Request, name: str, arrived: float
    ) -> web.StreamResponse:
        gateway = self._gateway
        if not self._admitted(request):
            return error_response(401, "the key is not known here")
        try:
            call = await self._call(request, name)
        except BadRequestError as error:
            return error_response(400, str(error))
        models = gateway.pool.models()
        if call.model is not None and models and call.model not in models:
            known = ", ".join(sorted(models))
            return error_response(404, f"there is no model {call.model!r}; there are: {known}")
        stage = "waiting"
        try:
            async with gateway.admission.slot():
                gateway.metrics.queued.observe(value=time.monotonic() - arrived)
                answer, route = await gateway.exchange.answer(call)
                stage = "streaming"
                return await gateway.relay.send(request, answer, route, arrived)
        except RefusedError as error:
            gateway.metrics.refused.add(error.reason)
            return error_response(error.status, str(error), error.retry_after)
        except LegError as error:
            return _failed(error)
        except asyncio.CancelledError:
            gateway.metrics.left.add(stage)
            raise

    async def _call(self, request: web.Request, name: str) -> Call:
        gateway = self._gateway
        try:
            body = json.loads(await request.read())
        except (ValueError, RecursionError) as error:
            raise BadRequestError(f"the body is no JSON: {error}") from error
        if not isinstance(body, dict):
            raise BadRequestError("the body is no object")
        call = gateway.measure.call(request.path, body, self._headers(request, name))
        if gateway.settings.tokenize and call.text_bytes and call.whole is None:
            return await self._tokenized(call)
        return call

    async def _tokenized(self, call: Call) -> Call:
        """Return the call with the tokens that an engine finds; as it is where it doesn't."""
        gateway = self._gateway
        engine = gateway.routing.pick_decode(call)
        if engine is None:
            return call
        names = ("model", "prompt", "messages", "tools", "chat_template", "chat_template_kwargs")
        body = {name: call.body[name] for name in names if call.body.get(name) is not None}
        timeout = aiohttp.ClientTimeout(total=gateway.settings.health_timeout)
        try:
            async with gateway.legs.session.post(
                engine.at("/tokenize"),
                data=json.dumps(body).encode(),
                headers=call.headers,
                timeout=timeout,
                raise_for_status=True,
            ) as answer:
                tokens = (await answer.json())["tokens"]
            return gateway.measure.tokenized(call, list(tokens))
        except (*UNANSWERED, LookupError, TypeError) as error:
            logger.warning("%s: tokenize: %r", engine.name, error)
            return call

    def _admitted(self, request: web.Request) -> bool:
        keys = self._gateway.settings.api_keys
        if not keys:
            return True
        return any([is_key(request, key) for key in keys])

    def _headers(self, request: web.Request, name: str) -> dict[str, str]:
        """Return what engines are sent: nothing else that a client says reaches them."""
        headers = {"X-Request-Id": name}
        settings = self._gateway.settings
        if settings.engine_key is not None:
            headers["Authorization"] = f"Bearer {settings.engine_key}"
        passed_on: tuple[str, ...] = PASSED_ON
        if settings.engine_key is None and not settings.api_keys:
            passed_on = ("Authorization", *PASSED_ON)
        for header in passed_on:
            value = request.headers.get(header, "")
            if value and value.isprintable():  # what can't be sent on would look like a bad engine
                headers[header] = value
        return headers

    def _name(self, request: web.Request) -> str:
        """Return the request's id in both legs: the client's, unless it is odd or in use."""
        given = request.headers.get("X-Request-Id", "")
        if not _ID.fullmatch(given):
            return uuid.uuid4().hex
        return f"{given}-{uuid.uuid4().hex[:8]}" if given in self._ids else given


def _failed(error: LegError) -> web.Response:
    if error.body and error.kind in (Kind.REFUSED, Kind.BUSY, Kind.ERROR):
        headers = {"Content-Type": "application/json"}
        if error.kind is Kind.BUSY:
            headers["Retry-After"] = "1"
        return web.Response(status=error.status, body=error.body, headers=headers)
    return error_response(error.status if error.status >= 500 else 502, str(error), 1)


async def serve(settings: Settings, host: str, port: int) -> tuple[web.AppRunner, int]:
    """Start to serve; return what stops it with `cleanup()`, and the port."""
    runner = web.AppRunner(
        make_app(settings), handler_cancellation=True, access_log=None, keepalive_timeout=75.0
    )
    await runner.setup()
    try:
        site = web.TCPSite(runner, host, port, backlog=1024)
        await site.start()
    except BaseException:
        await runner.cleanup()
        raise
    found: Any = runner.addresses[0]
    return runner, int(found[1])
