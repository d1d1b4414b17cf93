"""Costs of an engine's steps, fitted to what its metrics grew by while it served."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvxfer.errors import InvalidError
from kvxfer.serving.cost_model import DecodeCost, PrefillCost
from kvxfer.serving.fit import non_negative_fit
from kvxfer.serving.live import Engine, Fetch, fetch

MIN_STRETCHES = 6
FEW_STEPS = 10
"""A stretch with less says more about what happened to be in it than about the engine."""

_ALIKE = 1.2
"""Stretches whose loads differ by less than this factor cannot tell a base from a slope."""

_COUNTERS = (
    "vllm:iteration_tokens_total_sum",
    "vllm:iteration_tokens_total_count",
    "vllm:generation_tokens_total",
    "vllm:inter_token_latency_seconds_sum",
    "vllm:inter_token_latency_seconds_count",
    "vllm:request_prefill_time_seconds_sum",
    "vllm:request_prefill_time_seconds_count",
    "vllm:request_prefill_kv_computed_tokens_sum",
)
_USED, _CACHE = "vllm:kv_cache_usage_perc", "vllm:cache_config_info"


@dataclass(frozen=True, slots=True)
class Stretch:
    """What an engine did between two looks. Means are None where nothing was to be measured."""

    steps: float
    computed: float
    """Tokens of prompts that it computed."""

    generated: float
    context: float
    """Tokens in its KV cache."""

    gap: float | None
    """Mean seconds between two tokens of an answer."""

    prefill: float | None
    """Mean seconds from when a prompt was scheduled to its first token."""

    prompt: float = 0.0
    """Mean tokens that were computed of these prompts."""


@dataclass(frozen=True, slots=True)
class Metered:
    """What the metrics tell of an engine's costs; None for what it did not do."""

    prefill: PrefillCost | None
    decode: DecodeCost | None
    error: float
    """Mean relative error of the fitted durations."""


class Meter:
    """Reads one engine's metrics."""

    def __init__(self, url: str, fetch: Fetch = fetch) -> None:
        self._engine = Engine(url)
        self._fetch = fetch

    def look(self) -> Stretch | None:
        """Return what was done since the last look; None where that is unknown, or too little.

        Raises
        ------
        InvalidError
            It answers, but not with the metrics of vLLM.
        """
        samples = self._engine.read(self._fetch, {*_COUNTERS, _USED, _CACHE})
        if samples is None:
            return None
        if samples.total(_COUNTERS[1]) is None:
            raise InvalidError(
                f"{self._engine.url}/metrics has no {_COUNTERS[1]}: it has to be vLLM, without "
                "--disable-log-stats"
            )
        grown = self._engine.grown(samples, _COUNTERS)
        if grown is None:
            return None
        tokens, steps, generated, gaps, gap_count, prefills, count, computed = (
            grown.get(name, 0.0) for name in _COUNTERS
        )
        if steps < FEW_STEPS:
            return None
        capacity = sum(
            float(one.labels.get("block_size", 0)) * float(one.labels.get("num_gpu_blocks", 0))
            for one in samples.of(_CACHE)
        )
        return Stretch(
            steps,
            max(0.0, tokens - generated),
            generated,
            capacity * (samples.most(_USED) or 0.0),
            gaps / gap_count if gap_count else None,
            prefills / count if count and computed else None,
            computed / count if count else 0.0,
        )


def fit_metered(stretches: Sequence[Stretch], batch_tokens: int) -> Metered:
    """Fit costs to stretches of engines of one kind.

    A gap between tokens is one step; a prompt takes as many as it has chunks. A step costs a base,
    and something for each sequence, token of context, and token of prompts that are computed in it.

    Raises
    ------
    InvalidError
        Too few stretches, or all of one load.
    """
    rows: list[list[float]] = []
    batches, prompts = [], []
    for one in stretches:
        batch, computed = one.generated / one.steps, one.computed / one.steps
        if one.gap:
            rows.append([value / one.gap for value in (1.0, batch, one.context, computed)])
            batches.append(batch)
        if one.prefill:
            chunks = max(1.0, one.prompt / batch_tokens)
            work = max(one.prompt, chunks * computed)
            row = (chunks, chunks * batch, chunks * one.context, work)
            rows.append([value / one.prefill for value in row])
            prompts.append(work)
    if len(rows) < MIN_STRETCHES:
        raise InvalidError(
            f"{len(rows)} measurements in the metrics; a fit needs {MIN_STRETCHES}: look for longer"
        )
    differ = [max(found) > _ALIKE * min(found) for found in (batches, prompts) if found]
    if not any(differ):
        raise InvalidError(
            "the load was the same all the time, which doesn't tell what a step costs and what a "
            "token: look while it changes"
        )
    base, per_sequence, per_context, per_token = found = non_negative_fit(rows)
    misses = [abs(1 - sum(x * c for x, c in zip(row, found, strict=True))) for row in rows]
    return Metered(
        PrefillCost(base, per_token) if prompts and per_token > 0 else None,
        DecodeCost(base, per_sequence, per_context) if batches and base > 0 else None,
        sum(misses) / len(misses),
    )
