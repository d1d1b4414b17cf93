"""``kvxfer simulate``: what a fleet does with a load, under one policy or all of them."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from kvxfer._help import manual
from kvxfer.errors import InvalidError
from kvxfer.serving.options import STATUS, add_load_arguments, fleet_of, workload_of

if TYPE_CHECKING:  # --help needs none of it
    from kvxfer.serving.setup_file import Setup
    from kvxfer.serving.sim import Router

POLICIES = ("local", "remote", "threshold:2000", "decide")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add_load_arguments(parser)
    parser.add_argument(
        "--fleet",
        required=True,
        help="engines that prefill, decode, or do all: 2P1D, 2P1D+1A or 4A",
    )
    parser.add_argument(
        "--policy",
        default="decide",
        help="decide, local, remote, threshold:TOKENS, or all of them: all (default: decide)",
    )
    parser.add_argument(
        "--concurrency",
        type=int,
        metavar="N",
        help="clients, each of which waits for its answer (default: requests come when they come)",
    )


def run(options: argparse.Namespace) -> int:
    """Simulate and print what came out; return the exit status."""
    from kvxfer.serving.report import simulated_row, table
    from kvxfer.serving.setup_file import read_setup
    from kvxfer.serving.sim import simulate

    setup = read_setup(options.setup)
    fleet, workload = fleet_of(options.fleet, setup), workload_of(options)
    rows = []
    for name in POLICIES if options.policy == "all" else (options.policy,):
        result = simulate(fleet, workload, router_of(name, setup), options.concurrency)
        rows.append(simulated_row(name, result, setup.slo))
    sys.stdout.write((json.dumps(rows, indent=2) if options.json else table(rows)) + "\n")
    return 0


def router_of(name: str, setup: Setup) -> Router:
    """Return a new router for the policy of this name."""
    from kvxfer.serving.sim import Decided, always_local, always_remote, fixed_threshold

    kind, _, tokens = name.partition(":")
    makers: dict[str, Callable[[], Router]] = {
        "local": lambda: always_local,
        "remote": lambda: always_remote,
        "decide": lambda: Decided(setup.slo, setup.policy, setup.link),
    }
    if kind == "threshold" and tokens.isdigit():
        return fixed_threshold(int(tokens))
    if name not in makers:
        raise InvalidError(f"{name!r} is no policy; there are: {', '.join(POLICIES)}, all")
    return makers[name]()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return the exit status."""
    parser = manual(
        "kvxfer simulate",
        "Says what a fleet of engines does with a load, under one policy of where to prefill or "
        "under all of them: time to first token and per token, requests within the SLO, how busy "
        "the engines are. The load is a trace, or generated. Nothing is run: step times come from "
        "the setup.",
        status=STATUS,
        examples=[
            "kvxfer simulate setup.json --fleet 2P1D --rate 4",
            "kvxfer simulate setup.json --fleet 2P1D+1A --policy all --trace trace.jsonl --json",
        ],
    )
    add_arguments(parser)
    options = parser.parse_args(arguments)
    try:
        return run(options)
    except InvalidError as error:
        sys.stderr.write(f"kvxfer simulate: {error}\n")
        return 1
