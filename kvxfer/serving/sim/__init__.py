"""A deterministic simulation of a fleet of engines that prefill, decode, or do both."""

from kvxfer.serving.sim.fleet import EngineSpec, Fleet, Role
from kvxfer.serving.sim.results import Outcome, Result
from kvxfer.serving.sim.routing import (
    Decided,
    Router,
    always_local,
    always_remote,
    fixed_threshold,
)
from kvxfer.serving.sim.simulation import simulate

__all__ = [
    "Decided",
    "EngineSpec",
    "Fleet",
    "Outcome",
    "Result",
    "Role",
    "Router",
    "always_local",
    "always_remote",
    "fixed_threshold",
    "simulate",
]
