"""What a simulation tells."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from kvxfer.serving.decide import Place, Reason, Slo
from kvxfer.serving.sim.fleet import Fleet
from kvxfer.serving.sim.steps import StepTimes


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one request. Times are simulated seconds."""

    index: int
    """In the workload."""

    arrived: float
    first: float
    last: float
    prompt_tokens: int
    output_tokens: int
    place: Place
    reason: Reason
    uncached: int
    preemptions: int

    @property
    def ttft(self) -> float:
        """Time to the first token."""
        return self.first - self.arrived

    @property
    def tpot(self) -> float:
        """Time per token behind the first, on average; 0 for an answer of one token."""
        if self.output_tokens == 1:
            return 0.0
        return (self.last - self.first) / (self.output_tokens - 1)

    def meets(self, slo: Slo) -> bool:
        """Whether both promises were kept."""
        return self.ttft <= slo.ttft and self.tpot <= slo.tpot


@dataclass(frozen=True, slots=True)
class EngineUse:
    """How one engine fared."""

    name: str
    busy: float
    """Seconds in which it computed."""

    tokens_prefilled: int
    tokens_out: int
    blocks_pinned: int
    """At the end, when nothing is left to do: 0, or blocks have leaked."""


@dataclass(frozen=True, slots=True)
class Result:
    """One simulation."""

    fleet: Fleet
    outcomes: tuple[Outcome, ...]
    """In the order in which requests arrived, without those rejected."""

    rejected: tuple[int, ...]
    """Indices of requests that no engine could ever hold."""

    engines: tuple[EngineUse, ...]
    gaps: StepTimes
    bytes_moved: float
    seconds: float

    @property
    def output_rate(self) -> float:
        """Tokens a second, from the first arrival to the last token."""
        return sum(outcome.output_tokens for outcome in self.outcomes) / self.seconds

    @property
    def request_rate(self) -> float:
        """Requests a second, over the same time."""
        return len(self.outcomes) / self.seconds

    @property
    def cost_per_million(self) -> float:
        """Price of a million tokens of output; 0 where no price is known."""
        return self.fleet.price_per_hour / 3600 / self.output_rate * 1e6

    @property
    def joules_per_token(self) -> float:
        """Energy of a token of output; 0 where no power is known."""
        return self.fleet.watts / self.output_rate

    def mean(self, what: Callable[[Outcome], float]) -> float:
        """Return the mean over the requests, e.g. `mean(lambda o: o.ttft)`."""
        return sum(map(what, self.outcomes)) / len(self.outcomes)

    def percentile(self, what: Callable[[Outcome], float], percent: float) -> float:
        """Return what `percent` of the requests did not exceed."""
        return percentile(map(what, self.outcomes), percent)

    def attainment(self, slo: Slo) -> float:
        """Return the share of requests that kept both promises; those rejected kept none."""
        return sum(outcome.meets(slo) for outcome in self.outcomes) / self._asked

    def attainments(self, slo: Slo) -> tuple[float, float]:
        """Return the shares that kept the promise on TTFT, and on TPOT, each for itself."""
        ttft = sum(outcome.ttft <= slo.ttft for outcome in self.outcomes)
        tpot = sum(outcome.tpot <= slo.tpot for outcome in self.outcomes)
        return ttft / self._asked, tpot / self._asked

    def reasons(self) -> Counter[Reason]:
        """Return how often each reason decided."""
        return Counter(outcome.reason for outcome in self.outcomes)

    def remote_shares(self) -> tuple[float, float]:
        """Return the shares of requests and of uncached tokens sent to the prefill pool."""
        remote = [outcome for outcome in self.outcomes if outcome.place is Place.REMOTE]
        tokens = sum(outcome.uncached for outcome in self.outcomes)
        sent = sum(outcome.uncached for outcome in remote)
        return len(remote) / len(self.outcomes), sent / tokens if tokens else 0.0

    @property
    def _asked(self) -> int:
        return len(self.outcomes) + len(self.rejected)


def percentile(values: Iterable[float], percent: float) -> float:
    """Return the smallest value that `percent` of the values do not exceed."""
    ordered = sorted(values)
    rank = -(-len(ordered) * percent // 100)
    return ordered[max(0, min(len(ordered), int(rank)) - 1)]
