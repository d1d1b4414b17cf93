"""Prometheus' text format: what engines say about themselves is read, and our own is written.

Small and without a dependency: the gateway counts on its way of every request, and the planner must
run where nothing is installed.
"""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from kvxfer.errors import InvalidError

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
"""Buckets for what users wait for."""

_SAMPLE = re.compile(r"([a-zA-Z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)(?:\s+-?\d+)?\s*", re.DOTALL)
_LABEL = re.compile(r'\s*([a-zA-Z_]\w*)\s*=\s*"((?:[^"\\]|\\.)*)"\s*,?', re.DOTALL)
_NAME = re.compile(r"[a-zA-Z_:][\w:]*")
_ESCAPES = {"\\": "\\\\", "\n": "\\n", '"': '\\"'}
_UNESCAPES = {"\\\\": "\\", "\\n": "\n", '\\"': '"'}


@dataclass(frozen=True, slots=True)
class Sample:
    """One line: a value and what it is of."""

    name: str
    labels: Mapping[str, str]
    value: float


class Samples:
    """What one engine says, by name."""

    def __init__(self, samples: Iterable[Sample]) -> None:
        self._by_name: dict[str, list[Sample]] = {}
        for sample in samples:
            self._by_name.setdefault(sample.name, []).append(sample)

    def of(self, name: str) -> Sequence[Sample]:
        """Return the samples of this name."""
        return self._by_name.get(name, ())

    def total(self, name: str, **labels: str) -> float | None:
        """Return the sum of the finite samples that have these labels; None if there are none."""
        found = [
            sample.value
            for sample in self.of(name)
            if math.isfinite(sample.value)
            and all(sample.labels.get(label) == value for label, value in labels.items())
        ]
        return sum(found) if found else None

    def most(self, name: str) -> float | None:
        """Return the largest finite sample, as of the fullest of several ranks."""
        found = [sample.value for sample in self.of(name) if math.isfinite(sample.value)]
        return max(found) if found else None


def parse(text: str, wanted: Container[str] | None = None) -> Samples:
    """Return the samples in `text`, those named in `wanted` or all.

    A line that is none is left out: it must not hide the others.
    """
    return Samples(_parsed(text, wanted))


def _parsed(text: str, wanted: Container[str] | None) -> Iterator[Sample]:
    for line in text.split("\n"):  # and no other separator, which a label may have
        if not line or line[0] == "#":
            continue
        if wanted is not None and line.partition("{")[0].partition(" ")[0] not in wanted:
            continue
        match = _SAMPLE.fullmatch(line)
        if match is None:
            continue
        try:
            value = float(match[3])
        except ValueError:
            continue
        labels = {
            name: re.sub(r"\\.", lambda found: _UNESCAPES.get(found[0], found[0]), text)
            for name, text in _LABEL.findall(match[2] or "")
        }
        yield Sample(match[1], labels, value)


class _Family(ABC):
    """A metric with its children, one for each combination of label values."""

    kind = ""

    def __init__(self, name: str, about: str, labels: Sequence[str] = ()) -> None:
        if not _NAME.fullmatch(name):
            raise InvalidError(f"{name!r} is no name of a metric")
        self.name, self.about, self.labels = name, about, tuple(labels)

    def render(self) -> Iterator[str]:
        """Return the lines of this metric."""
        about = self.about.replace("\\", "\\\\").replace("\n", "\\n")
        yield f"# HELP {self.name} {about}"
        yield f"# TYPE {self.name} {self.kind}"
        yield from self._samples()

    @abstractmethod
    def _samples(self) -> Iterator[str]:
        """Return the lines of its children."""

    def _key(self, values: Sequence[str]) -> tuple[str, ...]:
        if len(values) != len(self.labels):
            raise InvalidError(f"{self.name} has the labels {self.labels}, not {len(values)}")
        return tuple(values)


class Value(_Family):
    """A counter or a gauge: one number for each combination of label values."""

    def __init__(self, kind: str, name: str, about: str, labels: Sequence[str] = ()) -> None:
        super().__init__(name, about, labels)
        self.kind = kind
        self._values: dict[tuple[str, ...], float] = {}
        if not labels:
            self._values[()] = 0.0

    def add(self, *values: str, by: float = 1.0) -> None:
        """Add `by` to the child with these label values."""
        self._values[values] = self._values.get(values, 0.0) + by

    def set(self, *values: str, to: float) -> None:
        """Set the child with these label values."""
        self._values[self._key(values)] = to

    def get(self, *values: str) -> float:
        """Return the child's value, 0 where there is none yet."""
        return self._values.get(values, 0.0)

    def clear(self) -> None:
        """Forget all children, as those of engines that have gone."""
        self._values.clear()

    def _samples(self) -> Iterator[str]:
        for values, value in list(self._values.items()):
            yield f"{self.name}{_labels(self.labels, self._key(values))} {_number(value)}"


class Histogram(_Family):
    """Observations by bucket, with their sum."""

    kind = "histogram"

    def __init__(
        self,
        name: str,
        about: str,
        labels: Sequence[str] = (),
        buckets: Sequence[float] = SECONDS,
    ) -> None:
        super().__init__(name, about, labels)
        self._bounds = tuple(buckets)
        self._children: dict[tuple[str, ...], tuple[list[int], list[float]]] = {}

    def observe(self, *values: str, value: float) -> None:
        """Count an observation."""
        child = self._children.get(values)
        if child is None:
            child = self._children[self._key(values)] = [0] * (len(self._bounds) + 1), [0.0]
        counts, total = child
        counts[bisect_left(self._bounds, value)] += 1
        total[0] += value

    def _samples(self) -> Iterator[str]:
        names = (*self.labels, "le")
        for values, (counts, total) in list(self._children.items()):
            seen = 0
            for bound, count in zip((*self._bounds, math.inf), counts, strict=True):
                seen += count
                labels = _labels(names, (*values, _number(bound)))
                yield f"{self.name}_bucket{labels} {seen}"
            labels = _labels(self.labels, values)
            yield f"{self.name}_sum{labels} {_number(total[0])}"
            yield f"{self.name}_count{labels} {seen}"


class Registry:
    """The metrics of one process."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self._families: dict[str, _Family] = {}

    def counter(self, name: str, about: str, *labels: str) -> Value:
        """Return a new counter; its name ends in ``_total``."""
        return self._add(Value("counter", f"{self._prefix}{name}_total", about, labels))

    def gauge(self, name: str, about: str, *labels: str) -> Value:
        """Return a new gauge."""
        return self._add(Value("gauge", f"{self._prefix}{name}", about, labels))

    def histogram(self, name: str, about: str, *labels: str) -> Histogram:
        """Return a new histogram of seconds."""
        family = Histogram(f"{self._prefix}{name}", about, labels)
        self._families[family.name] = family
        return family

    def render(self) -> str:
        """Return all metrics as text."""
        lines = [line for family in self._families.values() for line in family.render()]
        return "\n".join([*lines, ""])

    def _add(self, family: Value) -> Value:
        if family.name in self._families:
            raise InvalidError(f"there is a metric {family.name} already")
        self._families[family.name] = family
        return family


def _labels(names: Sequence[str], values: Sequence[str]) -> str:
    if not names:
        return ""
    quoted = (
        f'{name}="{"".join(_ESCAPES.get(letter, letter) for letter in value)}"'
        for name, value in zip(names, values, strict=True)
    )
    return "{" + ",".join(quoted) + "}"


def _number(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return str(int(value)) if value == int(value) and abs(value) < 1e15 else repr(value)
