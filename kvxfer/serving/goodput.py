"""The largest rate at which requests still get what they were promised."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvxfer.serving.checks import positive
from kvxfer.serving.decide import Slo
from kvxfer.serving.promise import Promise
from kvxfer.serving.sim import Fleet, Result, Router, simulate
from kvxfer.serving.workload import Workload


@dataclass(frozen=True, slots=True)
class Goodput:
    """The best rate found, and what happened at it."""

    rate: float
    """Requests a second; 0 when even the lowest rate tried was too much."""

    result: Result | None


def keeps(result: Result, slo: Slo, promise: Promise, share: float) -> bool:
    """Whether a share of all requests, those rejected counted, got what was promised."""
    if promise is Promise.JOINT:
        return result.attainment(slo) >= share
    return min(result.attainments(slo)) >= share


class Search:
    """Looks for the goodput of one fleet; what it has simulated serves every promise."""

    def __init__(
        self,
        fleet: Fleet,
        workload: Workload,
        slo: Slo,
        router: Callable[[], Router],
        share: float = 0.9,
        precision: float = 0.02,
    ) -> None:
        positive("share", share)
        positive("precision", precision)
        self._fleet = fleet
        self._workload = workload
        self._slo = slo
        self._router = router
        self._share = share
        self._precision = precision
        self._known: dict[float, Result] = {}

    def goodput(self, promise: Promise, guess: float | None = None) -> Goodput:
        """Return the largest rate at which the share of the requests keeps `promise`.

        The workload's arrivals are squeezed or spread, so its bursts stay. `guess` is where the
        search starts: the rate of the closed form, or the workload's own.
        """
        rate = guess or self._workload.rate
        positive("guess", rate)
        floor, ceiling = rate / 64, rate * 64
        low, high = 0.0, 0.0
        while rate > floor and (not high or high - low > self._precision * high):
            if keeps(self._at(rate), self._slo, promise, self._share):
                low = rate
            else:
                high = rate
            if low > ceiling:
                break  # whatever limits it is not the rate
            rate = (low + high) / 2 if low and high else low * 1.5 or high / 2
        return Goodput(low, self._known.get(low))

    def _at(self, rate: float) -> Result:
        if rate not in self._known:
            self._known[rate] = simulate(self._fleet, self._workload.at_rate(rate), self._router())
        return self._known[rate]
