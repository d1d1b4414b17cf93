"""``kvxfer doctor``: whether this host is set up for transfers, and what would hurt."""

from __future__ import annotations

import argparse
import functools
import json
import os
import sys
from collections.abc import Sequence
from typing import Any

from kvxfer._help import manual
from kvxfer.errors import Error

_ABOUT = """\
Looks at what was built and which libraries there are, GPUs, RDMA adapters and how they are
connected, whether adapters can reach GPU memory, and the host's limits; then moves a pattern over
each path there is and compares every byte. What would hurt comes with its reason and its remedy."""
_MORE = """\
A recording holds names, addresses and settings of the host, and no secrets. Some of what is
looked at is for root to read: with sudo the doctor sees more."""


def _parser() -> argparse.ArgumentParser:
    parser = manual(
        "kvxfer doctor",
        _ABOUT,
        more=_MORE,
        status={0: "nothing would hurt", 1: "something would; the last line names it"},
        examples=[
            "kvxfer doctor",
            "kvxfer doctor --json | jq '.findings[] | select(.state == \"bad\")'",
            "KVXFER_SECRET=... kvxfer doctor --listen 0.0.0.0:7470       on one host",
            "KVXFER_SECRET=... kvxfer doctor --peer HOST:7470            on the other",
            "kvxfer doctor --record here.json; kvxfer doctor --root here.json",
        ],
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--quiet", action="store_true", help="print only what would hurt")
    parser.add_argument(
        "--no-self-test", action="store_true", help="move no data: look at the host only"
    )
    parser.add_argument(
        "--peer",
        metavar="HOST:PORT",
        help="also check the way to another host, where kvxfer doctor --listen or kvxfer bench "
        "serve runs",
    )
    parser.add_argument(
        "--listen", metavar="HOST:PORT", help="serve doctors on other hosts until Ctrl-C"
    )
    parser.add_argument(
        "--insecure",
        action="store_true",
        help="with --listen: without KVXFER_SECRET; only the pattern can be read",
    )
    parser.add_argument(
        "--root",
        metavar="PATH",
        default="/",
        help="look at the host whose root is mounted there, or at what --record wrote",
    )
    parser.add_argument(
        "--record", metavar="FILE", help="also write what was read, to look at it elsewhere"
    )
    return parser


def _check(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    if options.listen and (options.peer or options.json or options.record):
        parser.error("--listen serves others and examines nothing: give it without --peer, "
                     "--json and --record")  # fmt: skip
    if options.insecure and not options.listen:
        parser.error("--insecure is for --listen")
    if options.peer and os.path.realpath(options.root) != "/":
        parser.error("--peer starts from this host, --root names another one")
    for address in (options.peer, options.listen):
        if address is not None and not address.rpartition(":")[2].isdigit():
            parser.error(f"{address!r} is not HOST:PORT")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return the exit status."""
    parser = _parser()
    options = parser.parse_args(arguments)
    _check(parser, options)
    try:
        return _run(options)
    except ImportError as error:
        sys.stderr.write(f"kvxfer doctor: its compiled part can't be loaded: {error}\n")
        return 2
    except (Error, OSError) as error:
        sys.stderr.write(f"kvxfer doctor: {error}\n")
        return 2


def _run(options: argparse.Namespace) -> int:
    # Here, for these take their time to load, which --help need not.
    from kvxfer.doctor.examine import examine
    from kvxfer.doctor.report import report
    from kvxfer.doctor.tree import open_tree

    knobs: dict[str, Any] = {"insecure": True} if options.insecure else {}
    if options.listen:
        from kvxfer.config import Config
        from kvxfer.doctor.peer import serve

        return serve(options.listen, Config(**knobs))
    tree = open_tree(options.root)
    peer = None
    if options.peer:
        from kvxfer.doctor.peer import check_peer

        peer = functools.partial(check_peer, options.peer)
    examination = examine(tree, not options.no_self_test, peer)
    if options.record:
        tree.write(options.record)
    if options.json:
        sys.stdout.write(json.dumps(examination.record(), indent=2) + "\n")
    else:
        sys.stdout.write(report(examination, options.quiet) + "\n")
    return examination.status
