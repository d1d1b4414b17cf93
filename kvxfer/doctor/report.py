"""What the doctor found, as text."""

from __future__ import annotations

import os
import sys
import textwrap

from kvxfer._terminal import columns, printable
from kvxfer.doctor.examine import Examination
from kvxfer.doctor.findings import Finding, State, counts

_TITLES = {
    "build": "Build and libraries",
    "gpu": "GPUs",
    "nic": "RDMA adapters",
    "affinity": "GPUs and adapters",
    "gpudirect": "GPUDirect RDMA",
    "host": "Host",
    "selftest": "Self-test",
    "peer": "Peer",
}
_COLORS = {State.OK: "32", State.INFO: "36", State.WARN: "33", State.BAD: "31"}
_WIDTH = 100


def report(examination: Examination, quiet: bool) -> str:
    """Return the report; `quiet` leaves out what doesn't hurt."""
    host = examination.host
    name = host["name"] or "this host"
    head = f"kvxfer {examination.version} on {name}: Linux {host['kernel']}, {host['cores']} cores"
    plural = "" if host["numa_nodes"] == 1 else "s"
    lines = [f"{head}, {host['numa_nodes']} NUMA node{plural}"] if host["kernel"] else [head]
    for group, title in _TITLES.items():
        shown = [
            finding
            for finding in examination.findings
            if finding.group == group and (finding.hurts or not quiet)
        ]
        if not shown:
            continue
        lines += ["", title]
        if group == "affinity" and examination.affinity is not None and not quiet:
            lines += [f"  {line}" for line in examination.affinity.lines()]
        for finding in shown:
            lines += _lines(finding)
    return "\n".join([*lines, "", summary(examination.findings)])


def summary(findings: list[Finding]) -> str:
    """Return the last line: what hurts, or that nothing does."""
    count = counts(findings)
    if not count["bad"] and not count["warn"]:
        remarks = f"{count['info']} remark{'' if count['info'] == 1 else 's'}"
        return f"Nothing would hurt: {count['ok']} checks passed, {remarks}."
    numbers = [f"{count['bad']} bad"] * bool(count["bad"])
    numbers += [f"{count['warn']} to mend"] * bool(count["warn"])
    worst = sorted((one for one in findings if one.hurts), key=lambda one: one.state is State.WARN)
    named = list(dict.fromkeys(finding.what for finding in worst))
    more = f" and {len(named) - 5} more" if len(named) > 5 else ""
    return f"{', '.join(numbers)}: {', '.join(named[:5])}{more}."


def _lines(finding: Finding) -> list[str]:
    state = f"{finding.state.value:<4}"
    if sys.stdout.isatty() and "NO_COLOR" not in os.environ:
        state = f"\x1b[{_COLORS[finding.state]}m{state}\x1b[0m"
    text = f"{finding.what}: {finding.found}"  # errors of peers, names of devices
    width = max(40, columns(_WIDTH))
    wrapped = textwrap.wrap(text, width - 8, break_long_words=False) or [""]
    first, *rest = map(printable, wrapped)
    lines = [f"  {state}  {first}", *(f"        {line}" for line in rest)]
    for title, about in (("why", finding.why), ("fix", finding.fix)):
        if about and (finding.hurts or title == "fix"):
            lines += textwrap.wrap(
                f"{title}: {about}",
                width,
                initial_indent=" " * 10,
                subsequent_indent=" " * 15,
                break_long_words=False,
                break_on_hyphens=False,
            )
    return lines
