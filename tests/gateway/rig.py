"""A gateway between fake engines, and a client."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
from collections.abc import Callable, Mapping
from typing import Any

import aiohttp
from gateway.fake import FakeEngine, engines, output, prompt_of

from kvxfer.integrations.gateway.app import GATEWAY, serve
from kvxfer.integrations.gateway.settings import Entry, Role, Settings
from kvxfer.serving import Policy
from kvxfer.serving.prometheus import Samples, parse

PATIENCE = 30.0  # seconds; what is waited for takes milliseconds
LONG = list(range(10, 310))
SHORT = list(range(10, 30))
ADMIN = {"Authorization": "Bearer admin"}


def in_loop(test: Callable[..., Any]) -> Callable[..., None]:
    """Run a test that is a coroutine."""

    @functools.wraps(test)
    def run(*arguments: Any, **named: Any) -> None:
        async def bounded() -> None:
            await asyncio.wait_for(test(*arguments, **named), 60)

        asyncio.run(bounded())

    return run


class Rig:
    """What a test has in hand."""

    def __init__(self, prefill: list[FakeEngine], decode: list[FakeEngine]) -> None:
        self.prefill, self.decode = prefill, decode
        self.gateway: Any = None
        self.port = 0
        self.client: aiohttp.ClientSession = None  # type: ignore[assignment]

    async def post(
        self, body: dict[str, Any], path: str = "/v1/completions", **more: Any
    ) -> tuple[int, Any, Mapping[str, str]]:
        """Return status, decoded body and headers of an answer."""
        async with self.client.post(path, json=body, **more) as answer:
            text = await answer.read()
            with contextlib.suppress(ValueError):
                return answer.status, json.loads(text), answer.headers
            return answer.status, text, answer.headers

    async def ask(self, prompt: Any, **more: Any) -> tuple[str, str]:
        """Return place and reason of a request whose answer is checked."""
        body = {"model": "m", "prompt": prompt, "max_tokens": 6, **more}
        status, answer, headers = await self.post(body)
        assert status == 200, answer
        wanted = "".join(f" {number}" for number in output(prompt_of(body), body["max_tokens"]))
        if body.get("stream"):
            events = answer.decode().split("\n\n")
            assert events[-2:] == ["data: [DONE]", ""]
            pieces = [json.loads(one[6:])["choices"][0]["text"] for one in events[:-2]]
            assert "".join(pieces) == wanted
        else:
            assert answer["choices"][0]["text"] == wanted
        return headers["X-Kvxfer-Place"], headers["X-Kvxfer-Reason"]

    async def metrics(self) -> Samples:
        async with self.client.get("/metrics") as answer:
            assert answer.status == 200
            return parse(await answer.text())

    async def counted(self, name: str, **labels: str) -> float:
        return (await self.metrics()).total(f"kvxfer_gateway_{name}", **labels) or 0.0

    async def until(self, condition: Callable[[], Any]) -> None:
        """Wait for something that must come."""
        deadline = asyncio.get_running_loop().time() + PATIENCE
        while not condition():
            assert asyncio.get_running_loop().time() < deadline, "it never came to be"
            await asyncio.sleep(0.01)

    def engine(self, fake: FakeEngine) -> Any:
        """Return what the gateway knows of an engine."""
        return self.gateway.pool.get(fake.url)

    def idle(self) -> None:
        """Check that nothing is left of any request, here or there."""
        assert self.gateway.admission.inside == 0
        for fake in (*self.prefill, *self.decode):
            engine = self.engine(fake)
            if engine is not None:
                assert engine.inflight == 0, engine
                assert engine.inflight_tokens == 0
                assert engine.context_tokens == 0
            assert not fake.held, f"{fake.name} still holds {fake.held}"
            assert fake.active == 0

    async def settle(self) -> None:
        """Wait until nothing is left of any request."""

        def settled() -> bool:
            try:
                self.idle()
            except AssertionError:
                return False
            return True

        with contextlib.suppress(AssertionError):
            await self.until(settled)
        self.idle()


@contextlib.asynccontextmanager
async def rig(prefill: int = 1, decode: int = 1, how: dict[str, Any] | None = None, **more: Any):
    """Run engines with a gateway before them; settings that aren't given are quick ones."""
    async with engines(prefill, decode, **(how or {})) as (prefills, decodes):
        found = Rig(prefills, decodes)
        named = {
            "engines": tuple(
                Entry(engine.url, role)
                for role, group in ((Role.PREFILL, prefills), (Role.DECODE, decodes))
                for engine in group
            ),
            "policy": Policy(threshold=128, floor=32),
            "watch_interval": 0.05,
            "canary_interval": 0.0,
            "abort_grace": 0.1,
            "breaker_cooldown": 0.2,
            "admin_key": "admin",
        }
        runner, port = await serve(Settings(**{**named, **more}), "127.0.0.1", 0)
        found.gateway, found.port = runner.app[GATEWAY], port
        try:
            async with aiohttp.ClientSession(f"http://127.0.0.1:{port}") as client:
                found.client = client
                yield found
        finally:
            await runner.cleanup()
