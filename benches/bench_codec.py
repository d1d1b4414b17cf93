"""What the codecs cost and bring: encoding, decoding, and fetches over a link of 10 Gbit/s.

See README.md for what each figure means.
"""

from __future__ import annotations

import argparse
import sys

from kvbench import codecs, host, shaped_fetches
from kvbench.measure import Patience, Report
from kvbench.native import Native
from kvbench.settings import Measurement, Settings
from kvbench.sides import why_missing

MEASUREMENTS: dict[str, Measurement] = {
    "codec": codecs.codec,
    "fetch": shaped_fetches.fetch_shaped,
}


def main() -> int:
    """Run what the command line asks for; 1 when kvxfer could not be measured."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    parser.add_argument(
        "--only",
        choices=sorted(MEASUREMENTS),
        help="codec: in one thread; fetch: over a shaped link (needs root, ip and tc)",
    )
    parser.add_argument(
        "--quick", action="store_true", help="64 MiB instead of 256, fewer repetitions"
    )
    parser.add_argument(
        "--patience",
        type=float,
        default=60.0,
        metavar="SECONDS",
        help="how long, in all, to wait for others on this machine to be quiet (default: 60)",
    )
    arguments = parser.parse_args()
    Patience.left_s = arguments.patience

    settings = Settings(Native(), "thp", arguments.quick)
    report = Report(arguments.json)
    report.env({**host.stamp(), "quick": settings.quick})
    for name in [arguments.only] if arguments.only else MEASUREMENTS:
        report.add(MEASUREMENTS[name](settings))
    return 1 if why_missing() is not None else 0


if __name__ == "__main__":
    sys.exit(main())
