"""Examines described hosts, from their folder and from a recording of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from kvtest.doctor_hosts import Host, validate

from kvxfer.doctor.examine import Examination, examine
from kvxfer.doctor.tree import open_tree


@pytest.fixture
def look(tmp_path: Path) -> Callable[[Host], Examination]:
    """Examine a host in its folder, and again from a recording: the same must come out."""

    def examined(host: Host) -> Examination:
        root = tmp_path / f"host{len(list(tmp_path.iterdir()))}"
        root.mkdir()
        tree = open_tree(str(host.write(root)))
        found = examine(tree, self_test=True)
        tree.write(f"{root}.json")
        assert examine(open_tree(f"{root}.json"), self_test=True) == found
        validate(found.record())
        return found

    return examined
