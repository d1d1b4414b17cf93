"""Interleaved repetitions, and the lines that report them.

This is for machines that are shared: a rate by itself means little there, but contenders that take
turns within one run meet the same disturbances, so the ratio of the two, taken repetition by
repetition, holds.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from kvbench.host import machine_cpu_seconds, process_cpu_seconds

GIB = 1 << 30
MIB = 1 << 20
KIB = 1 << 10


@dataclass
class Contender:
    """Something that takes its turn: `run` does the work and returns the seconds of each time."""

    name: str
    run: Callable[[], list[float]]
    pids: tuple[int, ...] = ()  # processes whose CPU time is its cost
    before: Callable[[], None] | None = None  # untimed preparation of each repetition
    rival: bool = False  # where it fails, the others go on without it


@dataclass
class Series:
    """What a contender's repetitions gave."""

    name: str
    samples: list[list[float]] = field(default_factory=list)  # per repetition
    cpu: list[tuple[float, ...]] = field(default_factory=list)  # per repetition, per pid

    @property
    def seconds(self) -> list[float]:
        """Seconds of each repetition."""
        return [sum(times) for times in self.samples]

    def rates(self, nbytes: int) -> list[float]:
        """GB/s of each repetition."""
        return [nbytes / s / 1e9 for s in self.seconds]

    def cpu_seconds_per_gb(self, nbytes: int) -> list[float]:
        """Median CPU seconds per GB moved, for each process."""
        return [
            round(statistics.median(c) / (nbytes / 1e9), 4) for c in zip(*self.cpu, strict=True)
        ]


@dataclass
class Round:
    """All contenders' series of one interleaved run."""

    series: dict[str, Series]
    foreign_cores: float  # processors that others kept busy meanwhile, the median repetition
    failed: dict[str, str] = field(default_factory=dict)  # rivals that did not last, and why


QUIET_CORES = 0.15
NOISY_CORES = 0.3
MOST_REPETITIONS = 3  # times those that were asked for
MOST_SECONDS = 20.0  # of one interleaved run, once it has FEWEST repetitions
FEWEST = 5


class Patience:
    """Waits for the others on this machine to be quiet, within a budget for the whole run."""

    left_s = 60.0

    @classmethod
    def wait(cls, pids: Iterable[int]) -> None:
        """Return when the machine is quiet or the budget is spent."""
        pids = tuple(pids)
        while cls.left_s > 0:
            began = time.monotonic()
            load = _Load(pids)
            time.sleep(0.1)
            if load.foreign_cores() < QUIET_CORES:
                return
            cls.left_s -= time.monotonic() - began


class _Load:
    def __init__(self, pids: Iterable[int]) -> None:
        self._pids = tuple(pids)
        self._began = time.monotonic()
        self._machine = machine_cpu_seconds()
        self._own = self._used()

    def foreign_cores(self) -> float:
        own = self._used() - self._own
        foreign = machine_cpu_seconds() - self._machine - own
        return max(0.0, foreign / (time.monotonic() - self._began))

    def _used(self) -> float:
        return sum(process_cpu_seconds(pid) for pid in self._pids)


def interleave(contenders: Sequence[Contender], repetitions: int, warmup: int = 1) -> Round:
    """Run the contenders in turns: A B C A B C ...

    Other users of the machine hurt contenders that poll on two cores far more than others, so a
    repetition in which somebody else was busy is made again, within a bound, and the quietest are
    kept. They are chosen by the foreign load alone, never by what they gave. Rivals that are very
    slow end the run early, so that the others' figures are not hours apart.
    """
    failed: dict[str, str] = {}

    def turn(contender: Contender) -> tuple[list[float], tuple[float, ...]]:
        if contender.name in failed:
            return [], ()
        try:
            return _once(contender)
        except (OSError, RuntimeError) as error:
            if not contender.rival:
                raise
            failed[contender.name] = str(error)
            return [], ()

    for _ in range(warmup):
        for contender in contenders:
            turn(contender)
    rows: list[tuple[float, list[tuple[list[float], tuple[float, ...]]]]] = []
    quiet = 0
    end = time.monotonic() + MOST_SECONDS
    while quiet < repetitions and len(rows) < MOST_REPETITIONS * repetitions:
        if len(rows) >= FEWEST and time.monotonic() > end:
            break
        pids = {pid for c in contenders if c.name not in failed for pid in c.pids} | {os.getpid()}
        Patience.wait(pids)
        load, lost = _Load(pids), len(failed)
        row = [turn(contender) for contender in contenders]
        if len(failed) > lost:
            continue  # what the others did beside its end is no repetition
        foreign = load.foreign_cores()
        rows.append((foreign, row))
        quiet += foreign < QUIET_CORES
    rows.sort(key=lambda r: r[0])
    rows = rows[:repetitions]
    series = {}
    for i, contender in enumerate(contenders):
        if contender.name in failed:
            continue
        mine = [row[i] for _, row in rows]
        series[contender.name] = Series(contender.name, [m[0] for m in mine], [m[1] for m in mine])
    foreign_cores = round(statistics.median(foreign for foreign, _ in rows), 2)
    return Round(series, foreign_cores, failed)


def _once(contender: Contender) -> tuple[list[float], tuple[float, ...]]:
    if contender.before is not None:
        contender.before()
    before = [process_cpu_seconds(pid) for pid in contender.pids]
    times = contender.run()
    after = [process_cpu_seconds(pid) for pid in contender.pids]
    return times, tuple(b - a for a, b in zip(before, after, strict=True))


def timed(work: Callable[[], object]) -> float:
    """Seconds that `work` takes."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


@dataclass
class Result:
    """One line of output. `ratio` is value over baseline, the median over the repetitions."""

    name: str
    value: float | None
    unit: str
    baseline: str
    ratio: float | None
    baseline_value: float | None = None
    n: int = 0
    min: float | None = None
    max: float | None = None
    bar: str = ""  # what the ratio should reach, such as ">= 0.85"
    extra: dict[str, object] = field(default_factory=dict)

    def line(self) -> dict[str, object]:
        """What --json prints."""
        out: dict[str, object] = {
            "name": self.name,
            "value": _rounded(self.value),
            "unit": self.unit,
            "baseline": self.baseline,
            "ratio": _rounded(self.ratio),
            "baseline_value": _rounded(self.baseline_value),
            "n": self.n,
            "min": _rounded(self.min),
            "max": _rounded(self.max),
        }
        if self.bar:
            out["bar"] = self.bar
            out["met"] = self.met()
        if self.noisy():
            out["noisy"] = True
        return {**out, **self.extra}

    def noisy(self) -> bool:
        """Whether others kept the machine so busy that the figures prove nothing."""
        foreign = self.extra.get("foreign_cores", 0.0)
        return isinstance(foreign, float) and foreign > NOISY_CORES

    def met(self) -> bool | None:
        """Whether the bar is reached; None when there is none, or nothing to compare."""
        if not self.bar or self.ratio is None:
            return None
        sign, limit = self.bar.split()
        return self.ratio >= float(limit) if sign == ">=" else self.ratio <= float(limit)


def compare(
    name: str,
    ours: Sequence[float],
    unit: str,
    baseline: str,
    theirs: Sequence[float],
    bar: str = "",
    **extra: object,
) -> Result:
    """A result from values that were measured in turns, entry i of each in the same repetition."""
    return Result(
        name,
        statistics.median(ours),
        unit,
        baseline,
        statistics.median(a / b for a, b in zip(ours, theirs, strict=True)),
        statistics.median(theirs),
        len(ours),
        min(ours),
        max(ours),
        bar,
        dict(extra),
    )


def alone(name: str, ours: Sequence[float], unit: str, baseline: str, **extra: object) -> Result:
    """A result without anything to compare with; `baseline` says why."""
    return Result(
        name,
        statistics.median(ours),
        unit,
        baseline,
        None,
        None,
        len(ours),
        min(ours),
        max(ours),
        extra=dict(extra),
    )


def missing(name: str, unit: str, baseline: str, why: str) -> Result:
    """A result for something that could not be measured."""
    return Result(name, None, unit, baseline, None, extra={"why": why})


class Report:
    """Prints results as they come: JSON lines, or a table for people."""

    def __init__(self, as_json: bool) -> None:
        self._json = as_json
        self.results: list[Result] = []

    def env(self, stamp: dict[str, object]) -> None:
        """Print where the figures come from."""
        if self._json:
            self._print(json.dumps({"name": "env", **stamp}))
            return
        for key, value in stamp.items():
            self._print(f"# {key}: {value}")
        self._print(
            f"{'name':34} {'value':>10} {'unit':8} {'ratio':>6}  {'bar':8} {'n':>5} "
            f"{'min..max':>17}  baseline"
        )

    def add(self, results: Iterable[Result]) -> None:
        """Print results."""
        for result in results:
            self.results.append(result)
            self._print(json.dumps(result.line()) if self._json else _row(result))

    @staticmethod
    def _print(text: str) -> None:
        print(text, flush=True)


def _row(r: Result) -> str:
    def number(x: float | None) -> str:
        return "-" if x is None else f"{x:.4g}"

    verdict = ("  NOISY" if r.noisy() else "") + ("  MISSED" if r.met() is False else "")
    spread = "" if r.min is None else f"{number(r.min)}..{number(r.max)}"
    base = r.baseline if r.baseline_value is None else f"{r.baseline} ({number(r.baseline_value)})"
    row = (
        f"{r.name:34} {number(r.value):>10} {r.unit:8} {number(r.ratio):>6}  {r.bar:8} {r.n:>5} "
        f"{spread:>17}  {base}{verdict}"
    )
    for key, value in r.extra.items():
        row += f"\n{'':37}{key}: {value}"
    return row


def _rounded(x: float | None) -> float | None:
    return None if x is None else float(f"{x:.5g}")
