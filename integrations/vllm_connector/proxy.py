"""An example proxy for disaggregated prefill; run it with ``python -m``.

It sends each request to a prefill engine and then, with what that answered, to a decode engine, and
streams the decode engine's answer. With ``--flow concurrent`` it asks both at once: what a prefill
engine answered first says where its KV can be fetched. When the prefill side fails, the decode
engine prefills by itself.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import logging
import uuid
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
from aiohttp import web

PATHS = ("/v1/completions", "/v1/chat/completions")
MAX_BODY = 64 << 20  # bytes
logger = logging.getLogger("kvxfer.proxy")


class Prefiller:
    """One prefill engine, and what it has said about where its KV can be fetched."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.known: dict[str, Any] | None = None


class Proxy:
    """Routes requests round robin over prefill and over decode engines."""

    def __init__(self, prefill: list[str], decode: list[str], flow: str, timeout: float) -> None:
        self._prefillers = itertools.cycle([Prefiller(url) for url in prefill])
        self._decoders = itertools.cycle(decode)
        self._concurrent, self._timeout = flow == "concurrent", timeout
        self._session: aiohttp.ClientSession | None = None
        self._tasks: set[asyncio.Task[Any]] = set()

    async def lifetime(self, app: web.Application) -> AsyncIterator[None]:
        unlimited = aiohttp.ClientTimeout(total=None)
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(timeout=unlimited, connector=connector) as session:
            self._session = session
            yield
            for task in self._tasks:
                task.cancel()

    async def complete(self, request: web.Request) -> web.StreamResponse:
        """Answer one request of the OpenAI API."""
        body = await request.json()
        if not isinstance(body, dict):
            raise web.HTTPBadRequest(text="the body must be a JSON object")
        body.pop("kv_transfer_params", None)  # not for clients to say where KV is fetched
        prefiller, decoder = next(self._prefillers), next(self._decoders)
        headers = {"X-Request-Id": request.headers.get("X-Request-Id") or uuid.uuid4().hex}
        if "Authorization" in request.headers:
            headers["Authorization"] = request.headers["Authorization"]
        prefill = None
        if self._concurrent and prefiller.known is not None:
            # The decode side fetches while the prefill runs.
            transfer = uuid.uuid4().hex
            params: dict[str, Any] | None = {**prefiller.known, "transfer_id": transfer}
            prefill = asyncio.create_task(
                self._prefill(prefiller, request.path, body, headers, transfer)
            )
            self._tasks.add(prefill)  # the loop itself keeps no task alive
            prefill.add_done_callback(self._tasks.discard)
        else:
            params = await self._prefill(prefiller, request.path, body, headers, None)
        return await self._decode(request, decoder + request.path, body, params, headers, prefill)

    async def _prefill(
        self,
        prefiller: Prefiller,
        path: str,
        body: dict[str, Any],
        headers: dict[str, str],
        transfer: str | None,
    ) -> dict[str, Any] | None:
        """Have the prompt computed; return kv_transfer_params for the decode side, None if none."""
        assert self._session is not None
        params: dict[str, Any] = {"do_remote_decode": True, "do_remote_prefill": False}
        if transfer is not None:
            params["transfer_id"] = transfer
        short = {**body, "stream": False, "n": 1, "max_tokens": 1, "kv_transfer_params": params}
        for name in ("stream_options", "min_tokens"):
            short.pop(name, None)
        if "max_completion_tokens" in short:
            short["max_completion_tokens"] = 1
        try:
            async with self._session.post(
                prefiller.url + path,
                json=short,
                headers=headers,
                timeout=aiohttp.ClientTimeout(total=self._timeout),
            ) as answer:
                answer.raise_for_status()
                found: dict[str, Any] | None = (await answer.json()).get("kv_transfer_params")
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            logger.warning("%s: %r; the decode engine prefills", prefiller.url, error)
            prefiller.known = None  # it may come back as another
            return None
        if found is None:
            logger.warning("%s answered without kv_transfer_params", prefiller.url)
        else:
            prefiller.known = _standing(found)
        return found

    async def _decode(
        self,
        request: web.Request,
        url: str,
        body: dict[str, Any],
        params: dict[str, Any] | None,
        headers: dict[str, str],
        prefill: asyncio.Task[Any] | None,
    ) -> web.StreamResponse:
        given = body if params is None else {**body, "kv_transfer_params": params}
        opening = asyncio.create_task(self._open(url, given, headers))
        try:
            if prefill is not None:
                await asyncio.wait({opening, prefill}, return_when=asyncio.FIRST_COMPLETED)
                if not opening.done() and prefill.result() is None:
                    opening.cancel()  # it waits for what will not come
                    opening = asyncio.create_task(self._open(url, body, headers))
            answer, piece = await opening
        except aiohttp.ClientError as error:
            raise web.HTTPBadGateway(text=f"decode engine {url}: {error}") from error
        finally:
            opening.cancel()
        async with answer:
            kind = answer.headers.get("Content-Type", "application/json")
            response = web.StreamResponse(status=answer.status, headers={"Content-Type": kind})
            await response.prepare(request)
            while piece:
                await response.write(piece)
                piece = await answer.content.readany()
            await response.write_eof()
            return response

    async def _open(
        self, url: str, body: dict[str, Any], headers: dict[str, str]
    ) -> tuple[aiohttp.ClientResponse, bytes]:
        """Send a request; return the answer with the first bytes of its body."""
        assert self._session is not None
        answer = await self._session.post(url, json=body, headers=headers)
        try:
            return answer, await answer.content.readany()
        except BaseException:
            answer.close()
            raise


def _standing(params: dict[str, Any]) -> dict[str, Any] | None:
    """Return of an answer what holds for later requests too, None if its engine serves serially."""
    ours = params.get("kvxfer", {})
    if not ours.get("agents"):
        return None
    kept = {name: value for name, value in ours.items() if name != "offer"}
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": params.get("remote_engine_id"),
        "kvxfer": kept,
    }


def make_app(prefill: list[str], decode: list[str], flow: str, timeout: float) -> web.Application:
    proxy = Proxy(prefill, decode, flow, timeout)
    app = web.Application(client_max_size=MAX_BODY)
    app.cleanup_ctx.append(proxy.lifetime)
    for path in PATHS:
        app.router.add_post(path, proxy.complete)
    return app


def main() -> None:
    parser = argparse.ArgumentParser(description="Proxy for disaggregated prefill with kvxfer")
    parser.add_argument("--prefill", action="append", required=True, help="URL; may be repeated")
    parser.add_argument("--decode", action="append", required=True, help="URL; may be repeated")
    parser.add_argument("--flow", choices=("serial", "concurrent"), default="serial")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--timeout", type=float, default=120, help="seconds for a prefill")
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO)
    app = make_app(options.prefill, options.decode, options.flow, options.timeout)
    web.run_app(app, host=options.host, port=options.port, handler_cancellation=True)


if __name__ == "__main__":
    main()
