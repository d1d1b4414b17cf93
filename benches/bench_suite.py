"""The whole benchmark, with rivals beside it: what `make bench` runs.

Writes docs/benchmarks.md, and the README's table.

See README.md for what each figure means.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from baselines import peers
from bench_transfer import MEASUREMENTS, add_options
from kvbench import codecs, host, page, readme
from kvbench.child import ChildError
from kvbench.measure import Patience, Report, missing
from kvbench.native import Native
from kvbench.settings import Settings

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "build" / "bench" / "results.jsonl"
SUITE = {**MEASUREMENTS, "codec": codecs.codec}
# NIXL by itself is not on the page: there it is beside kvxfer.
WHOLE = [name for name in SUITE if name != "host_nixl"]
# One measurement that fails, as a rival does that dies, must not lose the others. Wrong bytes must.
RECOVERABLE = (ChildError, OSError, RuntimeError)


def main() -> int:
    """Run what the command line asks for; 1 when a measurement failed."""
    arguments = _parser().parse_args()
    if arguments.render:
        _write(_read(arguments.render))
        return 0
    Patience.left_s = arguments.patience
    whole = not arguments.only and not arguments.quick
    lines = []
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    with RESULTS.open("w") as file:  # as they come, so that a run that is cut off is not lost
        for line in _run(arguments):
            lines.append(line)
            file.write(json.dumps(line) + "\n")
            file.flush()
    print(f"# written: {RESULTS.relative_to(ROOT)}", file=sys.stderr)
    if whole or arguments.write:
        _write(lines)
    return 1 if any(line.get("failed") for line in lines) else 0


def _write(lines: list[dict[str, Any]]) -> None:
    page.write(lines, ROOT / "docs")
    readme.write(lines, ROOT / "README.md")
    print("# written: docs/benchmarks.md, docs/benchmarks/*.svg, README.md", file=sys.stderr)


def _run(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    settings = Settings(Native(), arguments.pages, arguments.quick)
    report = Report(arguments.json)
    began = time.monotonic()
    env = {
        "name": "env",
        **host.stamp(),
        "pages": settings.pages,
        "quick": settings.quick,
        "bytes": settings.nbytes,
        "repetitions": settings.repetitions,
    }
    report.env({key: value for key, value in env.items() if key != "name"})
    yield env
    for rival in peers.rivals().values():
        line = {"name": "rival", "rival": rival.name, "version": rival.version, "why": rival.why}
        print(json.dumps(line) if arguments.json else f"# {rival.name}: {rival.why or 'there'}")
        yield line
    for name in arguments.only or WHOLE:
        seen = len(report.results)
        try:
            report.add(SUITE[name](settings))
        except RECOVERABLE as error:
            why = f"{type(error).__name__}: {error}"
            report.add([missing(name, "", "", why)])
            yield {"name": name, "failed": why}
        for result in report.results[seen:]:
            yield {"measurement": name, **result.line()}
    yield {"name": "end", "seconds": round(time.monotonic() - began)}


def _read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    add_options(parser, SUITE)
    parser.add_argument(
        "--write", action="store_true", help="write the pages though not all has run"
    )
    parser.add_argument(
        "--render", type=Path, metavar="FILE", help="write the pages of an earlier run"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
