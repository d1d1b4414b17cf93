"""One engine, as the gateway sees it."""

from __future__ import annotations

import itertools
from typing import Any

from .breaker import Breaker
from .prefix_index import PrefixIndex
from .rates import GapMeter, RateMeter
from .settings import Entry, Settings

KV_TOKENS = 200_000
"""Taken for an engine's capacity until it says."""

UNHEALTHY_AFTER = 2
_order = itertools.count()


class Engine:
    """What is known of an engine, and what was sent to it."""

    def __init__(self, entry: Entry, source: str, settings: Settings) -> None:
        self.entry, self.source = entry, source
        self.url, self.role = entry.url, entry.role
        self.name = entry.url.partition("://")[2]
        self.order = next(_order)
        self.expires: float | None = None
        """When it is dropped unless a heartbeat comes; None for one that is not registered."""

        self.draining = False
        self.dismissed = False
        """Whether somebody ordered the drain: a heartbeat does not take it back then."""

        self.healthy: bool | None = None
        """None until it was looked at."""

        self.models: frozenset[str] | None = None
        self.model_ids: tuple[str, ...] = ()
        self.breaker = Breaker(settings.breaker_failures, settings.breaker_cooldown)
        self.index_block = settings.block_tokens
        self.index = PrefixIndex(settings.prefix_tokens // settings.block_tokens)
        self.rate = RateMeter()
        self.gaps = GapMeter()
        self.standing: dict[str, Any] | None = None
        """What a prefill engine said about where its KV can be fetched."""

        self.inflight = 0
        """Requests that are with it, and those whose KV it still holds for a decode engine."""

        self.inflight_tokens = 0.0
        """Uncached tokens that it has to prefill."""

        self.context_tokens = 0.0
        """Tokens of the prompts that it decodes."""

        self.kv_tokens = KV_TOKENS
        self.block_tokens = settings.block_tokens
        self.kv_used: float | None = None
        self.running: int | None = None
        self.boots = 0
        """How often it was seen to start anew."""

        self._misses = 0
        self._context_reported = 0.0

    def __repr__(self) -> str:
        return f"<{self.role.value} engine {self.name}>"

    def at(self, path: str) -> str:
        """Return the address of one of its paths."""
        return self.url + path

    def usable(self, now: float, model: str | None) -> bool:
        """Whether a request for this model may be sent to it."""
        return bool(
            self.healthy
            and not self.draining
            and (model is None or self.models is None or model in self.models)
            and self.breaker.ready(now)
        )

    @property
    def load(self) -> float:
        """Fraction of its KV memory that is in use, with what was sent since it reported."""
        new = max(0.0, self.context_tokens - self._context_reported)
        reported = self.kv_used or 0.0
        return max(self.context_tokens / self.kv_tokens, reported + new / self.kv_tokens)

    def reported(self, kv_used: float | None, running: float | None) -> None:
        """Take in what it says of itself; None is what it does not say."""
        self.kv_used = None if kv_used is None else min(1.0, max(0.0, kv_used))
        self.running = None if running is None else int(running)
        self._context_reported = self.context_tokens

    @property
    def state(self) -> str:
        """One word, for people."""
        if self.draining:
            return "draining"
        if self.breaker.open:
            return "tripped"
        return {None: "unknown", True: "up", False: "down"}[self.healthy]

    def answered(self) -> bool:
        """Note that it is healthy; return whether that is news."""
        news = self.healthy is not True
        self._misses, self.healthy = 0, True
        return news

    def missed(self) -> bool:
        """Note that a look at its health failed; return whether that makes it unhealthy."""
        self._misses += 1
        if self.healthy is False or (self.healthy and self._misses < UNHEALTHY_AFTER):
            return False
        self.healthy = False
        self.kv_used = self.running = None
        return True

    def restarted(self) -> None:
        """Forget what an earlier process had."""
        self.boots += 1
        self.index.clear()
        self.rate.reset()
        self.standing = None

    def learn_capacity(self, kv_tokens: int, block_tokens: int, most_tokens: int) -> None:
        """Take in how much KV it can hold."""
        self.kv_tokens, self.block_tokens = max(1, kv_tokens), block_tokens
        self.index.limit(min(most_tokens, kv_tokens) // self.index_block + 1)
