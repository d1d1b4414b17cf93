"""Which engines a request goes to, and the policies that `decide` is compared with."""

from __future__ import annotations

from typing import Protocol

from kvxfer.serving.cost_model import Link
from kvxfer.serving.decide import (
    Decision,
    DecodeEngine,
    Place,
    Policy,
    PrefillPool,
    Prompt,
    Reason,
    Slo,
    decide,
)
from kvxfer.serving.gates import Gates
from kvxfer.serving.sim.engine import Engine
from kvxfer.serving.sim.task import Task


class Router(Protocol):
    """Says where a request is prefilled, given the engines that would do it."""

    def __call__(
        self, task: Task, prefill: list[Engine], best: Engine | None, decode: Engine, now: float
    ) -> Decision:
        """Return the decision. `best` is the prefill engine that would take the request."""


def pick_decode(task: Task, engines: list[Engine]) -> Engine:
    """Return the engine that is left least loaded, what it has cached of the prompt counted."""
    if len(engines) == 1:
        return engines[0]

    def loaded(engine: Engine) -> tuple[float, int]:
        uncached = task.job.prompt_tokens - engine.cached_tokens(task)
        return engine.load + uncached / engine.spec.kv_tokens, engine.tokens_out

    return min(engines, key=loaded)


def pick_prefill(task: Task, engines: list[Engine]) -> Engine | None:
    """Return the engine that would be done first; among equals the one that did least so far."""
    if not engines:
        return None

    def done(engine: Engine) -> tuple[float, int]:
        uncached = task.job.prompt_tokens - engine.cached_tokens(task)
        seconds = (engine.inflight_tokens + uncached) * engine.spec.prefill.per_token
        return seconds, engine.tokens_prefilled

    return min(engines, key=done)


class Decided:
    """Routes by `decide`, and keeps the state of its gates."""

    def __init__(self, slo: Slo, policy: Policy | None = None, link: Link | None = None) -> None:
        self._slo = slo
        self._policy = policy or Policy()
        self._link = link or Link(1.0, 0.0)
        self._saturated = Gates().saturated
        self._pressured: dict[str, Gates] = {}

    def __call__(
        self, task: Task, prefill: list[Engine], best: Engine | None, decode: Engine, now: float
    ) -> Decision:
        """See `Router`."""
        cached = decode.cached_tokens(task)
        if best is None:
            pool, elsewhere = PrefillPool(0), None
        else:
            elsewhere = best.cached_tokens(task)
            pool = PrefillPool(
                len(prefill),
                sum(engine.inflight_tokens for engine in prefill),
                sum(len(engine.waiting) for engine in prefill),
                best.spec.prefill.tokens_per_second,
                best.spec.prefill.base,
            )
        spec = decode.spec
        engine = DecodeEngine(
            decode.kv_used,
            len(decode.running),
            decode.inflight_tokens,
            spec.prefill.tokens_per_second,
            decode.step_seconds,
            decode.itl_seconds,
            spec.chunk_tokens or spec.batch_tokens,
            spec.block_tokens,
        )
        kept = self._pressured.get(decode.name)
        gates = Gates(self._saturated) if kept is None else Gates(self._saturated, kept.pressured)
        decision = decide(
            Prompt(task.job.prompt_tokens, cached, elsewhere),
            pool,
            engine,
            self._link,
            self._slo,
            self._policy,
            gates,
            now,
        )
        self._saturated = decision.gates.saturated
        self._pressured[decode.name] = decision.gates
        return decision


def _fixed(task: Task, decode: Engine, remote: bool, reason: Reason) -> Decision:
    uncached = task.job.prompt_tokens - decode.cached_tokens(task)
    place = Place.REMOTE if remote else Place.LOCAL
    return Decision(place, reason, uncached, None, None, Gates())


def always_local(
    task: Task, prefill: list[Engine], best: Engine | None, decode: Engine, now: float
) -> Decision:
    """Let every engine prefill what it decodes."""
    return _fixed(task, decode, False, Reason.SHORT)


def always_remote(
    task: Task, prefill: list[Engine], best: Engine | None, decode: Engine, now: float
) -> Decision:
    """Send every prompt to the prefill pool."""
    return _fixed(task, decode, best is not None, Reason.LONG)


def fixed_threshold(uncached: int) -> Router:
    """Return a router that goes by the number of uncached tokens alone."""

    def route(
        task: Task, prefill: list[Engine], best: Engine | None, decode: Engine, now: float
    ) -> Decision:
        decision = _fixed(task, decode, False, Reason.SHORT)
        if best is not None and decision.uncached >= uncached:
            return _fixed(task, decode, True, Reason.LONG)
        return decision

    return route
