"""The engines that there are: added, drained, removed, picked."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Iterator

from kvxfer.errors import InvalidError

from .engines import Engine
from .settings import Entry, Role, Settings

logger = logging.getLogger("kvxfer.gateway")
DRAIN_STEP = 0.05  # seconds between two looks at whether an engine is idle


class Pool:
    """Keeps one `Engine` for each address, and says which may be used.

    `added` and `removed` are called with each engine that comes or goes, so that somebody may watch
    it.
    """

    def __init__(self, settings: Settings, now: Callable[[], float] = time.monotonic) -> None:
        self._settings, self._now = settings, now
        self._engines: dict[str, Engine] = {}
        self._drains: dict[str, asyncio.Task[bool]] = {}
        self._broken_pairs: set[tuple[str, str]] = set()
        self.added: list[Callable[[Engine], None]] = []
        self.removed: list[Callable[[Engine], None]] = []

    def __iter__(self) -> Iterator[Engine]:
        return iter(list(self._engines.values()))

    def of(self, role: Role) -> list[Engine]:
        """Return the engines with this role, in the order in which they came."""
        return [engine for engine in self._engines.values() if engine.role is role]

    def get(self, url: str) -> Engine | None:
        """Return the engine at this address."""
        return self._engines.get(url.rstrip("/"))

    def add(self, entry: Entry, source: str) -> Engine:
        """Return the engine at an address, new or known; one that drains is taken back.

        Raises
        ------
        InvalidError
            The address is known with another role, or from another source.
        """
        engine = self._engines.get(entry.url)
        if engine is not None:
            if engine.role is not entry.role:
                raise InvalidError(
                    f"{entry.url} is a {engine.role.value} engine here, not one for "
                    f"{entry.role.value}; remove it first"
                )
            if engine.source != source:
                raise InvalidError(f"{entry.url} is known already, from {engine.source}")
            if engine.draining:
                logger.info("%s: taken back while it drained", engine.name)
                engine.draining = engine.dismissed = False
                drain = self._drains.pop(entry.url, None)
                if drain is not None:
                    drain.cancel()
            return engine
        engine = self._engines[entry.url] = Engine(entry, source, self._settings)
        logger.info("%s: a %s engine, from %s", engine.name, entry.role.value, source)
        for tell in self.added:
            tell(engine)
        return engine

    def register(self, entry: Entry) -> Engine:
        """Add an engine that says so itself, or take its heartbeat; not while it was dismissed."""
        known = self._engines.get(entry.url)
        if known is not None and known.dismissed:
            return known  # it does not know yet; once it has gone, it may come anew
        engine = self.add(entry, "registration")
        engine.expires = self._now() + self._settings.register_ttl
        return engine

    def drain(self, engine: Engine) -> asyncio.Task[bool]:
        """Send nothing more to an engine, and remove it when it is idle.

        The task returns whether it became idle in time; it is removed in any case.
        """
        task = self._drains.get(engine.url)
        if task is None:
            engine.draining = True
            task = asyncio.create_task(self._drained(engine))
            self._drains[engine.url] = task
        return task

    def replace(self, entries: Collection[Entry], source: str) -> None:
        """Make the engines of one source these: add what is new, drain what is gone."""
        wanted = {entry.url for entry in entries}
        for engine in list(self._engines.values()):
            if engine.source == source and engine.url not in wanted and not engine.draining:
                self.drain(engine)
        for entry in entries:
            try:
                self.add(entry, source)
            except InvalidError as error:
                logger.warning("%s: %s", source, error)

    def expire(self) -> None:
        """Drain engines whose heartbeat has stopped."""
        now = self._now()
        for engine in list(self._engines.values()):
            if engine.expires is not None and now > engine.expires and not engine.draining:
                logger.warning("%s: no heartbeat; it is drained", engine.name)
                self.drain(engine)

    def usable(
        self, role: Role, model: str | None, exclude: Collection[Engine] = ()
    ) -> list[Engine]:
        """Return the engines that may get a request for this model."""
        now = self._now()
        return [
            engine
            for engine in self._engines.values()
            if engine.role is role and engine not in exclude and engine.usable(now, model)
        ]

    def models(self) -> set[str]:
        """Return what the decode engines serve, as far as they were asked."""
        found: set[str] = set()
        for engine in self.of(Role.DECODE):
            found |= engine.models or set()
        return found

    def set_pair(self, prefill: Engine, decode: Engine, moves: bool) -> None:
        """Note whether KV was seen to move between two engines."""
        pair = (prefill.url, decode.url)
        (self._broken_pairs.discard if moves else self._broken_pairs.add)(pair)

    def pairs(self, prefill: Engine, decode: Engine) -> bool:
        """Whether KV moves between two engines, as far as it is known."""
        return (prefill.url, decode.url) not in self._broken_pairs

    async def close(self) -> None:
        """Stop waiting for engines to become idle."""
        for task in self._drains.values():
            task.cancel()
        await asyncio.gather(*self._drains.values(), return_exceptions=True)

    async def _drained(self, engine: Engine) -> bool:
        deadline = self._now() + self._settings.drain_timeout
        logger.info("%s: draining, %d requests left", engine.name, engine.inflight)
        while engine.inflight and self._now() < deadline:
            await asyncio.sleep(DRAIN_STEP)
        idle = engine.inflight == 0
        if not idle:
            logger.error("%s: removed with %d requests left", engine.name, engine.inflight)
        self._engines.pop(engine.url, None)
        self._drains.pop(engine.url, None)
        self._broken_pairs = {pair for pair in self._broken_pairs if engine.url not in pair}
        logger.info("%s: removed", engine.name)
        for tell in self.removed:
            tell(engine)
        return idle
