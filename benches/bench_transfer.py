"""kvxfer's benchmark: fetches, packing, latency and cost, beside memcpy, plain sockets and NIXL.

See README.md for what each figure means.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable

from kvbench import fetches, growth, host, hostlimits, packing, ucx
from kvbench.measure import Patience, Report
from kvbench.native import Native
from kvbench.settings import Measurement, Settings
from kvbench.sides import why_missing

MEASUREMENTS: dict[str, Measurement] = {
    "pack": packing.pack,
    "fetch_shm": fetches.fetch_shm,
    "fetch_tcp": fetches.fetch_tcp,
    "fetch_ucx": ucx.fetch_ucx,
    "fetch_latency_1block": fetches.fetch_latency_1block,
    "digest": fetches.digest,
    "growth": growth.growth,
    "host": hostlimits.host,
    "host_nixl": hostlimits.host_nixl,
    "ucx": ucx.ucx,
}


def add_options(parser: argparse.ArgumentParser, measurements: Iterable[str]) -> None:
    """Add the options that the suite has too."""
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    parser.add_argument(
        "--only",
        action="append",
        choices=sorted(measurements),
        metavar="NAME",
        help="only this measurement (may be repeated): " + ", ".join(measurements),
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="64 MiB instead of 256, fewer repetitions; for a look, not for figures",
    )
    parser.add_argument(
        "--pages",
        choices=("thp", "4k"),
        default="thp",
        help="page size of the caches (default: thp, as numpy's)",
    )
    parser.add_argument(
        "--patience",
        type=float,
        default=60.0,
        metavar="SECONDS",
        help="how long, in all, to wait for others on this machine to be quiet (default: 60)",
    )


def main() -> int:
    """Run what the command line asks for; 1 when kvxfer could not be measured."""
    parser = argparse.ArgumentParser(description=__doc__)
    add_options(parser, MEASUREMENTS)
    arguments = parser.parse_args()
    Patience.left_s = arguments.patience

    settings = Settings(Native(), arguments.pages, arguments.quick)
    report = Report(arguments.json)
    report.env({**host.stamp(), "pages": settings.pages, "quick": settings.quick})
    chosen = arguments.only or list(MEASUREMENTS)
    for name in chosen:
        report.add(MEASUREMENTS[name](settings))
    return 1 if why_missing() is not None and not set(chosen) <= {"host", "host_nixl"} else 0


if __name__ == "__main__":
    sys.exit(main())
