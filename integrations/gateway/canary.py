"""Proves that KV moves: a made-up prompt is prefilled on one engine and decoded on the other.

Deployments run for weeks in which every decode engine prefills again and nobody notices.
"""

from __future__ import annotations

import asyncio
import enum
import json
import logging
import random
import time
import uuid
from collections.abc import Callable

import aiohttp

from kvxfer.serving.prometheus import Samples

from .engines import Engine
from .legs import LegError, Legs
from .metrics import Metrics
from .monitor import EXTERNAL_HITS, LOADS, Monitor
from .pool import Pool
from .prompts import COMPLETIONS, Call, Measure
from .settings import Role, Settings

logger = logging.getLogger("kvxfer.gateway")
LOWEST, HIGHEST = 10, 400
"""Token ids that any vocabulary has."""

PATIENCE = 3.0  # seconds until an engine's metrics must show what it did
AGAIN = 15.0  # seconds after which a pair that failed is tried again


class Outcome(str, enum.Enum):
    """What a canary showed."""

    MOVED = "moved"
    NOT_MOVED = "not_moved"
    UNKNOWN = "unknown"
    """The decode engine says nothing by which it could be told."""

    FAILED = "failed"
    """An engine failed, which says nothing about the way between them."""


class Canaries:
    """Sends a canary by each pair of engines: when one of them comes up, and now and then."""

    def __init__(
        self,
        settings: Settings,
        pool: Pool,
        legs: Legs,
        monitor: Monitor,
        measure: Measure,
        metrics: Metrics,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._settings, self._pool, self._legs, self._monitor = settings, pool, legs, monitor
        self._measure, self._metrics, self._now = measure, metrics, now
        self._due: dict[tuple[str, str], float] = {}
        self._news = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        monitor.on_up.append(self._up)
        pool.removed.append(self._gone)

    def start(self) -> None:
        """Send them from now on."""
        if self._settings.canary_interval > 0:
            self._task = asyncio.create_task(self._loop())

    async def stop(self) -> None:
        """Send no more."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def send(self, prefill: Engine, decode: Engine) -> Outcome:
        """Send one canary, and note what it showed."""
        outcome = await self._outcome(prefill, decode)
        self._metrics.canaries.add(outcome.value)
        if outcome is Outcome.NOT_MOVED:
            if not self._monitor.counts(decode):  # else it is counted there
                self._metrics.reprefills.add(decode.name)
            logger.error(
                "%s -> %s: the KV of a canary did not arrive, the decode engine prefilled it "
                "again; this pair is not used. Check that both run the same connector and that the "
                "decode engine can reach the prefill engine",
                prefill.name,
                decode.name,
            )
        elif outcome is Outcome.UNKNOWN:
            logger.warning(
                "%s -> %s: whether KV moves is not known; the decode engine has neither metrics of "
                "its connector nor cached_tokens (--enable-prompt-tokens-details)",
                prefill.name,
                decode.name,
            )
        if outcome is not Outcome.FAILED:
            moves = outcome is not Outcome.NOT_MOVED
            self._pool.set_pair(prefill, decode, moves)
            self._metrics.pair_moves.set(prefill.name, decode.name, to=float(moves))
        return outcome

    async def _outcome(self, prefill: Engine, decode: Engine) -> Outcome:
        length = 2 * max(prefill.block_tokens, decode.block_tokens) + 1
        generator = random.Random(uuid.uuid4().hex)
        body: dict[str, object] = {
            "prompt": [generator.randint(LOWEST, HIGHEST) for _ in range(length)],
            "max_tokens": 1,
            "temperature": 0,
        }
        if decode.model_ids:
            body["model"] = decode.model_ids[0]
        headers = {"X-Request-Id": f"canary-{uuid.uuid4().hex}"}
        if self._settings.engine_key:
            headers["Authorization"] = f"Bearer {self._settings.engine_key}"
        call = self._measure.call(COMPLETIONS, body, headers)
        before = await self._monitor.samples(decode)
        try:
            grant = await self._legs.prefill(call, prefill, call.tokens)
            try:
                answer = await self._legs.open(call, decode, grant.params, call.tokens)
                answer.close(complete=answer.whole)
            finally:
                grant.release()
            self._monitor.remote(decode)
        except LegError as error:
            if error.kind.value == "no_params":
                return Outcome.NOT_MOVED
            logger.warning("canary: %s", error)
            return Outcome.FAILED
        if answer.response.status != 200:
            return Outcome.FAILED
        cached = cached_tokens(answer.first)
        if cached is not None:
            return Outcome.MOVED if cached >= length // 2 else Outcome.NOT_MOVED
        return await self._by_metrics(call, decode, before)

    async def _by_metrics(self, call: Call, decode: Engine, before: Samples | None) -> Outcome:
        deadline = self._now() + PATIENCE
        while before is not None:
            after = await self._monitor.samples(decode)
            if after is None:
                return Outcome.FAILED
            loads, hits = after.total(LOADS[0]), after.total(EXTERNAL_HITS)
            if loads is None and hits is None:
                return Outcome.UNKNOWN
            if (loads or 0.0) > (before.total(LOADS[0]) or 0.0):
                return Outcome.MOVED
            if loads is None and (hits or 0.0) - (before.total(EXTERNAL_HITS) or 0.0) > 0:
                return Outcome.MOVED
            if self._now() >= deadline:
                return Outcome.NOT_MOVED
            await asyncio.sleep(0.1)
        return Outcome.UNKNOWN

    def _up(self, engine: Engine) -> None:
        others = self._pool.of(Role.DECODE if engine.role is Role.PREFILL else Role.PREFILL)
        for other in others:
            pair = (engine, other) if engine.role is Role.PREFILL else (other, engine)
            self._due[pair[0].url, pair[1].url] = self._now()
        self._news.set()

    def _gone(self, engine: Engine) -> None:
        self._due = {pair: at for pair, at in self._due.items() if engine.url not in pair}

    async def _loop(self) -> None:
        while True:
            for pair, at in list(self._due.items()):
                prefill, decode = (self._pool.get(url) for url in pair)
                if at > self._now() or prefill is None or decode is None:
                    continue
                if not (prefill.usable(self._now(), None) and decode.usable(self._now(), None)):
                    continue
                both = prefill.models is not None and decode.models is not None
                if both and not (prefill.models or set()) & (decode.models or set()):
                    continue  # they have nothing to do with each other
                try:
                    outcome = await self.send(prefill, decode)
                except (aiohttp.ClientError, OSError, ValueError):
                    logger.exception("canary")
                    outcome = Outcome.FAILED
                fine = outcome in (Outcome.MOVED, Outcome.UNKNOWN)
                interval = self._settings.canary_interval
                wait = interval if fine else min(interval, AGAIN)
                if pair in self._due:
                    self._due[pair] = self._now() + wait * random.uniform(0.8, 1.2)
            self._news.clear()
            try:
                await asyncio.wait_for(self._news.wait(), self._settings.watch_interval)
            except asyncio.TimeoutError:
                pass


def cached_tokens(body: bytes) -> int | None:
    """Return how much of a prompt an engine says it did not compute; None if it doesn't say."""
    try:
        details = json.loads(body)["usage"]["prompt_tokens_details"]
        return None if details is None else int(details["cached_tokens"])
    except (ValueError, LookupError, TypeError):
        return None
