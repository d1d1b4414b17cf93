"""Costs of an engine's steps, fitted to how long its requests took."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvxfer.errors import InvalidError
from kvxfer.serving.cost_model import DecodeCost, PrefillCost

MIN_REQUESTS = 20
"""Fewer say too little, and the first ones of a fresh engine mislead."""


@dataclass(frozen=True, slots=True)
class Served:
    """When an aggregated engine did what for one request, in seconds of one clock."""

    scheduled: float
    first: float
    last: float
    prompt_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True)
class Costs:
    """What an engine's steps cost."""

    prefill: PrefillCost
    decode: DecodeCost
    error: float
    """Mean relative error of the fitted durations, 0.05 for 5 %."""


def fit(
    served: Sequence[Served], batch_tokens: int, first: int | None = None, engines: int = 1
) -> Costs:
    """Fit the costs of a step to the durations of requests.

    A request's answer took as many steps as it has tokens, and each step cost a base, something for
    every sequence, for every token of context, and for every token of some other prompt that was
    prefilled in it. What the engine did meanwhile is taken from all of `served`; fitted are the
    durations of the `first` requests, or of all. Of `engines` behind one address (data parallel
    ranks) each is taken to have had its part of the load.

    Raises
    ------
    InvalidError
        Too few requests, or times that run backwards.
    """
    order = sorted(served, key=lambda one: one.scheduled)
    fitted = [one for one in order[:first] if one.output_tokens > 1]
    if len(fitted) < MIN_REQUESTS:
        raise InvalidError(
            f"{len(fitted)} requests with more than one token of output; a fit needs {MIN_REQUESTS}"
        )
    for one in order:
        if not one.scheduled <= one.first <= one.last:
            raise InvalidError(
                f"a request scheduled at {one.scheduled:g} s has its first token at {one.first:g} "
                f"and its last at {one.last:g} s"
            )
    rows, durations = [], []
    for one in fitted:
        rows.append(_work(order, one.first, one.last, one.output_tokens - 1, engines))
        durations.append(one.last - one.first)
        # And what was left of the step in which it came: half of one, on average.
        steps = -(-one.prompt_tokens // batch_tokens) + 0.5
        rows.append(_work(order, one.scheduled, one.first, steps, engines))
        durations.append(one.first - one.scheduled)
    # Relative errors count, or a few long answers would decide everything.
    scaled = [
        [value / duration for value in row]
        for row, duration in zip(rows, durations, strict=True)
        if duration > 0
    ]
    found = non_negative_fit(scaled)
    base, per_sequence, per_context, per_token = found
    if base <= 0 or per_token <= 0:
        raise InvalidError(
            "the log doesn't tell what a step or a token of prefill costs; it needs requests of "
            "different lengths at different loads"
        )
    misses = (abs(1 - sum(x * c for x, c in zip(row, found, strict=True))) for row in scaled)
    return Costs(
        PrefillCost(base, per_token),
        DecodeCost(base, per_sequence, per_context),
        sum(misses) / len(scaled),
    )


def fit_decode(points: Sequence[tuple[float, float, float]]) -> DecodeCost:
    """Fit a decode step to (sequences, context of each, seconds from token to token)."""
    if len(points) < 2:
        raise InvalidError(f"{len(points)} points; a line needs 2")
    rows = [(1 / tpot, n / tpot, n * context / tpot) for n, context, tpot in points]
    base, per_sequence, per_context = non_negative_fit(rows)
    return DecodeCost(base, per_sequence, per_context)


def _work(
    served: Sequence[Served], begin: float, end: float, steps: float, engines: int
) -> list[float]:
    """Return steps, sequences, context and prefilled tokens, each summed over the steps."""
    sequences = context = prefilled = 0.0
    for one in served:
        if one.scheduled >= end:
            break
        if one.last <= begin:
            continue
        prefilled += one.prompt_tokens * _share(one.scheduled, one.first, begin, end)
        share = _share(one.first, one.last, begin, end)
        if share and one.output_tokens > 1:
            tokens = share * (one.output_tokens - 1)
            middle = (max(begin, one.first) + min(end, one.last)) / 2
            grown = (middle - one.first) / (one.last - one.first) * (one.output_tokens - 1)
            sequences += tokens
            context += tokens * (one.prompt_tokens + grown)
    return [steps, sequences / engines, context / engines, prefilled / engines]


def _share(start: float, stop: float, begin: float, end: float) -> float:
    """Return which part of [start, stop] lies in [begin, end]."""
    if stop <= start:
        return 1.0 if begin <= start < end else 0.0
    return max(0.0, min(stop, end) - max(start, begin)) / (stop - start)


def non_negative_fit(rows: Sequence[Sequence[float]]) -> list[float]:
    """Return the c >= 0 for which the rows times c are closest to 1: coordinate descent."""
    size = len(rows[0])
    scale = [max(row[i] for row in rows) or 1.0 for i in range(size)]
    scaled = [[row[i] / scale[i] for i in range(size)] for row in rows]
    square = [[sum(row[i] * row[j] for row in scaled) for j in range(size)] for i in range(size)]
    target = [sum(row[i] for row in scaled) for i in range(size)]
    found = [0.0] * size
    for _ in range(5_000):
        moved = 0.0
        for i in range(size):
            if square[i][i] == 0:
                continue
            rest = target[i] - sum(square[i][j] * found[j] for j in range(size) if j != i)
            new = max(0.0, rest / square[i][i])
            moved = max(moved, abs(new - found[i]))
            found[i] = new
        if moved < 1e-12:
            break
    return [value / scale[i] for i, value in enumerate(found)]
