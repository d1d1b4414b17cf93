"""How many requests a second a fleet can serve, in closed form.

Each engine is a line of what its steps cost. From that, the SLO and the mean lengths follow the
batch that decode engines can run, what the prefill engines can feed them, and which of the two, or
the link, or the memory, is the bottleneck. It knows no bursts: the simulator does.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass

from kvxfer.errors import InvalidError
from kvxfer.serving.checks import at_least, positive
from kvxfer.serving.decide import Slo
from kvxfer.serving.sim.fleet import EngineSpec, Fleet, Role


class Bottleneck(str, enum.Enum):
    """What a fleet would need more of."""

    PREFILL = "prefill"
    DECODE = "decode"
    MEMORY = "kv memory"
    SEQUENCES = "max_sequences"
    LINK = "link"
    TTFT = "ttft"
    """Not a resource: no fleet of these engines answers in time."""

    TPOT = "tpot"


@dataclass(frozen=True, slots=True)
class Lengths:
    """A request on average."""

    prompt_tokens: float
    output_tokens: float
    cached_share: float = 0.0
    """Part of the prompt that is in a prefix cache already."""

    def __post_init__(self) -> None:
        positive("prompt_tokens", self.prompt_tokens)
        at_least("output_tokens", self.output_tokens, 1)
        if not 0.0 <= self.cached_share < 1.0:
            raise InvalidError(f"cached_share is {self.cached_share!r}, not in [0, 1)")

    @property
    def uncached(self) -> float:
        """Tokens to prefill."""
        return self.prompt_tokens * (1 - self.cached_share)

    @property
    def context(self) -> float:
        """Tokens in memory on average while the answer grows."""
        return self.prompt_tokens + self.output_tokens / 2


@dataclass(frozen=True, slots=True)
class Estimate:
    """What a fleet can do."""

    rate: float
    """Requests a second within the SLO; 0 where none is possible."""

    bottleneck: Bottleneck
    ttft: float
    """Without queueing."""

    tpot: float
    batch: float
    """Sequences of one decoding engine."""


def prefill_seconds(spec: EngineSpec, lengths: Lengths) -> float:
    """Return an engine's time for a prompt in a full queue: prompts share steps."""
    tokens = lengths.uncached
    start = lengths.prompt_tokens - tokens
    cost = spec.prefill
    steps = max(1.0, tokens / spec.batch_tokens) if tokens else 0.0
    shared = steps if tokens >= spec.batch_tokens else tokens / spec.batch_tokens
    square = lengths.prompt_tokens**2 - start**2
    return cost.base * shared + cost.per_token * tokens + cost.per_square * square


def decode_batch(
    spec: EngineSpec, lengths: Lengths, tpot: float, prefill: float = 0.0
) -> tuple[float, Bottleneck]:
    """Return the largest batch with steps of at most `tpot`, and what limits it.

    `prefill` is the time that every request takes from decoding, in an engine that does both: for
    every answer completed, a prompt has to be prefilled between its steps.
    """
    per_sequence = (
        spec.decode.per_sequence
        + spec.decode.per_context * lengths.context
        + prefill / lengths.output_tokens
    )
    limits = [
        (float(spec.max_sequences), Bottleneck.SEQUENCES),
        (spec.kv_tokens / lengths.context, Bottleneck.MEMORY),
    ]
    spare = tpot - spec.decode.base
    if spare < per_sequence:
        return 0.0, Bottleneck.TPOT
    if per_sequence > 0:
        limits.append((spare / per_sequence, Bottleneck.DECODE))
    return min(limits, key=lambda limit: limit[0])


def step_seconds(spec: EngineSpec, lengths: Lengths, batch: float, prefill: float = 0.0) -> float:
    """Return the time from one token to the next at this batch."""
    step = spec.decode.step(batch, batch * lengths.context)
    return step + batch * prefill / lengths.output_tokens


def estimate(fleet: Fleet, lengths: Lengths, slo: Slo) -> Estimate:
    """Return what `fleet` can do within `slo`, prefilling remotely wherever it can."""
    prefill_rate, prefill_limit, prefill_ttft = _prefill_side(fleet, lengths, slo)
    rate = apart = 0.0
    limit, ttft, tpot, batch = Bottleneck.TPOT, prefill_ttft, 0.0, 0.0
    for spec, count in fleet.engines:
        if spec.role is not Role.DECODE or not count or not fleet.count(Role.PREFILL):
            continue
        batch, limit = decode_batch(spec, lengths, slo.tpot)
        if not batch:
            return Estimate(0.0, Bottleneck.TPOT, prefill_ttft, spec.decode.base, 0.0)
        tpot = step_seconds(spec, lengths, batch)
        apart += count * batch / (tpot * lengths.output_tokens)
    if apart:
        rate, limit = min(((apart, limit), (prefill_rate, prefill_limit)), key=lambda side: side[0])
        if rate < apart:
            batch, tpot = _relaxed(fleet, lengths, rate, batch, tpot)
    for spec, count in fleet.engines:
        alone = spec.role is Role.DECODE and not fleet.count(Role.PREFILL)
        if not count or not (alone or spec.role is Role.BOTH):
            continue
        work = prefill_seconds(spec, lengths)
        own, why = decode_batch(spec, lengths, slo.tpot, work)
        if spec.prefill.base + work > slo.ttft:
            own, why = 0.0, Bottleneck.TTFT
        if own:
            step = step_seconds(spec, lengths, own, work)
            rate += count * own / (step * lengths.output_tokens)
        if not apart:
            limit, batch = why, own
            tpot = step_seconds(spec, lengths, own or 1.0, work)
            ttft = work + spec.prefill.base
    return Estimate(rate, limit, ttft, tpot, batch)


def _prefill_side(fleet: Fleet, lengths: Lengths, slo: Slo) -> tuple[float, Bottleneck, float]:
    """Return the rate at which prompts can come, what limits it, and an unqueued TTFT."""
    rate, ttft, engines, service = 0.0, math.inf, 0, 0.0
    for spec, count in fleet.engines:
        if spec.role is Role.PREFILL and count:
            service = prefill_seconds(spec, lengths)
            alone = max(service, spec.prefill.base + spec.prefill.per_token * lengths.uncached)
            exposed = fleet.link.exposed(round(lengths.uncached), alone) if fleet.link else 0.0
            ttft = min(ttft, alone + exposed)
            rate += count / service
            engines += count
    if not engines:
        return 0.0, Bottleneck.PREFILL, 0.0
    slack = slo.ttft - ttft
    if slack < 0:
        return 0.0, Bottleneck.TTFT, ttft
    limit = Bottleneck.PREFILL
    rate *= _utilisation(engines, service, slack)
    if fleet.link is not None and fleet.link.kv_bytes_per_token:
        decoders = fleet.count(Role.DECODE) + fleet.count(Role.BOTH)
        size = lengths.uncached * fleet.link.kv_bytes_per_token
        carried = min(engines, decoders) * fleet.link.bytes_per_second / size
        if carried < rate:
            rate, limit = carried, Bottleneck.LINK
    return rate, limit, ttft


def _utilisation(engines: int, service: float, slack: float) -> float:
    """Return how busy engines may be if 90 % of requests are to wait less than `slack`.

    Mean wait of M/D/c after Sakasegawa; waits are taken to be exponential behind it.
    """
    low, high = 0.0, 1.0
    for _ in range(40):
        busy = (low + high) / 2
        queue = busy ** (math.sqrt(2 * (engines + 1))) / (engines * (1 - busy) or 1e-12)
        if queue * service / 2 * math.log(10) <= slack:
            low = busy
        else:
            high = busy
    return low


def _relaxed(
    fleet: Fleet, lengths: Lengths, rate: float, batch: float, tpot: float
) -> tuple[float, float]:
    """Return the batch and step of decode engines that could do more than they are sent."""
    count = fleet.count(Role.DECODE)
    spec = next(spec for spec, n in fleet.engines if spec.role is Role.DECODE and n)
    per_sequence = spec.decode.per_sequence + spec.decode.per_context * lengths.context
    busy = rate * lengths.output_tokens / count
    if per_sequence * busy >= 1:
        return batch, tpot
    batch = busy * spec.decode.base / (1 - busy * per_sequence)
    return batch, step_seconds(spec, lengths, batch)


def closed_loop_rate(concurrency: float, output_tokens: float, ttft: float, tpot: float) -> float:
    """Return the requests a second of so many clients that wait for their answers."""
    positive("concurrency", concurrency)
    return concurrency / (ttft + (output_tokens - 1) * tpot)


def closed_loop(fleet: Fleet, lengths: Lengths, concurrency: float) -> Estimate:
    """Return what so many clients get from prefill and decode engines, each waiting for its answer.

    The rate is what the slower side can do, or what the clients ask for when neither is busy.
    """
    positive("concurrency", concurrency)
    spec, count = next((s, n) for s, n in fleet.engines if s.role is Role.DECODE and n)
    most_fed, _, ttft = _prefill_side(fleet, lengths, Slo(1e9, 1e9))
    most, why = decode_batch(spec, lengths, 1e9)
    low, high = 0.0, min(concurrency / count, most)
    # The largest batch that prefill can feed, with the clients that are not being prefilled.
    for _ in range(60):
        batch = (low + high) / 2
        step = step_seconds(spec, lengths, batch)
        rate = count * batch / (step * lengths.output_tokens)
        if rate <= most_fed and count * batch + rate * ttft <= concurrency:
            low = batch
        else:
            high = batch
    step = step_seconds(spec, lengths, low)
    rate = count * low / (step * lengths.output_tokens)
    if rate > 0.999 * most_fed:
        why = Bottleneck.PREFILL
    elif low < 0.999 * most:
        why = Bottleneck.DECODE
    return Estimate(rate, why, concurrency / rate - lengths.output_tokens * step, step, low)
