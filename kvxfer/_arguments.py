"""Checks of what is passed to an agent."""

from __future__ import annotations

from operator import index

from kvxfer.errors import InvalidError

_LONGEST = 1e8  # seconds that a lease or a fetch may last: three years


def check_seconds(name: str, value: float) -> None:
    if not 0 < value <= _LONGEST:
        raise InvalidError(f"{name} is {value} s: it must be positive and at most {_LONGEST:.0f}")


def token_range(tokens: slice | None, first: int, count: int) -> tuple[int, int]:
    """Return begin and end of the tokens asked for, out of `count` on offer from `first` on."""
    begin, end = first, first + count
    if tokens is not None:
        if tokens.step not in (None, 1):
            raise InvalidError(f"tokens={tokens} has a step: only runs of tokens can be fetched")
        begin = begin if tokens.start is None else index(tokens.start)
        end = end if tokens.stop is None else index(tokens.stop)
    if begin < first or end > first + count or begin >= end:
        raise InvalidError(
            f"tokens [{begin}, {end}) were asked for, on offer are [{first}, {first + count})"
        )
    return begin, end
