"""The protocol keeps its promises in every state, and each of its rules is needed for that."""

from __future__ import annotations

import pytest
from faults.model.machine import MUTANTS, explore


def test_nothing_goes_wrong_in_any_state() -> None:
    states, wrong = explore()
    assert wrong == ""
    assert states > 10_000


@pytest.mark.parametrize("rule", MUTANTS)
def test_every_rule_is_needed(rule: str) -> None:
    """The control: without it something goes wrong, and is noticed."""
    _, wrong = explore(without=rule)
    assert wrong
