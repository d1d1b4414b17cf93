"""Prefixes that many prompts begin with, put into the decode engines' caches ahead of need.

Each is prefilled once by a prefill engine and fetched by every decode engine, which then keeps it
as it keeps any prefix: until it needs the memory. Asking for it again now and then keeps it among
those used last. Requests that begin with it move only what follows.
"""

from __future__ import annotations

import asyncio
import enum
import json
import logging
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvxfer.serving import Reason

from .canary import cached_tokens
from .engines import Engine
from .exchange import Exchange
from .legs import LegError
from .metrics import Metrics
from .pool import Pool
from .prompts import (
    CHAT,
    COMPLETIONS,
    BadRequestError,
    Call,
    Measure,
)
from .routing import Route, Routing
from .settings import Role, Settings

logger = logging.getLogger("kvxfer.gateway")
MOST_PREFIXES = 10_000


class Fate(str, enum.Enum):
    """What became of a prefix on an engine."""

    PLACED = "placed"
    """Prefilled elsewhere and fetched."""

    COMPUTED = "computed"
    """The decode engine prefilled it: no prefill engine could."""

    KEPT = "kept"
    """It was there already."""

    FAILED = "failed"


@dataclass(slots=True)
class Prefix:
    """One prefix, and what is known of it."""

    path: str
    body: dict[str, Any]
    tokens: int = 0
    fates: dict[str, Fate] = field(default_factory=dict)
    """By engine."""

    cached: dict[str, int] = field(default_factory=dict)
    """Tokens of it that were there when it was last asked for, where the engine tells."""

    errors: dict[str, str] = field(default_factory=dict)

    def report(self) -> dict[str, Any]:
        """Return what people are told."""
        start = self.body.get("prompt") or self.body.get("messages")
        return {
            "prefix": json.dumps(start)[:80],
            "tokens": self.tokens,
            "engines": {
                name: {
                    "state": fate.value,
                    "cached_tokens": self.cached.get(name),
                    **({"error": self.errors[name]} if name in self.errors else {}),
                }
                for name, fate in self.fates.items()
            },
        }


def read_prefix(value: Any) -> Prefix:  # noqa: ANN401 - what JSON carries
    """Return a prefix as it is written: a body with `prompt` or `messages`.

    Raises
    ------
    BadRequestError
        It is none.
    """
    if not isinstance(value, dict) or ("prompt" in value) == ("messages" in value):
        raise BadRequestError("a prefix is an object with either 'prompt' or 'messages'")
    path = COMPLETIONS if "prompt" in value else CHAT
    body = {**value, "max_tokens": 1, "stream": False, "temperature": 0}
    if path == CHAT:
        body.pop("max_completion_tokens", None)
    return Prefix(path, body)


class Prewarmer:
    """Places prefixes and keeps them."""

    def __init__(
        self,
        settings: Settings,
        pool: Pool,
        routing: Routing,
        exchange: Exchange,
        measure: Measure,
        metrics: Metrics,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._settings, self._pool, self._routing = settings, pool, routing
        self._exchange, self._measure, self._metrics, self._now = exchange, measure, metrics, now
        self.prefixes: list[Prefix] = []
        self._until = 0.0
        self._task: asyncio.Task[None] | None = None

    async def stop(self) -> None:
        """Keep nothing any longer."""
        if self._task is not None:
            self._until = 0.0  # a cancellation that crosses with an answer is lost in Python 3.11
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None

    async def warm(self, prefixes: Sequence[Prefix]) -> list[dict[str, Any]]:
        """Place prefixes on every decode engine, one after the other; return the report."""
        if len(prefixes) > MOST_PREFIXES:
            raise BadRequestError(f"{len(prefixes)} prefixes; at most {MOST_PREFIXES} are kept")
        await self.stop()
        self.prefixes = list(prefixes)
        await self.round()
        return self.report()

    def keep(self, every: float, seconds: float) -> None:
        """Ask for the prefixes again every so many seconds, for so long."""
        if self._task is not None:
            self._task.cancel()  # two have asked at the same time
        self._until = self._now() + seconds
        self._task = asyncio.create_task(self._keep(every))

    def report(self) -> list[dict[str, Any]]:
        """Return what became of each prefix."""
        return [prefix.report() for prefix in self.prefixes]

    async def round(self) -> None:
        """Place what is missing, touch what is there."""
        engines = self._pool.usable(Role.DECODE, None)
        for prefix in self.prefixes:
            for engine in engines:
                await self._place(prefix, engine)
        self._metrics.prewarmed.clear()
        for engine in engines:
            there = sum(
                prefix.fates.get(engine.name) not in (None, Fate.FAILED) for prefix in self.prefixes
            )
            self._metrics.prewarmed.set(engine.name, to=there)

    async def _keep(self, every: float) -> None:
        while self._now() < self._until:
            await asyncio.sleep(every)
            await self.round()

    async def _place(self, prefix: Prefix, decode: Engine) -> None:
        headers = {"X-Request-Id": f"prewarm-{uuid.uuid4().hex}"}
        if self._settings.engine_key:
            headers["Authorization"] = f"Bearer {self._settings.engine_key}"
        call = self._measure.call(prefix.path, dict(prefix.body), headers)
        prefix.tokens = call.tokens
        prefix.errors.pop(decode.name, None)
        try:
            prefill = None
            if decode.index.match(call.hashes) < len(call.hashes):
                prefill = self._routing.pick_prefill(call, decode)
            fate = await self._ask(prefix, call, decode, prefill)
            cached = prefix.cached.get(decode.name)
            if fate is not Fate.FAILED and cached is not None and cached < call.tokens // 2:
                # It has been evicted, or the prefill engine failed.
                fate = Fate.COMPUTED
            prefix.fates[decode.name] = fate
        except LegError as error:
            logger.warning("prewarm: %s", error)
            prefix.fates[decode.name] = Fate.FAILED
            prefix.errors[decode.name] = str(error)

    async def _ask(
        self, prefix: Prefix, call: Call, decode: Engine, prefill: Engine | None
    ) -> Fate:
        cached = call.cached(decode.index.match(call.hashes))
        there = bool(call.hashes) and decode.index.match(call.hashes) == len(call.hashes)
        uncached = call.tokens - cached
        elsewhere = 0 if prefill is None else call.cached(prefill.index.match(call.hashes))
        route = Route(decode, prefill, Reason.LONG, uncached, call.tokens - elsewhere)
        answer = await self._exchange.follow(call, route)
        answer.close(complete=answer.whole)
        if answer.response.status != 200:
            prefix.errors[decode.name] = f"status {answer.response.status}: {answer.first[:200]!r}"
            return Fate.FAILED
        found = cached_tokens(answer.first)
        if found is not None:
            prefix.cached[decode.name] = found
        if there:
            return Fate.KEPT
        return Fate.COMPUTED if prefill is None else Fate.PLACED
