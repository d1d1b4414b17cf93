"""Options that the commands share, and what they stand for."""

from __future__ import annotations

import argparse
import re
from typing import TYPE_CHECKING

from kvxfer.errors import InvalidError

if TYPE_CHECKING:  # --help needs none of it
    from kvxfer.serving.setup_file import Setup
    from kvxfer.serving.sim import Fleet
    from kvxfer.serving.workload import Length, Workload

_FLEET = re.compile(r"(?:(\d+)P(\d+)D)?\+?(?:(\d+)A)?")
STATUS = {0: "the answer was printed", 1: "the setup, the trace or a value is no good"}
LONGEST = 1_000_000
"""Where generated lengths are cut off."""


def add_load_arguments(parser: argparse.ArgumentParser) -> argparse.Action:
    """Add what says which requests are sent; return the first of it, the setup."""
    setup = parser.add_argument(
        "setup",
        metavar="SETUP",
        help="JSON file with engines, link and SLO: docs/serving.md has one",
    )
    parser.add_argument(
        "--trace",
        metavar="FILE",
        help="requests as they came: of Mooncake, Azure, Vidur, vLLM's log or benchmark (default: "
        "they are generated)",
    )
    parser.add_argument(
        "--limit", type=int, metavar="N", help="only the first requests of the trace"
    )
    parser.add_argument("--rate", type=float, help="requests a second (default: the trace's, or 1)")
    parser.add_argument(
        "--count", type=int, default=500, metavar="N", help="requests to generate (default 500)"
    )
    parser.add_argument(
        "--prompt",
        default="2000:0.8",
        metavar="TOKENS",
        help="of a prompt: MEAN, or MEAN:SIGMA for log-normal ones (default 2000:0.8)",
    )
    parser.add_argument(
        "--output",
        default="250:0.8",
        metavar="TOKENS",
        help="of an answer, likewise (default 250:0.8)",
    )
    parser.add_argument(
        "--seed", type=int, default=0, metavar="N", help="of what is generated (default 0)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    return setup


def workload_of(options: argparse.Namespace) -> Workload:
    """Return the requests that the options ask for."""
    from kvxfer.serving.traces import read_trace
    from kvxfer.serving.workload import generate

    if options.trace is None:
        return generate(
            options.count,
            1.0 if options.rate is None else options.rate,
            length_of(options.prompt, "--prompt"),
            length_of(options.output, "--output"),
            options.seed,
        )
    workload = read_trace(options.trace, options.limit)
    return workload if options.rate is None else workload.at_rate(options.rate)


def length_of(text: str, option: str) -> Length:
    """Return the lengths that MEAN or MEAN:SIGMA stands for."""
    from kvxfer.serving.workload import fixed, lognormal

    mean, _, sigma = text.partition(":")
    try:
        if not sigma:
            return fixed(int(mean))
        return lognormal(float(mean), float(sigma), LONGEST)
    except ValueError as error:
        raise InvalidError(f"{option} is {text!r}; give MEAN or MEAN:SIGMA") from error


def fleet_of(text: str, setup: Setup) -> Fleet:
    """Return the fleet that 2P1D, 2P1D+1A or 4A stands for."""
    from kvxfer.serving.sim import Fleet, Role

    match = _FLEET.fullmatch(text.upper())
    if not text or match is None:
        raise InvalidError(f"{text!r} is no fleet; write 2P1D, 2P1D+1A or 4A")
    counts = zip(Role, match.groups(default="0"), strict=True)
    engines = tuple((setup.engine(role), int(count)) for role, count in counts if int(count))
    return Fleet(engines, setup.link)
