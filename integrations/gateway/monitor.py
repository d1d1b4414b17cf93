"""Looks at engines all the time: are they there, how full are they, are they still the same."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable

import aiohttp

from kvxfer.serving.prometheus import Samples, parse

from .engines import Engine
from .legs import Legs
from .metrics import Metrics
from .models import model_ids
from .pool import Pool
from .rates import LinkMeter
from .settings import Role, Settings

logger = logging.getLogger("kvxfer.gateway")
CONNECTOR = "vllm:kvxfer_"
EXTERNAL_HITS = "vllm:external_prefix_cache_hits_total"
LOADS = (f"{CONNECTOR}loads_total", f"{CONNECTOR}declined_total")
FAILED_LOADS = f"{CONNECTOR}failures_total"
_WANTED = frozenset(
    {
        "vllm:kv_cache_usage_perc",
        "vllm:num_requests_running",
        "vllm:cache_config_info",
        "vllm:prompt_tokens_total",
        f"{CONNECTOR}wire_bytes_total",
        f"{CONNECTOR}loaded_tokens_total",
        f"{CONNECTOR}load_seconds_sum",
        EXTERNAL_HITS,
        FAILED_LOADS,
        *LOADS,
    }
)
_ONLY_GROW = ("vllm:prompt_tokens_total", *LOADS)
"""Counters: when one of them shrinks, it is another process's."""

MODELS_EVERY = 30
"""Looks after which an engine is asked again which models it serves."""


class Reprefills:
    """Finds requests that a decode engine prefilled although their KV was ready elsewhere.

    Counts on both sides: requests that were to be fetched, as the gateway sent them, and those that
    the engine says it fetched or did not need. What an engine reports is a look old, so it is
    compared with what had been sent by the look before.
    """

    def __init__(self) -> None:
        self._sent = 0
        self._sent_before = 0
        self._base: float | None = None
        self.missing = 0

    def sent(self) -> None:
        """Note a request whose KV was to be fetched, and whose answer has begun."""
        self._sent += 1

    @property
    def counts(self) -> bool:
        """Whether the engine says what it loads."""
        return self._base is not None

    def look(self, samples: Samples, inflight: int) -> int:
        """Return how many more are missing than at the last look.

        `inflight` requests are with the engine, which may have loaded KV for them already. What it
        has loaded beyond was for clients that left, and must not make up for what is missing.
        """
        loads = [samples.total(name) for name in LOADS]
        if all(count is None for count in loads):
            return 0  # another connector, or none so far
        loaded = sum(count or 0.0 for count in loads)
        if self._base is None or loaded < self._base:  # the first look, or a new process
            self._base = loaded
            self._sent = self._sent_before = self.missing = 0
            return 0
        surplus = int(loaded - self._base) + self.missing - self._sent - inflight
        self._base += max(0, surplus)
        missing = self._sent_before - int(loaded - self._base)
        self._sent_before = self._sent
        news = max(0, missing - self.missing)
        self.missing += news
        return news


class Monitor:
    """One task for each engine of the pool."""

    def __init__(
        self, settings: Settings, pool: Pool, legs: Legs, link: LinkMeter, metrics: Metrics
    ) -> None:
        self._settings, self._pool, self._legs = settings, pool, legs
        self._link, self._metrics = link, metrics
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._counts: dict[str, tuple[float, ...]] = {}
        self._looks: dict[str, int] = {}
        self._reprefills: dict[str, Reprefills] = {}
        self.on_up: list[Callable[[Engine], None]] = []
        """Called with an engine that has come up, or come back as a new process."""

    async def start(self) -> None:
        """Look at each engine once, then go on in the background."""
        self._pool.added.append(self._watch)  # first: more may come during the looks
        self._pool.removed.append(self._unwatch)
        looks = (self.look(engine) for engine in self._pool)
        await asyncio.gather(*looks, return_exceptions=True)
        for engine in self._pool:
            if engine.url not in self._tasks:
                self._watch(engine)

    async def stop(self) -> None:
        """Look no more."""
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    def remote(self, engine: Engine) -> None:
        """Note that an answer began whose KV was to be fetched."""
        self._reprefills.setdefault(engine.url, Reprefills()).sent()

    def counts(self, engine: Engine) -> bool:
        """Whether an engine says what it loads, so that what is missing is seen."""
        watch = self._reprefills.get(engine.url)
        return watch is not None and watch.counts

    async def look(self, engine: Engine) -> None:
        """Look at an engine once."""
        try:
            await self._get(engine, "/health")
        except (aiohttp.ClientError, asyncio.TimeoutError, OSError) as error:
            if engine.missed():
                logger.warning("%s: down: %s", engine.name, str(error) or repr(error))
            return
        count = self._looks.get(engine.url, 0)
        self._looks[engine.url] = count + 1
        news = engine.healthy is not True
        if engine.healthy is False:
            engine.restarted()  # or away for a while, which can't be told apart
            self._counts.pop(engine.url, None)
        if news or count % MODELS_EVERY == 0:
            await self._read_models(engine)
        samples = await self.samples(engine)
        if samples is not None:
            news = self._read(engine, samples) or news
        engine.answered()
        engine.gaps.update()
        if news:
            logger.info("%s: up, serves %s", engine.name, ", ".join(engine.model_ids) or "?")
            for tell in self.on_up:
                tell(engine)

    async def samples(self, engine: Engine) -> Samples | None:
        """Return an engine's metrics, None if it has none."""
        try:
            text = await self._get(engine, "/metrics")
        except (aiohttp.ClientError, asyncio.TimeoutError, OSError):
            return None
        return parse(text.decode(errors="replace"), _WANTED)

    async def _get(self, engine: Engine, path: str) -> bytes:
        key = self._settings.engine_key
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        timeout = aiohttp.ClientTimeout(total=self._settings.health_timeout)
        async with self._legs.session.get(
            engine.at(path), headers=headers, timeout=timeout, raise_for_status=True
        ) as response:
            return await response.read()

    async def _read_models(self, engine: Engine) -> None:
        try:
            found = model_ids(await self._get(engine, "/v1/models"))
        except (aiohttp.ClientError, asyncio.TimeoutError, OSError, ValueError) as error:
            logger.warning("%s: which models it serves is not known: %r", engine.name, error)
            return
        engine.model_ids, engine.models = found, frozenset(found)
        for other in self._pool:
            apart = other.models is not None and not other.models & engine.models
            if other.role is not engine.role and apart:
                logger.error(
                    "%s serves %s and %s serves %s: they can't work together",
                    engine.name,
                    ", ".join(engine.model_ids),
                    other.name,
                    ", ".join(other.model_ids),
                )

    def _read(self, engine: Engine, samples: Samples) -> bool:
        """Take in metrics; return whether the engine is a new process."""
        engine.reported(
            samples.most("vllm:kv_cache_usage_perc"), samples.total("vllm:num_requests_running")
        )
        now = tuple(samples.total(name) or 0.0 for name in _ONLY_GROW)
        before = self._counts.get(engine.url, now)
        self._counts[engine.url] = now
        restarted = any(new < old for new, old in zip(now, before, strict=True))
        if restarted:
            logger.warning("%s: it has restarted", engine.name)
            engine.restarted()
            self._reprefills.pop(engine.url, None)
        if engine.role is Role.DECODE:
            self._link.read(engine.url, samples)
            watch = self._reprefills.setdefault(engine.url, Reprefills())
            missing = watch.look(samples, engine.inflight)
            if missing:
                self._metrics.reprefills.add(engine.name, by=missing)
                logger.error(
                    "%s: %d requests were prefilled again although a prefill engine had done it",
                    engine.name,
                    missing,
                )
        self._read_capacity(engine, samples)
        return restarted

    def _read_capacity(self, engine: Engine, samples: Samples) -> None:
        tokens, block = 0, 0
        for sample in samples.of("vllm:cache_config_info"):
            with contextlib.suppress(KeyError, ValueError):
                block = int(sample.labels["block_size"])
                tokens += block * int(sample.labels["num_gpu_blocks"])
        if tokens > 0 and block > 0:
            engine.learn_capacity(tokens, block, self._settings.prefix_tokens)

    def _watch(self, engine: Engine) -> None:
        self._tasks[engine.url] = asyncio.create_task(self._loop(engine))

    def _unwatch(self, engine: Engine) -> None:
        task = self._tasks.pop(engine.url, None)
        if task is not None:
            task.cancel()
        for known in (self._counts, self._looks, self._reprefills):
            known.pop(engine.url, None)

    async def _loop(self, engine: Engine) -> None:
        while True:
            try:
                await self.look(engine)
            except Exception:  # noqa: BLE001 - an engine's oddities must not end the watch
                logger.exception("%s: looking at it failed", engine.name)
            self._pool.expire()
            await asyncio.sleep(self._settings.watch_interval)
