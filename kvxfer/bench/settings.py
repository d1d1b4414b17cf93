"""Settings of agents that a case asks for."""

from __future__ import annotations

from typing import Any

from kvxfer.bench.case import Case


def agent_settings(case: Case) -> dict[str, Any]:
    """Return what `kvxfer.Agent` takes on both sides; it refuses what it can't do."""
    settings: dict[str, Any] = {"transport": case.transport, "path": case.path}
    if case.threads:
        settings["threads"] = case.threads
    return settings
