"""What is asked of a fleet: requests with their lengths, arrivals and shared prefixes."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from kvxfer.errors import InvalidError
from kvxfer.serving.checks import at_least, positive


@dataclass(frozen=True, slots=True)
class Job:
    """One request of a workload."""

    time: float
    """Seconds since the start at which it arrives; a closed loop takes only the order."""

    prompt_tokens: int
    output_tokens: int
    blocks: tuple[int, ...] = ()
    """Ids of its prompt's full blocks, in order. Equal ids are equal prefixes."""

    def __post_init__(self) -> None:
        at_least("time", self.time)
        at_least("prompt_tokens", self.prompt_tokens, 1)
        at_least("output_tokens", self.output_tokens, 1)


@dataclass(frozen=True, slots=True)
class Workload:
    """Jobs in the order in which they arrive."""

    jobs: tuple[Job, ...]
    block_tokens: int = 512
    """Tokens for which one id of `Job.blocks` stands."""

    def __post_init__(self) -> None:
        if not self.jobs:
            raise InvalidError("a workload without requests; the trace is empty")
        last = 0.0
        for index, job in enumerate(self.jobs):
            if job.time < last:
                raise InvalidError(
                    f"request {index} arrives at {job.time:g} s, after one of {last:g} s; sort them"
                )
            last = job.time

    @property
    def seconds(self) -> float:
        """Time between the first and the last arrival."""
        return self.jobs[-1].time - self.jobs[0].time

    @property
    def rate(self) -> float:
        """Requests a second, as they arrive."""
        if self.seconds <= 0:
            raise InvalidError("all requests arrive at once; give a rate")
        return (len(self.jobs) - 1) / self.seconds

    @property
    def prompt_mean(self) -> float:
        """Tokens of a prompt."""
        return sum(job.prompt_tokens for job in self.jobs) / len(self.jobs)

    @property
    def output_mean(self) -> float:
        """Tokens of an answer."""
        return sum(job.output_tokens for job in self.jobs) / len(self.jobs)

    def head(self, count: int) -> Workload:
        """Return the first `count` requests."""
        return Workload(self.jobs[:count], self.block_tokens)

    def at_rate(self, rate: float) -> Workload:
        """Return the same requests with their arrivals spread or squeezed to `rate`."""
        positive("rate", rate)
        factor = self.rate / rate
        start = self.jobs[0].time
        return self._retimed((job.time - start) * factor for job in self.jobs)

    def poisson(self, rate: float, seed: int = 0) -> Workload:
        """Return the same requests with random arrivals."""
        positive("rate", rate)
        generator = random.Random(seed)

        def times() -> Iterable[float]:
            now = 0.0
            for _ in self.jobs:
                now += generator.expovariate(rate)
                yield now

        return self._retimed(times())

    def _retimed(self, times: Iterable[float]) -> Workload:
        jobs = tuple(
            Job(time, job.prompt_tokens, job.output_tokens, job.blocks)
            for time, job in zip(times, self.jobs, strict=True)
        )
        return Workload(jobs, self.block_tokens)


Length = Callable[[random.Random], int]


def fixed(tokens: int) -> Length:
    """Return a length that is always the same."""
    at_least("tokens", tokens, 1)
    return lambda _: tokens


def lognormal(mean: float, sigma: float, most: int) -> Length:
    """Return lengths of the given mean and spread (of the logarithm), cut off at `most`."""
    positive("mean", mean)
    at_least("sigma", sigma)
    mu = math.log(mean) - sigma * sigma / 2
    return lambda generator: max(1, min(most, round(generator.lognormvariate(mu, sigma))))


def empirical(lengths: Sequence[int]) -> Length:
    """Return lengths drawn from those observed."""
    if not lengths:
        raise InvalidError("no lengths to draw from")
    return lambda generator: generator.choice(lengths)


def generate(count: int, rate: float, prompt: Length, output: Length, seed: int = 0) -> Workload:
    """Return `count` requests without shared prefixes that arrive at random, `rate` a second."""
    positive("rate", rate)
    at_least("count", count, 1)
    generator = random.Random(seed)
    now, jobs = 0.0, []
    for _ in range(count):
        now += generator.expovariate(rate)
        jobs.append(Job(now, prompt(generator), output(generator)))
    return Workload(tuple(jobs))
