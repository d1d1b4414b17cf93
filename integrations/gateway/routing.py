"""Which engines a request goes to: `kvxfer.serving.decide` with what the gateway knows."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass

from kvxfer.serving import (
    DecodeEngine,
    Gates,
    Link,
    Place,
    PrefillPool,
    Prompt,
    Reason,
    decide,
)

from .engines import Engine
from .pool import Pool
from .prompts import Call, Whole
from .rates import LinkMeter
from .settings import Role, Settings

logger = logging.getLogger("kvxfer.gateway")
UNMEASURED = Link(1e12, 0.0)
"""Until the link is measured nothing is charged for it: so it gets to be measured."""


@dataclass(frozen=True, slots=True)
class Route:
    """Where a request goes and why."""

    decode: Engine
    prefill: Engine | None
    """None for a prompt that the decode engine prefills."""

    reason: Reason | Whole
    uncached: int
    """Tokens that the decode engine is believed to lack."""

    prefill_uncached: int = 0
    """Tokens that the prefill engine is believed to lack."""

    @property
    def place(self) -> Place:
        """Where the prefill runs."""
        return Place.LOCAL if self.prefill is None else Place.REMOTE


class Routing:
    """Picks engines. Keeps the gates, and the link as it was measured."""

    def __init__(
        self,
        settings: Settings,
        pool: Pool,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._settings, self._pool, self._now = settings, pool, now
        self.link_meter = LinkMeter()
        self._saturated = Gates().saturated
        self._pressured: dict[str, Gates] = {}
        pool.removed.append(self._forget)

    @property
    def link(self) -> Link:
        """Return the link as given, or as measured."""
        return self._settings.link or self.link_meter.link or UNMEASURED

    def route(self, call: Call) -> Route | None:
        """Return where a request goes; None when no engine can take it."""
        decode = self.pick_decode(call)
        if decode is None:
            return None
        blocks = decode.index.match(call.hashes)
        cached = call.cached(blocks)
        if call.whole is not None:
            return Route(decode, None, call.whole, call.tokens - cached)
        prefills = [
            engine
            for engine in self._pool.usable(Role.PREFILL, call.model)
            if self._pool.pairs(engine, decode)
        ]
        best = self._soonest(call, prefills)
        elsewhere = 0 if best is None else call.cached(best.index.match(call.hashes))
        gates = Gates(self._saturated)
        kept = self._pressured.get(decode.url)
        if kept is not None:
            gates = Gates(self._saturated, kept.pressured)
        decision = decide(
            Prompt(call.tokens, cached, elsewhere if best is not None else None),
            self._prefill_pool(prefills, best),
            self._decode_engine(decode, best),
            self.link,
            self._settings.slo,
            self._settings.policy,
            gates,
            self._now(),
        )
        self._saturated = decision.gates.saturated
        self._pressured[decode.url] = decision.gates
        if decision.place is Place.LOCAL or best is None:
            return Route(decode, None, decision.reason, decision.uncached)
        return Route(
            decode, best, decision.reason, decision.uncached, max(0, call.tokens - elsewhere)
        )

    def _forget(self, engine: Engine) -> None:
        self._pressured.pop(engine.url, None)

    def pick_decode(self, call: Call, exclude: Collection[Engine] = ()) -> Engine | None:
        """Return the decode engine that is left least loaded, what it has cached counted."""
        engines = self._pool.usable(Role.DECODE, call.model, exclude)
        if len(engines) < 2:
            return engines[0] if engines else None

        def loaded(engine: Engine) -> tuple[float, int, int]:
            uncached = call.tokens - call.cached(engine.index.match(call.hashes))
            return engine.load + uncached / engine.kv_tokens, engine.inflight, engine.order

        return min(engines, key=loaded)

    def pairs(self, prefill: Engine, decode: Engine) -> bool:
        """Whether KV moves between two engines, as far as it is known."""
        return self._pool.pairs(prefill, decode)

    def pick_prefill(
        self, call: Call, decode: Engine, exclude: Collection[Engine] = ()
    ) -> Engine | None:
        """Return the prefill engine that would be done first and can reach `decode`."""
        engines = self._pool.usable(Role.PREFILL, call.model, exclude)
        return self._soonest(call, [one for one in engines if self._pool.pairs(one, decode)])

    def _soonest(self, call: Call, engines: Collection[Engine]) -> Engine | None:
        known = [engine.rate.rate for engine in engines if engine.rate.rate is not None]
        # One that has not been measured is taken to be like the others, or it never would be.
        usual = self._settings.prefill_rate or (sum(known) / len(known) if known else 1.0)

        def done(engine: Engine) -> tuple[float, int, int]:
            uncached = call.tokens - call.cached(engine.index.match(call.hashes))
            rate = engine.rate.rate or usual
            return (engine.inflight_tokens + uncached) / rate, engine.inflight, engine.order

        return min(engines, key=done) if engines else None

    def _prefill_pool(self, engines: Collection[Engine], best: Engine | None) -> PrefillPool:
        if best is None:
            return PrefillPool(0)
        return PrefillPool(
            healthy=len(engines),
            inflight_tokens=sum(engine.inflight_tokens for engine in engines),
            queued=sum(max(0, engine.inflight - 1) for engine in engines),
            tokens_per_second=self._settings.prefill_rate or best.rate.rate,
        )

    def _decode_engine(self, engine: Engine, best: Engine | None) -> DecodeEngine:
        # Until a decode engine has prefilled something, it is taken to be like its neighbour.
        neighbour = None if best is None else best.rate.rate
        return DecodeEngine(
            kv_used=min(1.0, engine.load) if engine.kv_used is not None else None,
            running=max(engine.running or 0, 1 if engine.context_tokens else 0),
            waiting_tokens=engine.inflight_tokens,
            tokens_per_second=self._settings.decode_rate or engine.rate.rate or neighbour,
            step_seconds=engine.gaps.step,
            itl_seconds=engine.gaps.mean,
            chunk_tokens=self._settings.chunk_tokens,
            block_tokens=engine.block_tokens,
        )
