"""What `kvxfer size` says, as text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate

from kvxfer._terminal import columns
from kvxfer.sizing.estimate import Estimate, Passage
from kvxfer.sizing.models import LayerGroup, Model

_WIDTH = 200


def report(
    model: Model, tokens: int, tp: int, rows: Sequence[Estimate], prefill_rate: float | None
) -> str:
    """Return the tables."""
    rank = " of one rank" if tp > 1 else ""
    lines = [f"{model.name}: {'; '.join(_shape(group) for group in model.groups)}"]
    lines += [f"Note: {note}." for note in model.notes]
    head = [
        f"{tokens} tokens, TP {tp}: cache, codec",
        f"a token{rank}",
        f"a request{rank}",
        "of raw",
    ]
    if tp > 1:
        head.insert(3, "all ranks")
    table = [head]
    for row in rows:
        cells = [row.label, size_text(row.bytes_per_token), size_text(row.rank_bytes)]
        if tp > 1:
            cells.append(size_text(row.rank_bytes * tp))
        table.append([*cells, f"{row.share:.1%}"])
    lines += ["", *_aligned(table)]
    lines += ["", *_by_link("time of a request", rows, lambda at: seconds_text(at.seconds))]
    title = "hidden by layers up to, tokens/s"
    lines += ["", *_by_link(title, rows, lambda at: f"{_short(at.hidden_up_to)}")]
    if prefill_rate is not None:
        title = f"left after prefill at {_short(prefill_rate)}/s"
        lines += ["", *_by_link(title, rows, lambda at: seconds_text(at.exposed or 0.0))]
    if any(row.dtype.startswith("float8") for row in rows):
        lines += [
            "",
            "float8 is a cache of 8-bit floats; fp8_e4m3 and int8 are codecs on the wire.",
        ]
    return "\n".join(lines)


def _by_link(title: str, rows: Sequence[Estimate], cell: Callable[[Passage], str]) -> list[str]:
    table = [[title, *(passage.link.name for passage in rows[0].passages)]]
    table += [[row.label, *map(cell, row.passages)] for row in rows]
    return _aligned(table)


def _aligned(table: Sequence[Sequence[str]]) -> list[str]:
    """Return its lines; what does not fit beside the first column comes below, with that again."""
    widths = [max(len(row[column]) for row in table) for column in range(len(table[0]))]
    fits = max(2, sum(end <= columns(_WIDTH) for end in accumulate(w + 2 for w in widths)))
    if fits < len(widths):
        rest = [[row[0], *row[fits:]] for row in table]
        return [*_aligned([row[:fits] for row in table]), "", *_aligned(rest)]
    lines = []
    for row in table:
        cells = [row[0].ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        lines.append("  ".join(cells))
    return lines


def _shape(group: LayerGroup) -> str:
    planes = " + ".join(f"{name} {content}" for name, content in group.planes)
    heads = f" x {group.kv_heads} kv heads" if group.kv_heads > 1 else ""
    window = f" with a window of {group.window}" if group.window else ""
    element = f" of {group.element}" if group.element else ""
    return f"{group.count} layers{window}{heads} x ({planes}){element}"


def size_text(size: float) -> str:
    """Return a number of bytes in the unit that suits it."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024 or unit == "GiB":
            break
        size /= 1024
    return f"{size:.0f} {unit}" if unit == "B" else f"{size:.2f} {unit}"


def seconds_text(seconds: float) -> str:
    """Return a duration in the unit that suits it."""
    if seconds >= 1:
        return f"{seconds:.2f} s"
    return f"{seconds * 1e3:.1f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.0f} us"


def _short(number: float) -> str:
    for limit, unit in ((1e6, "M"), (1e3, "k")):
        if number >= limit:
            return f"{number / limit:.3g}{unit}" if number / limit < 1000 else f"{number:.2e}"
    return f"{number:.3g}"
