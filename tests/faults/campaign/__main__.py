"""Command line of the campaign."""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shlex
import subprocess
import sys
import time
from pathlib import Path

from faults.campaign import network, sweep
from faults.campaign.draw import draw_schedule
from faults.campaign.driver import run
from faults.campaign.outcome import Outcome
from faults.campaign.report import show, summary
from faults.campaign.schedule import GPU_LANES, TRANSPORTS, Schedule
from faults.campaign.shrink import as_test, fails_like, shrink
from kvtest import fake_gpu, fake_verbs, ucx

import kvxfer

_LANES = [lane for lanes in itertools.zip_longest(TRANSPORTS, GPU_LANES) for lane in lanes if lane]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m faults.campaign", description=__doc__)
    parser.add_argument("--minutes", type=float, default=2.0, help="how long (default: 2)")
    parser.add_argument("--seed", type=int, default=1, help="of the first round (default: 1)")
    parser.add_argument("--rounds", type=int, help="so many rounds, however long they take")
    parser.add_argument("--steps", type=int, default=150, help="of each round (default: 150)")
    parser.add_argument(
        "--transports",
        default=",".join(_LANES),
        help='in turn, as "gpu-..." with caches on GPUs that are made up (default: %(default)s)',
    )
    parser.add_argument("--json", type=Path, help="write the summary to this file")
    parser.add_argument("--replay", type=Path, help="run the schedule in this file")
    parser.add_argument(
        "--sweep",
        action="store_true",
        help="no chance: kill, and stop, either side at each kind of message over tcp",
    )
    parser.add_argument("--no-shrink", action="store_true", help="don't cut failing rounds down")
    parser.add_argument(
        "--sabotage",
        choices=["wrong", "late", "leak", "grow", "event", "short"],
        help="let the fleet do wrong, to see that it is noticed",
    )
    return parser.parse_args()


def _run(schedule: Schedule, about: str, total: Outcome, sabotage: str | None = None) -> Outcome:
    began = time.monotonic()
    outcome = run(schedule, sabotage)
    print(
        f"{about}: {sum(outcome.operations.values())} operations, "
        f"{sum(outcome.faults.values())} faults, "
        f"{outcome.fetches['OK']} of {sum(outcome.fetches.values())} fetches delivered, "
        f"{len(outcome.findings)} findings, {time.monotonic() - began:.1f} s",
        flush=True,
    )
    for finding in outcome.findings[:10]:
        print(f"  {finding.kind}: {finding.why}", flush=True)
    total.add(outcome)
    return outcome


def _round(schedule: Schedule, drawn: str, total: Outcome, arguments: argparse.Namespace) -> None:
    about = f"seed {schedule.seed} {schedule.gpus and 'gpu-'}{schedule.transport}"
    about += "".join(f" {so}" for so in ("calm", "tls") if getattr(schedule, so))
    outcome = _run(schedule, about, total, arguments.sabotage)
    if outcome.findings and not arguments.no_shrink:
        kept = shrink(
            schedule,
            lambda part: fails_like(part, outcome.findings, sabotage=arguments.sabotage),
        )
        print(f"  {len(kept)} of its {len(schedule.steps)} steps do it:\n", flush=True)
        print(as_test(schedule, drawn, kept, outcome.findings), flush=True)


def _sweep(total: Outcome) -> None:
    for agent, (how, seconds) in itertools.product(sweep.AGENTS, sweep.WAYS):
        about = f"{how} {agent} for {seconds} s"
        outcome = _run(sweep.sweep_schedule(agent, how, seconds), about, total)
        unmet = sweep.missed(outcome, how)
        for finding in unmet:
            print(f"  {finding.kind}: {finding.why}", flush=True)
        total.findings += unmet


def _missing(lane: str) -> str | None:
    """Return why this host has not got a transport, or GPUs, if so."""
    transport = lane.removeprefix("gpu-")
    if transport != lane and (why := fake_gpu.missing()) is not None:
        return why
    if transport == "namespaces":
        return network.missing()
    if transport in ("verbs", "rdma"):
        real = fake_verbs.real_devices() is not None
        if real is (transport == "rdma"):
            return None if real else fake_verbs.missing()
        return "there are real adapters" if real else "no adapters are named in KVXFER_TEST_VERBS"
    return ucx.missing() if transport in ucx.LANES else None


def _command() -> str:
    """Return what does the same again."""
    words = ["python", "-m", "faults.campaign", *sys.argv[1:]]
    if "--json" in words:
        at = words.index("--json")
        del words[at : at + 2]
    return shlex.join(words)


def _commit() -> str:
    """Return the commit that this is the code of, with a "+" where it was changed since."""
    command = ["git", "describe", "--always", "--exclude=*", "--dirty=+"]
    here = Path(__file__).parent
    done = subprocess.run(command, cwd=here, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def main() -> int:
    arguments = _arguments()
    total = Outcome()
    began = time.monotonic()
    transports = arguments.transports.split(",")
    if arguments.sweep:
        _sweep(total)
    elif arguments.replay is not None:
        text = arguments.replay.read_text()
        _round(Schedule.from_json(text), f"Schedule.from_json({text!r})", total, arguments)
    else:
        for transport in list(transports):
            if (why := _missing(transport)) is not None:
                print(f"no rounds over {transport}: {why}", flush=True)
                transports.remove(transport)
        for number in itertools.count():
            over = time.monotonic() - began > 60 * arguments.minutes
            if number >= arguments.rounds if arguments.rounds is not None else over:
                break
            seed, transport = arguments.seed + number, transports[number % len(transports)]
            calm = number % 11 == 10  # over each transport in its turn
            schedule = draw_schedule(seed, transport, arguments.steps, calm=calm)
            drawn = f"draw_schedule({seed}, {transport!r}, {arguments.steps}, calm={calm})"
            _round(schedule, drawn, total, arguments)
    result = summary(
        total,
        version=kvxfer.__version__,
        commit=_commit(),
        command=_command(),
        cores=len(os.sched_getaffinity(0)),
        load=os.getloadavg()[0],
        seed=arguments.seed,
        transports=",".join(transports),
        steps=arguments.steps,
        seconds=round(time.monotonic() - began, 1),
    )
    print(show(result))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(result, indent=2) + "\n")
    return bool(total.findings)


if __name__ == "__main__":
    sys.exit(main())
