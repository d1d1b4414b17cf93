"""Settings of agents that a case asks for."""

from __future__ import annotations

import dataclasses
from typing import Any

import kvxfer
from kvxfer.bench.case import BenchError, Case


def agent_settings(case: Case) -> dict[str, Any]:
    """Return what `kvxfer.Agent` takes; raise BenchError where it can't do that."""
    settings: dict[str, Any] = {"transport": case.transport}
    if case.threads:
        settings["threads"] = case.threads
    if "path" in {field.name for field in dataclasses.fields(kvxfer.Config)}:
        settings["path"] = case.path
    elif case.path == "direct":
        raise BenchError("path direct: this version has staged transfers only")
    return settings
