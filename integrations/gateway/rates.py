"""Rates that are learnt from the requests that pass."""

from __future__ import annotations

from collections import deque

from kvxfer.serving import Link
from kvxfer.serving.prometheus import Samples

FEW_TOKENS = 256
"""Less work than this says more about fixed costs than about a rate."""

ENOUGH_TOKENS = 4096
_NEW_PART = 0.2


class RateMeter:
    """Tokens a second of an engine while it has something to do.

    Counts over the time in which any request is with the engine, since it batches them. What a
    fresh engine does first is slow and says nothing: the first measurement is dropped.
    """

    def __init__(self) -> None:
        self.rate: float | None = None
        self._samples = 0
        self._inside = 0
        self._since = 0.0
        self._tokens = 0.0

    def begin(self, now: float) -> None:
        """Note that the engine gets a request."""
        if self._inside == 0:
            self._since, self._tokens = now, 0.0
        self._inside += 1

    def end(self, now: float, tokens: float) -> None:
        """Note that it is done with one, having prefilled so many tokens; 0 if it failed."""
        self._inside -= 1
        self._tokens += tokens
        if self._tokens >= (FEW_TOKENS if self._inside == 0 else ENOUGH_TOKENS):
            seconds = now - self._since
            if seconds > 0:
                self.observe(self._tokens / seconds)
            self._since, self._tokens = now, 0.0

    def observe(self, rate: float) -> None:
        """Take a measurement in."""
        self._samples += 1
        if self._samples > 1:
            self.rate = rate if self.rate is None else self.rate + _NEW_PART * (rate - self.rate)

    def reset(self) -> None:
        """Forget what was measured: the engine is another now."""
        self.rate, self._samples, self._tokens = None, 0, 0.0


class GapMeter:
    """Times between pieces of answers, as an engine sent them of late."""

    def __init__(self) -> None:
        self.recent: deque[float] = deque(maxlen=128)
        self.mean: float | None = None
        self.step = 0.0
        """One decode step: the lower quartile, which prefill and waiting hardly touch."""

    def update(self) -> None:
        """Look at what has come since the last call."""
        if not self.recent:
            self.mean, self.step = None, 0.0
            return
        ordered = sorted(self.recent)
        self.recent.clear()
        self.mean = sum(ordered) / len(ordered)
        self.step = ordered[len(ordered) // 4]


class LinkMeter:
    """How fast KV reaches the decode engines, from what their connector counts."""

    def __init__(self) -> None:
        self.link: Link | None = None
        self._before: dict[str, tuple[float, float, float]] = {}

    def read(self, engine: str, samples: Samples) -> None:
        """Take in an engine's metrics."""
        names = ("wire_bytes_total", "loaded_tokens_total", "load_seconds_sum")
        found = [samples.total(f"vllm:kvxfer_{name}") for name in names]
        if None in found:
            return
        now = tuple(value or 0.0 for value in found)
        sent, tokens, seconds = (
            new - old
            for new, old in zip(now, self._before.get(engine, (0.0, 0.0, 0.0)), strict=True)
        )
        if min(sent, tokens, seconds) < 0:  # it has restarted
            self._before[engine] = (now[0], now[1], now[2])
        elif tokens >= FEW_TOKENS and sent > 0 and seconds > 0:
            self._before[engine] = (now[0], now[1], now[2])
            rate, size = sent / seconds, sent / tokens
            if self.link is not None:
                old = self.link
                rate = old.bytes_per_second + _NEW_PART * (rate - old.bytes_per_second)
                size = old.kv_bytes_per_token + _NEW_PART * (size - old.kv_bytes_per_token)
            self.link = Link(rate, size)
