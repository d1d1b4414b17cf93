"""Every state of a machine."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol, TypeVar


class Machine(Protocol):
    """Hashable, immutable."""

    @property
    def wrong(self) -> str:
        """What has gone wrong, or nothing."""


M = TypeVar("M", bound=Machine)


def visit(
    start: M, steps: Callable[[M], Iterable[tuple[M, bool]]], at_rest: Callable[[M], bool]
) -> tuple[int, str]:
    """Visit all states. Returns how many there are, and what is wrong: "" for nothing.

    `steps` says what can happen next, and whether by itself. That alone must lead to rest.
    """
    before: dict[M, list[M]] = {start: []}
    todo = [start]
    while todo:
        state = todo.pop()
        for following, by_itself in steps(state):
            if following.wrong:
                return len(before), following.wrong
            if following not in before:
                before[following] = []
                todo.append(following)
            if by_itself:
                before[following].append(state)
    resting = [state for state in before if at_rest(state)]
    reached = set(resting)
    while resting:
        for earlier in before[resting.pop()]:
            if earlier not in reached:
                reached.add(earlier)
                resting.append(earlier)
    for state in before:
        if state not in reached:
            return len(before), f"never comes to rest: {state}"
    return len(before), ""
