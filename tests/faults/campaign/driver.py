"""Makes a schedule happen, and judges what comes of it."""

from __future__ import annotations

import time

from faults.campaign.fleet import Fleet
from faults.campaign.harm import Harm
from faults.campaign.outcome import Outcome
from faults.campaign.rest import Rest
from faults.campaign.schedule import Schedule
from faults.campaign.steps import Steps


def run(schedule: Schedule, sabotage: str | None = None) -> Outcome:
    """Run a round. `sabotage` makes nodes do wrong, which has to be noticed: see `Node`."""
    fleet = Fleet(schedule, sabotage)
    rest = Rest(fleet)
    kinds = [Steps(fleet), Harm(fleet), rest]
    try:
        fleet.start()
        rest.rest()
        for step in schedule.steps:
            fleet.serve_until(time.monotonic() + step.after)
            subject = next(kind for kind in kinds if hasattr(kind, step.kind))
            getattr(subject, step.kind)(**step.args)
        rest.rest()
    finally:
        fleet.end()
    return fleet.outcome
