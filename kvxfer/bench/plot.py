"""A chart of bandwidth over the size of transfers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvxfer._numbers import format_bytes
from kvxfer.bench.case import BenchError, Case
from kvxfer.bench.result import Result


def check_plot(path: str) -> None:
    """Raise BenchError now if the chart can't be drawn or written later."""
    try:
        import matplotlib  # noqa: F401 - only whether it is there
    except ImportError:
        raise BenchError(
            "--plot needs matplotlib. This installs it: pip install 'kvxfer[plot]'"
        ) from None
    if Path(path).suffix not in (".png", ".svg", ".pdf"):
        raise BenchError(f"--plot {path}: the name must end in .png, .svg or .pdf")
    if not Path(path).resolve().parent.is_dir():
        raise BenchError(f"--plot {path}: its folder does not exist")


def plot(results: Sequence[Result], path: str, title: str) -> None:
    """Draw GB/s over bytes of a transfer: a line for each set of the other settings."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes: Any = figure.add_subplot()
    lines: dict[str, list[Result]] = {}
    for result in results:
        if not result.why:
            lines.setdefault(_label(result.case, result), []).append(result)
    for label, points in sorted(lines.items()):
        points.sort(key=lambda result: result.case.bytes)
        sizes = [result.case.bytes for result in points]
        axes.plot(sizes, [result.gbps for result in points], marker="o", label=label)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda size, _: format_bytes(size))
    axes.set_ylim(bottom=0)
    axes.set_xlabel("KV of one transfer")
    axes.set_ylabel("GB/s (1e9 bytes)")
    axes.set_title(title, fontsize="small")
    axes.grid(True, alpha=0.3)
    if lines:
        axes.legend(fontsize="small")
    try:
        figure.savefig(path)
    except OSError as error:
        raise BenchError(f"--plot {path}: {error.strerror}") from None


def _label(case: Case, result: Result) -> str:
    parts = [result.report["transport"], format_bytes(case.block_bytes) + " blocks"]
    if len(case.planes) > 1 or case.layers > 1:
        parts.insert(0, case.name)  # of a model
    if case.memory != "host":
        parts.append(case.memory)
    if case.codec != "raw":
        parts.append(case.codec)
    if case.path != "auto":
        parts.append(case.path)
    if case.in_flight > 1:
        parts.append(f"{case.in_flight} at once")
    if case.threads:
        parts.append(f"{case.threads} thread{'s' * (case.threads > 1)}")
    return ", ".join(parts)
