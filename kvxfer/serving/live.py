"""What engines did between two looks, from their metrics: vLLM's, or those of the gateway."""

from __future__ import annotations

import http.client
import urllib.request
from collections.abc import Callable, Container, Sequence

from kvxfer.serving.advice import Load
from kvxfer.serving.prometheus import Samples, parse

ANSWER_SECONDS = 5.0
Fetch = Callable[[str], str]
"""Returns the text at a URL; raises OSError."""

_PREFILL = (
    "vllm:request_prefill_kv_computed_tokens_sum",
    "vllm:prompt_tokens_total",
    "vllm:request_success_total",
)
_DECODE = (
    "vllm:generation_tokens_total",
    "vllm:request_success_total",
    "vllm:prompt_tokens_total",
    "vllm:time_to_first_token_seconds_count",
)
_NAMES = {*_PREFILL, *_DECODE, "vllm:num_requests_waiting"}


def fetch(url: str) -> str:
    """Return the text at a URL.

    Raises
    ------
    OSError
        There is no answer, or only a part of one: who sends it may be killed meanwhile.
    """
    try:
        with urllib.request.urlopen(url, timeout=ANSWER_SECONDS) as answer:
            text: bytes = answer.read()
    except http.client.HTTPException as error:
        raise OSError(f"{url}: {error!r}") from error
    return text.decode(errors="replace")


class Engine:
    """One engine, and what its counters were at the last look."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self.alive = False
        """Whether it answered at the last look."""

        self._before: dict[str, float] = {}

    def read(self, fetch: Fetch, names: Container[str]) -> Samples | None:
        """Return its metrics of these names; None if it does not answer."""
        try:
            samples = parse(fetch(self.url + "/metrics"), names)
        except (OSError, ValueError):
            self.alive, self._before = False, {}
            return None
        self.alive = True
        return samples

    def grown(self, samples: Samples, names: Sequence[str]) -> dict[str, float] | None:
        """Return by how much counters have grown; None at the first look or after a restart."""
        now = {name: value for name in names if (value := samples.total(name)) is not None}
        before, self._before = self._before, now
        if not before or any(now.get(name, 0.0) < value for name, value in before.items()):
            return None
        return {name: value - before.get(name, 0.0) for name, value in now.items()}


class Fleet:
    """Reads the metrics of prefill and decode engines.

    An engine that does not answer is not counted as healthy; one that has restarted counts from
    zero; one that is seen for the first time contributes nothing yet.
    """

    def __init__(self, prefill: Sequence[str], decode: Sequence[str], fetch: Fetch = fetch) -> None:
        self._prefill = [Engine(url) for url in prefill]
        self._decode = [Engine(url) for url in decode]
        self._fetch = fetch
        self._last: float | None = None

    @property
    def engines(self) -> tuple[int, int]:
        """Return how many answered at the last look."""
        return (
            sum(engine.alive for engine in self._prefill),
            sum(engine.alive for engine in self._decode),
        )

    def look(self, now: float) -> Load | None:
        """Return what was done since the last look; None where that can't be told."""
        seconds = None if self._last is None else now - self._last
        self._last = now
        prefills = computed = output = requests = prompts = queued = waiting = 0.0
        known = True
        for engine in self._prefill:
            samples = engine.read(self._fetch, _NAMES)
            if samples is None:
                continue
            grown = engine.grown(samples, _PREFILL)
            known &= grown is not None
            if grown is not None:
                computed += grown.get(_PREFILL[0], grown.get(_PREFILL[1], 0.0))
                done = grown.get(_PREFILL[2], 0.0)
                prefills += done
                mean = grown.get(_PREFILL[1], 0.0) / max(1.0, done)
                queued += mean * (samples.total("vllm:num_requests_waiting") or 0.0)
        for engine in self._decode:
            samples = engine.read(self._fetch, _NAMES)
            if samples is None:
                continue
            grown = engine.grown(samples, _DECODE)
            known &= grown is not None
            if grown is not None:
                output += grown.get(_DECODE[0], 0.0)
                # While long answers pile up, more have begun than have ended.
                requests += max(grown.get(_DECODE[1], 0.0), grown.get(_DECODE[3], 0.0))
                prompts += grown.get(_DECODE[2], 0.0)
                waiting += samples.total("vllm:num_requests_waiting") or 0.0
        if seconds is None or seconds <= 0 or not known or not any(self.engines):
            return None
        return Load(seconds, prefills, computed, requests, prompts, output, queued, waiting)
