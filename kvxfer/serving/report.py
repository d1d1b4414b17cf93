"""Tables and a plot of what was simulated and planned."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

from kvxfer.serving.decide import Slo
from kvxfer.serving.planner import Candidate, Plan, Shift
from kvxfer.serving.sim import Result, Role


def table(rows: Sequence[Mapping[str, str]]) -> str:
    """Return rows of the same columns as a Markdown table that also reads well as text."""
    columns = list(rows[0])
    widths = {c: max(len(c), *(len(row[c]) for row in rows)) for c in columns}
    first = columns[0]

    def line(cells: Mapping[str, str]) -> str:
        padded = (
            cells[c].ljust(widths[c]) if c == first else cells[c].rjust(widths[c]) for c in columns
        )
        return "| " + " | ".join(padded) + " |"

    rule = "|" + "|".join(
        "-" * (widths[c] + 2) if c == first else "-" * (widths[c] + 1) + ":" for c in columns
    )
    return "\n".join([line({c: c for c in columns}), rule + "|", *map(line, rows)])


def simulated_row(name: str, result: Result, slo: Slo) -> dict[str, str]:
    """Return what a simulation showed."""
    requests, tokens = result.remote_shares()
    return {
        "policy": name,
        "remote requests": f"{requests:.1%}",
        "remote tokens": f"{tokens:.1%}",
        "TTFT mean s": f"{result.mean(lambda one: one.ttft):.3g}",
        "TTFT p90 s": f"{result.percentile(lambda one: one.ttft, 90):.3g}",
        "TPOT mean ms": f"{1e3 * result.mean(lambda one: one.tpot):.3g}",
        "ITL p99 ms": f"{1e3 * result.gaps.percentile(99):.3g}",
        "within SLO": f"{result.attainment(slo):.1%}",
        "tokens/s": f"{result.output_rate:.4g}",
        "rejected": str(len(result.rejected)),
    }


def candidate_row(candidate: Candidate) -> dict[str, str]:
    """Return what was found out about a candidate of a plan."""
    row = {
        "fleet": candidate.fleet.name,
        "GPUs": str(candidate.fleet.gpus),
        "closed form req/s": f"{candidate.estimate.rate:.3g}",
        "bottleneck": candidate.estimate.bottleneck.value,
        "goodput req/s": "-",
        "by the other promise": "-",
        "tokens/s": "-",
        "TTFT p90 s": "-",
        "TPOT p90 ms": "-",
        "$/M tokens": "-",
    }
    if candidate.simulated is None or candidate.other is None:
        return row
    row["goodput req/s"] = f"{candidate.simulated.rate:.3g}"
    row["by the other promise"] = f"{candidate.other.rate:.3g}"
    result = candidate.simulated.result
    if result is not None:
        row["tokens/s"] = f"{result.output_rate:.4g}"
        row["TTFT p90 s"] = f"{result.percentile(lambda one: one.ttft, 90):.3g}"
        row["TPOT p90 ms"] = f"{1e3 * result.percentile(lambda one: one.tpot, 90):.3g}"
        row["$/M tokens"] = f"{result.cost_per_million:.3g}"
    return row


def plan_text(plan: Plan, shifts: Sequence[Shift], most: int = 10) -> str:
    """Return a plan as text."""
    question = plan.question
    promise = question.promise.value
    lines = [table([candidate_row(one) for one in plan.candidates[:most]]), ""]
    if plan.infeasible:
        lines.append(f"Infeasible: {plan.infeasible}.")
    elif plan.best is not None:
        fleet = plan.best.fleet
        apart = "disaggregate" if fleet.count(Role.PREFILL) else "don't disaggregate"
        lines.append(
            f"{fleet.name}: {apart}. {plan.best.rate:.3g} requests a second, "
            f"{question.share:.0%} of them within {question.slo.ttft:g} s and "
            f"{1e3 * question.slo.tpot:g} ms a token ({promise} goodput)."
        )
    lines += [
        f"With {one.what}: {one.fleet.name} ({one.estimate.bottleneck.value})." for one in shifts
    ]
    return "\n".join(lines)


COLOURS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#8c564b")


def curve_svg(
    curves: Mapping[str, Sequence[tuple[float, float]]], x_title: str, y_title: str
) -> str:
    """Return an SVG of one line for each name; y starts at 0."""
    width, height, edge = 720, 420, 60
    points = [point for curve in curves.values() for point in curve]
    right = max(x for x, _ in points) * 1.05 or 1.0
    top = max(y for _, y in points) * 1.05 or 1.0

    def place(x: float, y: float) -> tuple[float, float]:
        return (
            edge + x / right * (width - 2 * edge),
            height - edge - y / top * (height - 2 * edge),
        )

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        'font-family="sans-serif" font-size="12">',
        f'<path d="M{edge} {edge}V{height - edge}H{width - edge}" fill="none" stroke="black"/>',
        f'<text x="{width / 2}" y="{height - 15}" text-anchor="middle">{escape(x_title)}</text>',
        f'<text x="{edge}" y="{edge - 15}">{escape(y_title)}</text>',
    ]
    for part in range(1, 6):
        x, _ = place(right * part / 5, 0)
        _, y = place(0, top * part / 5)
        parts.append(
            f'<text x="{x:.1f}" y="{height - edge + 18}" text-anchor="middle">'
            f"{right * part / 5:.3g}</text>"
        )
        parts.append(
            f'<text x="{edge - 6}" y="{y + 4:.1f}" text-anchor="end">{top * part / 5:.3g}</text>'
        )
    for index, (name, curve) in enumerate(curves.items()):
        colour = COLOURS[index % len(COLOURS)]
        path = " ".join("{:.1f},{:.1f}".format(*place(x, y)) for x, y in curve)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts.append(
            f'<text x="{width - edge + 6}" y="{edge + 16 * index}" fill="{colour}">'
            f"{escape(name)}</text>"
        )
    return "\n".join([*parts, "</svg>", ""])
