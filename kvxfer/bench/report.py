"""How results are shown: as a table that grows, or as JSON lines (docs/schemas/bench.json)."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Sequence

from kvxfer._numbers import format_bytes
from kvxfer._terminal import columns, printable
from kvxfer.bench.case import Case
from kvxfer.bench.result import Result, Rival
from kvxfer.handshake import Frame

_COLUMNS = (
    ("case", "<"),
    ("link", "<"),
    ("codec", "<"),
    ("block", ">"),
    ("blocks", ">"),
    ("bytes", ">"),
    ("GB/s", ">"),
    ("of limit", ">"),
    ("p50 us", ">"),
    ("p90 us", ">"),
    ("p99 us", ">"),
    ("s/GB", ">"),
    ("checked", "<"),
)
_MEASURED = 6  # columns before those with what was measured
_WIDTH = 400


class Table:
    """Rows as they come; columns are as wide as the cases need."""

    def __init__(self, cases: Sequence[Case]) -> None:
        self._widths = [len(title) for title, _ in _COLUMNS]
        least = (12, 11, 10, 8, 7, 8, 6, 8, 8, 8, 8, 11, 11)
        self._widths = [max(pair) for pair in zip(self._widths, least, strict=True)]
        self._widths[0] = max([self._widths[0], *(len(_title(case)) for case in cases)])
        self._widths[2] = max([self._widths[2], *(len(case.codec) for case in cases)])
        # On a narrow terminal what was measured stands below what it was measured of.
        self._narrow = columns(_WIDTH) < sum(self._widths) + 2 * (len(self._widths) - 1)

    def header(self) -> str:
        return self._line([title for title, _ in _COLUMNS])

    def row(self, result: Result) -> str:
        """Return the row of a result, with a line for each thing it was compared with."""
        case = result.case
        shown = [
            _title(case),
            "/".join(
                filter(None, (result.report.get("transport", ""), result.report.get("path", "")))
            )
            or case.transport,
            _codec(result),
            format_bytes(case.block_bytes),
            f"{case.runs}",
            format_bytes(case.bytes),
        ]
        if result.why:
            return self._line(shown) + f"  none: {result.why}"
        serving, running = result.cpu_per_gb
        large = case.bytes >= 1 << 20
        limit = result.limit
        shown += [
            f"{result.gbps:.2f}" if result.gbps >= 0.1 else f"{result.gbps:.4f}",
            f"{result.ratio(limit):.0%}" if limit and limit.seconds else "-",
            *(f"{result.percentile(share):.0f}" for share in (0.5, 0.9, 0.99)),
            f"{serving:.2f}+{running:.2f}" if large else "-",
            result.verified,
        ]
        lines = [self._line(shown)]
        lines += [self._rival(result, rival) for rival in result.rivals]
        return "\n".join(lines)

    def _rival(self, result: Result, rival: Rival) -> str:
        indent = " " * 2
        if not rival.seconds:
            return f"{indent}{rival.name}: {rival.why}"
        ordered = sorted(rival.seconds)
        median = ordered[len(ordered) // 2]
        return (
            f"{indent}{rival.name}: {result.rate(median):.2f} GB/s, {median * 1e6:.0f} us; "
            f"kvxfer is {result.ratio(rival):.2f} times as fast"
        )

    def _line(self, cells: Sequence[str]) -> str:
        parts = [
            f"{cell:{align}{width}}"
            for cell, (_, align), width in zip(cells, _COLUMNS, self._widths, strict=False)
        ]
        if self._narrow and len(parts) > _MEASURED:
            parts[_MEASURED] = "\n  " + parts[_MEASURED]
        return "  ".join(parts).replace("  \n", "\n").rstrip()


def _title(case: Case) -> str:
    parts = [case.name]
    if case.in_flight > 1:
        parts.append(f"{case.in_flight} at once")
    if case.threads:
        parts.append(f"{case.threads} thread{'s' * (case.threads > 1)}")
    if case.memory != "host":
        parts.append(case.memory)
    return ", ".join(parts)


def _codec(result: Result) -> str:
    used = result.report.get("codec", "")
    return f"auto: {used}" if result.case.codec == "auto" and used else result.case.codec


def machine(name: str, stamp: Frame) -> str:
    """Return the line that says what a side runs on."""
    return printable(
        f"{name}: {stamp['cpu']}, {stamp['cores']} cores, Linux {stamp['kernel']}, "
        f"load {stamp['load'][0]}"
    )


def legend(results: Sequence[Result]) -> str:
    """Return what the columns mean, and why the links are what they are."""
    done = [result for result in results if not result.why]
    if not done:
        return ""
    limits = sorted({result.limit.name for result in done if result.limit})
    reasons = {result.report["transport"]: result.report["why"] for result in done}
    lines = [
        "  GB/s      1e9 bytes of KV a second, median; from fetch() to the end of the last wait()",
        "  p50...    microseconds of one transfer",
        "  s/GB      processor seconds for each GB: serving + running side",
        "  checked   exact: every byte, before and after the timing; blocks nobody asked for too",
    ]
    if limits:
        lines.insert(
            1, f"  of limit  share of what the link carries without us: {'; '.join(limits)}"
        )
    lines += [f"  {name:<9} because {why}" for name, why in reasons.items()]
    paths = [
        (result.report["path"], result.report["path_why"])
        for result in done
        if result.case.path not in ("auto", result.report["path"])
    ]
    lines += [f"  {name:<9} because {why}" for name, why in dict.fromkeys(paths)]
    width = columns(_WIDTH)
    return "\n".join(textwrap.fill(line, width, subsequent_indent=" " * 12) for line in lines)


def environment(address: str, mine: Frame, theirs: Frame) -> str:
    """Return the JSON line that comes first."""
    return json.dumps({"kind": "env", "address": address, "run": mine, "serve": theirs})
