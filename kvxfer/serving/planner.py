"""How many engines of which kind: candidates, their rates in closed form, the best simulated."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from kvxfer.errors import InvalidError
from kvxfer.serving.checks import at_least
from kvxfer.serving.cost_model import Link
from kvxfer.serving.decide import Policy, Slo
from kvxfer.serving.goodput import Goodput, Search
from kvxfer.serving.promise import Promise
from kvxfer.serving.rate_matching import Bottleneck, Estimate, Lengths, estimate
from kvxfer.serving.sim import Decided, EngineSpec, Fleet, Role, Router
from kvxfer.serving.workload import Workload


@dataclass(frozen=True, slots=True)
class Question:
    """What is to be planned for."""

    workload: Workload
    slo: Slo
    engines: tuple[EngineSpec, ...]
    """The kinds that there are, at most one for each role."""

    link: Link | None
    gpus: int
    """How many there are at most."""

    policy: Policy = Policy()
    promise: Promise = Promise.JOINT
    share: float = 0.9
    first_token_at_prefill: bool = False
    rate: float | None = None
    """Requests a second that have to be served; None asks for the most."""

    def __post_init__(self) -> None:
        at_least("gpus", self.gpus, 1)
        if not 0 < self.share <= 1:
            raise InvalidError(f"share is {self.share!r}, not above 0 and at most 1")
        roles = [spec.role for spec in self.engines]
        if len(set(roles)) != len(roles):
            raise InvalidError("two kinds of engine have the same role; a plan takes one for each")
        if Role.PREFILL in roles and self.link is None:
            raise InvalidError(
                "prefill engines without a link: give the rate that `kvxfer bench` measured"
            )
        if not set(roles) - {Role.PREFILL}:
            raise InvalidError("no kind of engine that decodes")

    @property
    def lengths(self) -> Lengths:
        """Of the workload, on average; what a prefix cache may save is left to the simulation."""
        return Lengths(self.workload.prompt_mean, self.workload.output_mean)


@dataclass(frozen=True, slots=True)
class Candidate:
    """A fleet and what was found out about it."""

    fleet: Fleet
    estimate: Estimate
    simulated: Goodput | None = None
    other: Goodput | None = None
    """By the other meaning of the promise."""

    @property
    def rate(self) -> float:
        """Requests a second: simulated, or in closed form where it was not."""
        return self.estimate.rate if self.simulated is None else self.simulated.rate

    @property
    def score(self) -> float:
        """What candidates are compared by: requests a second for the money, or for a GPU."""
        return self.rate / (self.fleet.price_per_hour or self.fleet.gpus)


@dataclass(frozen=True, slots=True)
class Plan:
    """The answer: the candidates, best first, and what speaks for the first."""

    question: Question
    candidates: tuple[Candidate, ...]
    infeasible: str | None
    """Why nothing will do; None where something does."""

    @property
    def best(self) -> Candidate | None:
        """The candidate to take."""
        return None if self.infeasible else self.candidates[0]


def fleets(question: Question) -> Iterator[Fleet]:
    """Return every fleet that leaves no room for one more engine of the smallest kind."""
    kinds = {spec.role: spec for spec in question.engines}
    smallest = min(spec.gpus for spec in question.engines)

    def counts(role: Role, left: int) -> range:
        return range(left // kinds[role].gpus + 1) if role in kinds else range(1)

    def used(role: Role, count: int) -> int:
        return count * kinds[role].gpus if count else 0

    for prefill in counts(Role.PREFILL, question.gpus):
        after = question.gpus - used(Role.PREFILL, prefill)
        for decode in counts(Role.DECODE, after):
            rest = after - used(Role.DECODE, decode)
            for both in counts(Role.BOTH, rest):
                if rest - used(Role.BOTH, both) >= smallest:
                    continue
                if bool(prefill) and not decode + both or not prefill + decode + both:
                    continue
                if decode and not prefill and Role.BOTH in kinds:
                    continue  # engines meant for both do that better
                numbers = {Role.PREFILL: prefill, Role.DECODE: decode, Role.BOTH: both}
                yield Fleet(
                    tuple((kinds[role], n) for role, n in numbers.items() if n),
                    question.link,
                    question.first_token_at_prefill,
                )


def plan(question: Question, confirm: int = 4, precision: float = 0.02) -> Plan:
    """Return the candidates, the best `confirm` of the closed form simulated, best first.

    The best one that prefills and decodes in the same engines is always simulated as well: "don't
    disaggregate" is an answer.
    """
    lengths = question.lengths
    found = [Candidate(fleet, estimate(fleet, lengths, question.slo)) for fleet in fleets(question)]
    if not found:
        raise InvalidError(
            f"{question.gpus} GPUs are too few for any fleet; the engines take "
            + ", ".join(f"{spec.gpus} ({spec.role.value})" for spec in question.engines)
        )
    found.sort(key=lambda candidate: (-candidate.score, candidate.fleet.name))
    chosen = found[:confirm]
    together = [one for one in found if not one.fleet.count(Role.PREFILL)]
    if together and together[0] not in chosen:
        chosen.append(together[0])
    # What an average request already misses, nine of ten don't get: not worth a simulation.
    chosen = [one for one in chosen if one.rate]
    if not chosen:
        return Plan(question, tuple(found), _infeasible(question, found))
    rest = [one for one in found if one not in chosen]
    confirmed = [_confirm(question, candidate, precision) for candidate in chosen]
    confirmed.sort(key=lambda candidate: (-candidate.score, candidate.fleet.name))
    if question.rate is not None:
        enough = [one for one in confirmed if one.rate >= question.rate]
        confirmed = sorted(
            enough, key=lambda one: (one.fleet.price_per_hour or one.fleet.gpus, -one.rate)
        ) + [one for one in confirmed if one not in enough]
    return Plan(question, (*confirmed, *rest), _infeasible(question, confirmed))


def router_of(question: Question) -> Callable[[], Router]:
    """Return what makes a router for one simulation."""
    return lambda: Decided(question.slo, question.policy, question.link)


def _confirm(question: Question, candidate: Candidate, precision: float) -> Candidate:
    search = Search(
        candidate.fleet,
        question.workload,
        question.slo,
        router_of(question),
        question.share,
        precision,
    )
    guess = candidate.estimate.rate
    return replace(
        candidate,
        simulated=search.goodput(question.promise, guess),
        other=search.goodput(next(one for one in Promise if one is not question.promise), guess),
    )


def _infeasible(question: Question, confirmed: list[Candidate]) -> str | None:
    slo, best = question.slo, confirmed[0]
    if best.rate:
        if question.rate is not None and best.rate < question.rate:
            return (
                f"{question.gpus} GPUs serve {best.rate:.3g} requests a second at most "
                f"({best.fleet.name}, limited by {best.estimate.bottleneck.value}); "
                f"asked for are {question.rate:.3g}"
            )
        return None
    why = best.estimate
    if why.bottleneck is Bottleneck.TPOT:
        return (
            f"a decode step takes {why.tpot * 1e3:.3g} ms even with one sequence; "
            f"promised are {slo.tpot * 1e3:.3g} ms a token"
        )
    if why.bottleneck is Bottleneck.TTFT:
        return (
            f"the first token of an average prompt takes {why.ttft * 1e3:.3g} ms without any "
            f"queue; promised are {slo.ttft * 1e3:.3g}"
        )
    return (
        f"fewer than {question.share:.0%} of the requests meet the SLO at any rate, although an "
        f"average one would: TTFT {why.ttft * 1e3:.3g} of {slo.ttft * 1e3:.3g} ms, "
        f"TPOT {why.tpot * 1e3:.3g} of {slo.tpot * 1e3:.3g}"
    )


@dataclass(frozen=True, slots=True)
class Shift:
    """What would be best if the load were another."""

    what: str
    fleet: Fleet
    estimate: Estimate


def shifts(question: Question) -> list[Shift]:
    """Return the best fleet in closed form where prompts or answers get longer or shorter."""
    lengths = question.lengths
    cases = [
        ("prompts x 0.5", replace(lengths, prompt_tokens=lengths.prompt_tokens / 2)),
        ("prompts x 2", replace(lengths, prompt_tokens=lengths.prompt_tokens * 2)),
        ("answers x 0.5", replace(lengths, output_tokens=max(1.0, lengths.output_tokens / 2))),
        ("answers x 2", replace(lengths, output_tokens=lengths.output_tokens * 2)),
        ("half of each prompt cached", replace(lengths, cached_share=0.5)),
    ]
    found = []
    for what, case in cases:
        options = [Candidate(f, estimate(f, case, question.slo)) for f in fleets(question)]
        best = max(options, key=lambda candidate: candidate.score)
        found.append(Shift(what, best.fleet, best.estimate))
    return found
