"""How ``kvxfer quality`` shows what it has measured: as tables, JSON and a plot."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvxfer._quality_metrics import CodecResult

SCHEMA = "kvxfer.quality/1"

_COLUMNS = ("codec", "ratio", "K err", "V err", "attn err", "KL nats", "top-1", "max |dlogit|")
_LAYER_COLUMNS = ("codec", "layer", "ratio", "K err", "V err", "attn err", "raw rows")
_LEGEND = """
ratio         bytes in the cache to bytes on the wire, headers and scales included
K, V err      L2 norm of the error relative to that of the values, over all layers
attn err      the same of each layer's attention output for the same queries; mean of the layers
KL nats       divergence of the next token's distribution from the original one, mean and its
              standard error over passages
top-1         how often the likeliest next token is the same one
max |dlogit|  the largest difference of a logit"""


def record(
    model: dict[str, Any], settings: dict[str, Any], results: Sequence[CodecResult]
) -> dict[str, Any]:
    """Return what --json prints."""
    return {
        "schema": SCHEMA,
        "model": model,
        "settings": settings,
        "codecs": [
            {**result.record(), "layers": [layer.record() for layer in result.layers]}
            for result in results
        ],
    }


def table(results: Sequence[CodecResult]) -> str:
    """One row a codec, and what the columns are."""
    rows = []
    for result in results:
        it = result.record()
        error = it["kl_nats_standard_error"]
        rows.append(
            (
                it["codec"],
                f"{it['wire_ratio']:.3f}",
                _percent(it["rel_l2"].get("k")),
                _percent(it["rel_l2"].get("v")),
                _percent(it["attention_rel_l2"]),
                f"{it['kl_nats']:.5f}" + ("" if error is None else f" +- {error:.5f}"),
                f"{it['top1_agreement']:.2%}",
                f"{it['max_delta_logit']:.3f}",
            )
        )
    return _aligned(_COLUMNS, rows) + "\n" + _LEGEND


def layer_table(results: Sequence[CodecResult]) -> str:
    """One row a codec and layer."""
    rows = []
    for result in results:
        for layer in result.layers:
            it = layer.record()
            rows.append(
                (
                    result.codec,
                    str(it["layer"]),
                    f"{it['wire_ratio']:.3f}",
                    _percent(it["rel_l2"].get("k")),
                    _percent(it["rel_l2"].get("v")),
                    _percent(it["attention_rel_l2"]),
                    str(it["raw_rows"]),
                )
            )
    return _aligned(_LAYER_COLUMNS, rows)


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.3%}"


def _aligned(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
    lines = []
    for row in [header, *rows]:
        first, *rest = (
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        lines.append("  ".join([first, *rest]).rstrip())
    return "\n".join(lines)


def plot(results: Sequence[CodecResult], title: str, path: Path) -> None:
    """Draw KL against wire ratio, and attention error by layer. Needs matplotlib."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(12, 5), layout="constrained")
    left, right = figure.subplots(1, 2)
    figure.suptitle(title)
    # What loses nothing has no place on a logarithmic axis.
    lossy = [result for result in results if result.record()["kl_nats"] > 0]
    for result in lossy:
        it = result.record()
        (line,) = right.plot(
            [layer.index for layer in result.layers],
            [100 * layer.attention.value or math.nan for layer in result.layers],
            marker=".",
            label=result.codec,
        )
        left.errorbar(
            it["wire_ratio"],
            it["kl_nats"],
            yerr=it["kl_nats_standard_error"],
            marker="o",
            color=line.get_color(),
        )
    left.set_xlabel("wire ratio")
    left.set_ylabel("KL divergence, nats a token")
    right.set_xlabel("layer")
    right.set_ylabel("error of the attention output, %")
    right.xaxis.set_major_locator(MaxNLocator(integer=True))
    for axes in (left, right):
        axes.set_yscale("log")
        axes.grid(visible=True, alpha=0.3)
    if lossy:
        figure.legend(loc="outside lower center", ncols=3)
    figure.savefig(path)
