"""Writes a campaign's figures into a page: ``python -m faults.campaign.table soak.json PAGE``."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

BEGIN, END = "<!-- campaign -->\n", "<!-- end of campaign -->\n"

_NOTICED = {
    "killed": "until a killed producer is noticed",
    "partitioned": "until one in a partition is (`heartbeat_timeout` is 1 s)",
    "corrupted": "until a flipped bit on a link is",
}
_FINDINGS = {
    "wrong": "wrong bytes",
    "late": "handles past their deadline",
    "leak": "blocks, slots, descriptors, threads, memory that leaked",
    "died": "processes that ended by themselves",
    "error": "errors that should not be",
    "unexplained": "failures without a fault, or when faults were over",
}


def _counts(counts: Mapping[str, int]) -> str:
    """Return what there was most of first."""
    ordered = sorted(counts.items(), key=lambda entry: (-entry[1], entry[0]))
    return ", ".join(f"{name} {count:,}" for name, count in ordered) or "none"


def _kinds(result: Mapping[str, Any], what: str) -> str:
    kinds = result.get(what + " by kind")
    return f"{result[what]:,}: {_counts(kinds)}" if kinds else f"{result[what]:,}"


def _about(result: Mapping[str, Any]) -> str:
    """Return how it was run, as far as the file says."""
    text = f"{result['seconds']:,.0f} seconds from seed {result['seed']} on"
    if "command" in result:
        text = (
            f"{result['seconds']:,.0f} seconds of `{result['command']}` with the code of commit "
            f"`{result['commit']}`, on {result['cores']} cores, with a load of "
            f"{result['load']:.0f} at the end"
        )
    return text + ":"


def _noticed(result: Mapping[str, Any], what: str) -> str:
    found = result["seconds until noticed"].get(what)
    if found is None:
        return "met by no fetch"
    median, most, times = found["median"], found["max"], found["times"]
    return f"median {median:.3f} s, at most {most:.3f} s ({times:,} fetches)"


def table(result: Mapping[str, Any]) -> str:
    """Return the figures as Markdown."""
    failed = result["fetches that failed, by reason"]
    delivered = _kinds(result, "fetches that delivered")
    rows = [
        ("rounds", _kinds(result, "rounds")),
        ("operations", _kinds(result, "operations")),
        ("faults", _kinds(result, "faults")),
        (
            "fetches that delivered, every byte compared (in bursts, where all of it delivered)",
            f"{delivered}, {result['bytes delivered and compared'] / 1e9:.2f} GB",
        ),
        ("fetches that failed, by reason", f"{sum(failed.values()):,}: {_counts(failed)}"),
        ("offers, by how they ended", _counts(result["offers, by how they ended"])),
        (
            "rests at which everything was counted",
            f"{result['rests at which everything was counted']:,}",
        ),
        (
            "most that a process grew between rests",
            f"{result['most bytes grown between rests'] / 2**20:.1f} MiB",
        ),
        *((name, _noticed(result, what)) for what, name in _NOTICED.items()),
        *((name, f"{result['findings'][what]:,}") for what, name in _FINDINGS.items()),
    ]
    lines = [
        _about(result),
        "",
        "| | |",
        "|---|---|",
        *(f"| {name} | {value} |" for name, value in rows),
    ]
    return "\n".join(lines) + "\n"


def insert(page: str, text: str) -> str:
    """Return the page with the text between the marks."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the page has no lines {BEGIN.strip()!r} and {END.strip()!r}")
    return before + begin + text + end + after


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m faults.campaign.table", description=__doc__)
    parser.add_argument("result", type=Path, help="what --json of a campaign wrote")
    parser.add_argument("page", type=Path, nargs="?", help="written into it, else printed")
    arguments = parser.parse_args()
    text = table(json.loads(arguments.result.read_text()))
    if arguments.page is None:
        print(text, end="")
    else:
        arguments.page.write_text(insert(arguments.page.read_text(), text))


if __name__ == "__main__":
    main()
