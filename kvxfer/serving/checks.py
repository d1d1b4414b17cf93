"""Checks of what callers pass in."""

from __future__ import annotations

import math

from kvxfer.errors import InvalidError


def at_least(name: str, value: float, minimum: float = 0.0) -> None:
    """Raise unless `value` is a finite number of at least `minimum`."""
    if not (math.isfinite(value) and value >= minimum):
        raise InvalidError(f"{name} is {value!r}; it has to be finite and at least {minimum:g}")


def positive(name: str, value: float) -> None:
    """Raise unless `value` is a finite number above zero."""
    if not (math.isfinite(value) and value > 0):
        raise InvalidError(f"{name} is {value!r}; it has to be finite and greater than 0")
