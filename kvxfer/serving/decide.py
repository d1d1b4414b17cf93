"""Where to prefill a request: on a prefill engine, or where it is decoded."""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass, field
from typing import Literal

from kvxfer.errors import InvalidError
from kvxfer.serving.checks import at_least, positive
from kvxfer.serving.cost_model import Link
from kvxfer.serving.gates import Gates

DEFAULT_THRESHOLD = 2000
"""Used for `auto` as well while a rate that it needs is unknown."""


class Place(str, enum.Enum):
    """Where the prefill runs."""

    REMOTE = "remote"
    LOCAL = "local"


class Reason(str, enum.Enum):
    """Why there, for metrics and logs. In the order in which `decide` asks."""

    NO_PREFILL = "no_prefill"
    FULL_HIT = "full_hit"
    SHORT = "short"
    PREFILL_SATURATED = "prefill_saturated"
    DECODE_PRESSURE = "decode_pressure"
    BOTH_SATURATED = "both_saturated"
    LONG = "long"
    RATE_UNKNOWN = "rate_unknown"
    MEETS_SLO = "meets_slo"
    SPARES_DECODE = "spares_decode"
    FASTER = "faster"


@dataclass(frozen=True, slots=True)
class Prompt:
    """What is to be prefilled, and what of it is there already."""

    tokens: int
    cached: int = 0
    """Tokens in the prefix cache of the candidate decode engine."""

    prefill_cached: int | None = None
    """Tokens in the prefix cache of the prefill engine; None takes it to be `cached`."""

    def __post_init__(self) -> None:
        at_least("tokens", self.tokens)
        for name, value in (("cached", self.cached), ("prefill_cached", self.prefill_cached or 0)):
            if not 0 <= value <= self.tokens:
                raise InvalidError(f"{name} is {value} of a prompt of {self.tokens} tokens")

    @property
    def uncached(self) -> int:
        """Tokens that the decode engine lacks: what it prefills itself, or is sent."""
        return self.tokens - self.cached


@dataclass(frozen=True, slots=True)
class PrefillPool:
    """The prefill engines together. A rate of None is unknown, which is not the same as slow."""

    healthy: int
    inflight_tokens: float = 0.0
    """Uncached tokens sent to the pool and not yet prefilled."""

    queued: int = 0
    """Requests that wait for a step."""

    tokens_per_second: float | None = None
    """Of one engine."""

    request_seconds: float = 0.0
    """What a request costs besides its tokens."""

    def __post_init__(self) -> None:
        at_least("healthy", self.healthy)
        at_least("inflight_tokens", self.inflight_tokens)
        at_least("queued", self.queued)
        at_least("request_seconds", self.request_seconds)
        if self.tokens_per_second is not None:
            positive("tokens_per_second", self.tokens_per_second)


@dataclass(frozen=True, slots=True)
class DecodeEngine:
    """The candidate decode engine. None is unknown."""

    kv_used: float | None = None
    """Fraction of its blocks in use, 0 to 1."""

    running: int = 0
    waiting_tokens: float = 0.0
    """Uncached tokens that wait to be prefilled there."""

    tokens_per_second: float | None = None
    """Its rate of prefill when it does nothing else."""

    step_seconds: float = 0.0
    """One decode step at its present load."""

    itl_seconds: float | None = None
    """Time between tokens measured of late, with what prefill added to it."""

    chunk_tokens: int = 2048
    """Tokens of prefill that it takes into one step."""

    block_tokens: int = 16

    def __post_init__(self) -> None:
        if self.kv_used is not None and not 0.0 <= self.kv_used <= 1.0:
            raise InvalidError(f"kv_used is {self.kv_used!r}; it is a fraction from 0 to 1")
        at_least("running", self.running)
        at_least("waiting_tokens", self.waiting_tokens)
        at_least("step_seconds", self.step_seconds)
        at_least("itl_seconds", self.itl_seconds or 0.0)
        at_least("chunk_tokens", self.chunk_tokens, 1)
        at_least("block_tokens", self.block_tokens, 1)
        if self.tokens_per_second is not None:
            positive("tokens_per_second", self.tokens_per_second)

    def prefill_seconds(self, tokens: float) -> float | None:
        """Return how long `tokens` take in chunks beside the running sequences."""
        if self.tokens_per_second is None:
            return None
        steps = tokens / self.chunk_tokens if self.running else 0.0
        return tokens / self.tokens_per_second + steps * self.step_seconds


@dataclass(frozen=True, slots=True)
class Slo:
    """What a request is promised."""

    ttft: float
    tpot: float

    def __post_init__(self) -> None:
        positive("ttft", self.ttft)
        positive("tpot", self.tpot)


@dataclass(frozen=True, slots=True)
class Policy:
    """The knobs of `decide`."""

    floor: int = 100
    """Fewer uncached tokens than this, or a block, are never worth a transfer."""

    threshold: int | Literal["auto"] = DEFAULT_THRESHOLD
    """From this many uncached tokens on prefill is remote without comparing predictions."""

    ttft_penalty: float | None = None
    """Seconds of work that may queue for prefill; None takes the SLO's TTFT."""

    kv_high: float = 0.80
    kv_low: float = 0.72
    saturated_low: float = 0.90
    """The saturation gate opens again below this fraction of its mark."""

    dwell: float = 1.0
    stall_window: int = 16
    """Tokens over which the stall of a local prefill is averaged; 1 looks at the single gap."""

    headroom: float = 0.8
    """Part of the SLO's TPOT up to which prefill may slow down what is being decoded."""

    def __post_init__(self) -> None:
        at_least("floor", self.floor)
        if isinstance(self.threshold, str):
            if self.threshold != "auto":
                raise InvalidError(f"threshold is {self.threshold!r}; give tokens or 'auto'")
        else:
            at_least("threshold", self.threshold)
        if self.ttft_penalty is not None:
            positive("ttft_penalty", self.ttft_penalty)
        if not 0.0 < self.kv_low <= self.kv_high <= 1.0:
            raise InvalidError(
                f"kv_low is {self.kv_low!r} and kv_high {self.kv_high!r}; "
                "what is needed is 0 < kv_low <= kv_high <= 1"
            )
        if not 0.0 < self.saturated_low <= 1.0:
            raise InvalidError(f"saturated_low is {self.saturated_low!r}, not in (0, 1]")
        at_least("dwell", self.dwell)
        at_least("stall_window", self.stall_window, 1)
        positive("headroom", self.headroom)


@dataclass(frozen=True, slots=True)
class Decision:
    """Where, why, and what was expected either way."""

    place: Place
    reason: Reason
    uncached: int
    ttft_remote: float | None
    """Predicted seconds to the first token; None where a rate is unknown or nobody is there."""

    ttft_local: float | None
    gates: Gates = field(repr=False)
    """To pass into the next call."""


def predict_remote(
    prompt: Prompt, prefill: PrefillPool, decode: DecodeEngine, link: Link
) -> float | None:
    """Return the time to the first token by way of the prefill pool."""
    if prefill.tokens_per_second is None or prefill.healthy == 0:
        return None
    cached = prompt.cached if prompt.prefill_cached is None else prompt.prefill_cached
    seconds = (prompt.tokens - cached) / prefill.tokens_per_second
    queue = (
        prefill.inflight_tokens / prefill.tokens_per_second
        + prefill.queued * prefill.request_seconds
    ) / prefill.healthy
    exposed = link.exposed(prompt.uncached, seconds)
    return queue + prefill.request_seconds + seconds + exposed + decode.step_seconds


def predict_local(prompt: Prompt, decode: DecodeEngine) -> float | None:
    """Return the time to the first token when the decode engine prefills."""
    return decode.prefill_seconds(decode.waiting_tokens + prompt.uncached)


def break_even_tokens(prefill: PrefillPool, decode: DecodeEngine, link: Link) -> float | None:
    """Return from how many uncached tokens on idle queues favour the prefill pool.

    Infinite where it never pays; None where a rate is unknown.
    """
    idle_pool = PrefillPool(
        prefill.healthy, 0, 0, prefill.tokens_per_second, prefill.request_seconds
    )
    many = 1 << 20  # both predictions are linear in the tokens, so two points tell
    remote = [predict_remote(Prompt(n), idle_pool, decode, link) for n in (0, many)]
    local = decode.prefill_seconds(many)
    if remote[0] is None or remote[1] is None or local is None:
        return None
    saved = (local - (remote[1] - remote[0])) / many
    return remote[0] / saved if saved > 0 else math.inf


def decide(
    prompt: Prompt,
    prefill: PrefillPool,
    decode: DecodeEngine,
    link: Link,
    slo: Slo,
    policy: Policy,
    gates: Gates,
    now: float,
) -> Decision:
    """Return where to prefill `prompt`. Pure: the state of the gates goes in and comes out.

    In order: is there anybody; is it worth it; what the gates say; is it long; else what is
    predicted to meet the SLO, and where both or neither do, to be faster. When nothing meets it,
    the delay of those that are being decoded counts as well.
    """
    gates = _update(gates, prefill, decode, slo, policy, now)
    uncached = prompt.uncached
    remote = predict_remote(prompt, prefill, decode, link)
    local = predict_local(prompt, decode)

    def choose(place: Place, reason: Reason) -> Decision:
        return Decision(place, reason, uncached, remote, local, gates)

    if prefill.healthy == 0:
        return choose(Place.LOCAL, Reason.NO_PREFILL)
    # An engine computes the last block anew even when it has all of it.
    if uncached <= decode.block_tokens and prompt.cached > 0:
        return choose(Place.LOCAL, Reason.FULL_HIT)
    if uncached <= max(policy.floor - 1, decode.block_tokens):
        return choose(Place.LOCAL, Reason.SHORT)
    slows = _stalled(uncached, decode, policy) > slo.tpot * policy.headroom
    if gates.saturated.on:
        # A decode engine that is itself behind by as much is no way out.
        backlog = decode.prefill_seconds(decode.waiting_tokens)
        behind = slows or (backlog is not None and backlog > _penalty(policy, slo))
        if not behind or remote is None or local is None:
            return choose(Place.LOCAL, Reason.PREFILL_SATURATED)
        harm = _harm(uncached, decode) if slows else 0.0
        place = Place.REMOTE if remote < local + harm else Place.LOCAL
        return choose(place, Reason.BOTH_SATURATED)
    if gates.pressured.on:
        return choose(Place.REMOTE, Reason.DECODE_PRESSURE)
    if uncached >= _threshold(policy, prefill, decode, link):
        return choose(Place.REMOTE, Reason.LONG)
    if remote is None or local is None:
        return choose(Place.LOCAL, Reason.RATE_UNKNOWN)
    remote_fits = remote <= slo.ttft
    local_fits = local <= slo.ttft and not slows
    if remote_fits != local_fits:
        return choose(Place.REMOTE if remote_fits else Place.LOCAL, Reason.MEETS_SLO)
    if slows and local <= remote < local + _harm(uncached, decode):
        return choose(Place.REMOTE, Reason.SPARES_DECODE)
    return choose(Place.REMOTE if remote < local else Place.LOCAL, Reason.FASTER)


def _update(
    gates: Gates,
    prefill: PrefillPool,
    decode: DecodeEngine,
    slo: Slo,
    policy: Policy,
    now: float,
) -> Gates:
    """Move the gates whose level is known; the others stay as they are."""
    saturated, pressured = gates.saturated, gates.pressured
    if prefill.tokens_per_second is not None and prefill.healthy > 0:
        mark = prefill.tokens_per_second * prefill.healthy * _penalty(policy, slo)
        saturated = saturated.update(
            prefill.inflight_tokens, mark, mark * policy.saturated_low, policy.dwell, now
        )
    if decode.kv_used is not None:
        pressured = pressured.update(
            decode.kv_used, policy.kv_high, policy.kv_low, policy.dwell, now
        )
    return Gates(saturated, pressured)


def _penalty(policy: Policy, slo: Slo) -> float:
    return slo.ttft if policy.ttft_penalty is None else policy.ttft_penalty


def _threshold(policy: Policy, prefill: PrefillPool, decode: DecodeEngine, link: Link) -> float:
    if policy.threshold != "auto":
        return policy.threshold
    tokens = break_even_tokens(prefill, decode, link)
    return DEFAULT_THRESHOLD if tokens is None else tokens


def _stalled(uncached: int, decode: DecodeEngine, policy: Policy) -> float:
    """Return the running sequences' time per token while the prompt is prefilled beside them."""
    between = max(decode.step_seconds, decode.itl_seconds or 0.0)
    if not decode.running or decode.tokens_per_second is None:
        return between
    chunk = min(uncached, decode.chunk_tokens) / decode.tokens_per_second
    steps = math.ceil(uncached / decode.chunk_tokens)
    return between + min(steps, policy.stall_window) * chunk / policy.stall_window


def _harm(uncached: int, decode: DecodeEngine) -> float:
    """Return by how much a local prefill delays all running sequences, added up."""
    return decode.running * uncached / (decode.tokens_per_second or math.inf)
