"""Which ratio of engines the load of the moment asks for, without following every wiggle.

A pure function of what was seen and of the state it returned last. It advises; acting, and telling
it what came of that, is for others.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace

from kvxfer.errors import InvalidError
from kvxfer.serving.checks import at_least, positive
from kvxfer.serving.decide import Slo
from kvxfer.serving.rate_matching import Lengths, decode_batch, prefill_seconds, step_seconds
from kvxfer.serving.sim.fleet import EngineSpec


class Why(str, enum.Enum):
    """What an advice rests on. In the order in which `advise` asks."""

    STARTING = "starting"
    """Too little was seen since the start or since engines changed."""

    STALE = "stale"
    """Nothing was heard for too long; unknown is not zero."""

    IDLE = "idle"
    """No requests: down to the fewest, one at a time."""

    STEADY = "steady"
    COOLING = "cooling"
    """A change was advised a moment ago."""

    MORE_PREFILL = "more_prefill"
    MORE_DECODE = "more_decode"
    MORE_BOTH = "more_both"
    FEWER_PREFILL = "fewer_prefill"
    FEWER_DECODE = "fewer_decode"
    REBALANCE = "rebalance"
    """One side gives up what the other needs: the budget allows no more of both."""

    BUDGET = "budget"
    """More is needed than the budget allows."""

    INFEASIBLE = "infeasible"
    """No number of these engines meets the SLO."""


@dataclass(frozen=True, slots=True)
class Load:
    """What was asked of the fleet in an interval."""

    seconds: float
    prefills: float
    """Prompts that prefill engines computed."""

    computed_tokens: float
    """Of these prompts, what no prefix cache had."""

    requests: float
    """Answers that decode engines completed, or began if those are more."""

    prompt_tokens: float
    """Of the requests that decode engines began with."""

    output_tokens: float
    queued_tokens: float = 0.0
    """Tokens that wait for prefill at the end of it."""

    waiting: float = 0.0
    """Requests that wait for a place on a decode engine at the end of it."""

    def __post_init__(self) -> None:
        positive("seconds", self.seconds)
        for field_ in fields(self):
            at_least(field_.name, getattr(self, field_.name))

    @property
    def idle(self) -> bool:
        """Whether nothing was done and nothing waits."""
        work = self.computed_tokens + self.output_tokens + self.requests
        return not work and not self.queued_tokens and not self.waiting


@dataclass(frozen=True, slots=True)
class Limits:
    """What an advice may ask for, and how fast it may change its mind."""

    gpus: int
    """All together."""

    min_prefill: int = 1
    min_decode: int = 1
    headroom: float = 0.8
    """How busy engines are to be at most."""

    consolidate: float = 0.7
    """How busy one engine fewer may be. Below `headroom`, or advice would swing."""

    cooldown_up: float = 60.0
    cooldown_down: float = 300.0
    """Seconds after a change until another one in this direction is advised."""

    warmup: float = 60.0
    """Seconds of observation before the first advice, and after each change of the engines."""

    window: float = 120.0
    """Seconds over which the load is averaged; bursts shorter than that count by their queue."""

    def __post_init__(self) -> None:
        at_least("gpus", self.gpus, 1)
        at_least("min_prefill", self.min_prefill)
        at_least("min_decode", self.min_decode, 1)
        if not 0 < self.consolidate < self.headroom <= 1:
            raise InvalidError(
                f"consolidate is {self.consolidate!r} and headroom {self.headroom!r}; "
                "what is needed is 0 < consolidate < headroom <= 1"
            )
        for name in ("cooldown_up", "cooldown_down", "warmup"):
            at_least(name, getattr(self, name))
        positive("window", self.window)


@dataclass(frozen=True, slots=True)
class Kinds:
    """The two kinds of engines that there are."""

    prefill: EngineSpec
    decode: EngineSpec

    def gpus(self, prefill: int, decode: int) -> int:
        """Return what so many take."""
        return prefill * self.prefill.gpus + decode * self.decode.gpus


@dataclass(frozen=True, slots=True)
class Memory:
    """What `advise` remembers; begin with an empty one."""

    began: float | None = None
    """When what is seen began to count."""

    engines: tuple[int, int] | None = None
    loads: tuple[tuple[float, Load], ...] = ()
    up: float = -math.inf
    """When more engines were last advised."""

    down: float = -math.inf
    advised: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class Advice:
    """How many engines there should be, and why. It stands until another one is given."""

    prefill: int
    decode: int
    why: Why
    needed_prefill: float | None
    """Engines that the load keeps busy to `headroom`; None where it is not known."""

    needed_decode: float | None
    memory: Memory = field(repr=False)
    """To pass into the next call."""


def advise(
    load: Load | None,
    engines: tuple[int, int],
    kinds: Kinds,
    slo: Slo,
    limits: Limits,
    memory: Memory,
    now: float,
) -> Advice:
    """Return how many prefill and decode engines there should be.

    `load` is what was seen since the last call, None when nothing could be seen. `engines` are
    those that are healthy now. Steps are of one engine down and of as many as needed up.

    Raises
    ------
    InvalidError
        The fewest engines that the limits ask for are more than they allow.
    """
    least = kinds.gpus(limits.min_prefill, limits.min_decode)
    if least > limits.gpus:
        raise InvalidError(
            f"the fewest engines that are allowed take {least} GPUs, and there are {limits.gpus}"
        )
    memory = _remember(load, engines, limits, memory, now)
    held = memory.advised or engines

    def stay(why: Why, need: tuple[float, float] | None = None) -> Advice:
        found = need or (None, None)
        return Advice(held[0], held[1], why, found[0], found[1], memory)

    if memory.began is None or now - memory.began < limits.warmup:
        return stay(Why.STARTING)
    if load is None or not memory.loads:
        return stay(Why.STALE)
    idle = all(one.idle for _, one in memory.loads)
    need = (0.0, 0.0) if idle else _needed(memory.loads, kinds, slo, limits)
    if need is None:
        return stay(Why.INFEASIBLE)
    wanted = _wanted(need, engines, limits)
    within = _within(wanted, need, engines, kinds, limits)
    if within == held:
        return stay(Why.STEADY if within == wanted else Why.BUDGET, need)
    grows = within[0] > held[0] or within[1] > held[1]
    # Fewer engines only when for a while nobody wanted more: what goes takes its cache along.
    since = memory.up if grows else max(memory.up, memory.down)
    if now - since < (limits.cooldown_up if grows else limits.cooldown_down):
        return stay(Why.COOLING, need)
    memory = replace(memory, advised=within)
    memory = replace(memory, up=now) if grows else replace(memory, down=now)
    why = Why.IDLE if idle else _why(within, wanted, held)
    return Advice(within[0], within[1], why, need[0], need[1], memory)


def _remember(
    load: Load | None, engines: tuple[int, int], limits: Limits, memory: Memory, now: float
) -> Memory:
    """Take in what was seen. What fresh engines do first is slow and must not count."""
    if engines != memory.engines:
        return replace(memory, began=now, engines=engines, loads=())
    loads = memory.loads if load is None else (*memory.loads, (now, load))
    return replace(memory, loads=tuple(one for one in loads if now - one[0] < limits.window))


def _needed(
    loads: Sequence[tuple[float, Load]], kinds: Kinds, slo: Slo, limits: Limits
) -> tuple[float, float] | None:
    """Return how many engines the load keeps busy to the headroom; None if none meet the SLO."""
    parts = [load for _, load in loads]
    seconds, prefills, computed, requests, prompts, output = (
        sum(getattr(one, name) for one in parts)
        for name in (
            "seconds",
            "prefills",
            "computed_tokens",
            "requests",
            "prompt_tokens",
            "output_tokens",
        )
    )
    # What has waited for two looks: a burst that is gone by the next one needs no engine.
    queued = min(one.queued_tokens for one in parts[-2:])
    waiting = min(one.waiting for one in parts[-2:])
    mean = computed / prefills if prefills else computed
    prefill = 0.0
    if computed or queued:
        lengths = Lengths(max(1.0, mean), 1.0)
        work = prefill_seconds(kinds.prefill, lengths)
        if kinds.prefill.prefill.base + work > slo.ttft:
            return None
        tokens = computed / seconds + queued / slo.ttft
        prefill = tokens * work / lengths.prompt_tokens / limits.headroom
    decode = 0.0
    if output or waiting:
        count = max(requests, 1.0)
        lengths = Lengths(max(1.0, prompts / count), max(1.0, output / count))
        batch, _ = decode_batch(kinds.decode, lengths, slo.tpot)
        if not batch:
            return None
        step = step_seconds(kinds.decode, lengths, batch)
        decode = (output / seconds * step + waiting) / batch / limits.headroom
    return prefill, decode


def _wanted(need: tuple[float, float], engines: tuple[int, int], limits: Limits) -> tuple[int, int]:
    """Return how many engines there should be: up at once, down by one where that is safe."""
    found = []
    least = (limits.min_prefill, limits.min_decode)
    for now, needed, fewest in zip(engines, need, least, strict=True):
        busy = needed * limits.headroom  # in engines
        if needed > now:
            count = math.ceil(needed)
        elif now > fewest and busy <= limits.consolidate * (now - 1):
            count = now - 1  # with N - 1 engines each is still less busy than would call for N
        else:
            count = now
        found.append(max(fewest, count))
    return found[0], found[1]


def _within(
    wanted: tuple[int, int],
    need: tuple[float, float],
    engines: tuple[int, int],
    kinds: Kinds,
    limits: Limits,
) -> tuple[int, int]:
    """Return what of `wanted` the budget allows, in the proportion of what is needed."""
    if kinds.gpus(*wanted) <= limits.gpus:
        return wanted
    best, score = engines, -1.0
    for prefill in range(limits.min_prefill, limits.gpus // kinds.prefill.gpus + 1):
        rest = limits.gpus - prefill * kinds.prefill.gpus
        decode = min(rest // kinds.decode.gpus, max(wanted[1], limits.min_decode))
        if decode < limits.min_decode or prefill > wanted[0]:
            continue
        # The share of the load that the tighter side can do.
        found = min(
            prefill / need[0] if need[0] else math.inf, decode / need[1] if need[1] else math.inf
        )
        if found > score or (found == score and (prefill, decode) == engines):
            best, score = (prefill, decode), found
    if kinds.gpus(*engines) <= limits.gpus and score >= 0:
        now = min(
            count / needed if needed else math.inf
            for count, needed in zip(engines, need, strict=True)
        )
        # A swap costs a restart of both sides' engines: it has to pay.
        if score < now * 1.1:
            return engines
    return best


def _why(within: tuple[int, int], wanted: tuple[int, int], engines: tuple[int, int]) -> Why:
    more = [one > now for one, now in zip(within, engines, strict=True)]
    fewer = [one < now for one, now in zip(within, engines, strict=True)]
    if any(more) and any(fewer):
        return Why.REBALANCE
    if within != wanted and not any(more):
        return Why.BUDGET
    if all(more):
        return Why.MORE_BOTH
    if any(more):
        return Why.MORE_PREFILL if more[0] else Why.MORE_DECODE
    return Why.FEWER_PREFILL if fewer[0] else Why.FEWER_DECODE
