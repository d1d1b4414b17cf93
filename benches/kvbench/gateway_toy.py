"""A proxy built as vLLM's examples are: a client session for each leg of each request.

It is here to be compared with; what it does not do is what makes it short.
"""

from __future__ import annotations

import argparse
import uuid

import aiohttp
from aiohttp import web


def make_app(prefill: str, decode: str) -> web.Application:
    async def complete(request: web.Request) -> web.StreamResponse:
        body = await request.json()
        headers = {"X-Request-Id": uuid.uuid4().hex}
        first = {
            **body,
            "stream": False,
            "max_tokens": 1,
            "kv_transfer_params": {"do_remote_decode": True, "do_remote_prefill": False},
        }
        first.pop("stream_options", None)
        async with (
            aiohttp.ClientSession() as session,
            session.post(prefill + request.path, json=first, headers=headers) as answer,
        ):
            params = (await answer.json())["kv_transfer_params"]
        second = {**body, "kv_transfer_params": params}
        async with (
            aiohttp.ClientSession() as session,
            session.post(decode + request.path, json=second, headers=headers) as answer,
        ):
            kind = answer.headers["Content-Type"]
            response = web.StreamResponse(status=answer.status, headers={"Content-Type": kind})
            await response.prepare(request)
            async for part in answer.content.iter_chunked(1024):
                await response.write(part)
            await response.write_eof()
            return response

    async def health(request: web.Request) -> web.Response:
        return web.Response()

    app = web.Application(client_max_size=64 << 20)
    app.router.add_post("/v1/completions", complete)
    app.router.add_get("/health", health)
    return app


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--prefill", required=True)
    parser.add_argument("--decode", required=True)
    parser.add_argument("--port", type=int, required=True)
    options = parser.parse_args()
    app = make_app(options.prefill, options.decode)
    web.run_app(app, host="127.0.0.1", port=options.port, print=None, access_log=None)


if __name__ == "__main__":
    main()
