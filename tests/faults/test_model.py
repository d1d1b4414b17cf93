"""The protocol keeps its promises in every state, and each of its rules is needed for that."""

from __future__ import annotations

from types import ModuleType

import pytest
from faults.model import direct, machine


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("path", "least"), [(machine, 10_000), (direct, 200_000)])
def test_nothing_goes_wrong_in_any_state(path: ModuleType, least: int) -> None:
    states, wrong = path.explore()
    assert wrong == ""
    assert states > least


@pytest.mark.parametrize(
    ("path", "rule"), [(path, rule) for path in (machine, direct) for rule in path.MUTANTS]
)
def test_every_rule_is_needed(path: ModuleType, rule: str) -> None:
    """The control: without it something goes wrong, and is noticed."""
    _, wrong = path.explore(without=rule)
    assert wrong
