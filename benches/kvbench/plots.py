"""Bar charts of a run, as SVG that changes only where figures do."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

Line = dict[str, Any]
_FETCHES = {
    "fetch_shm": "shared memory\n16 KiB blocks",
    "fetch_tcp_4k": "TCP\n4 KiB blocks",
    "fetch_tcp": "TCP\n16 KiB blocks",
    "fetch_tcp_64k": "TCP\n64 KiB blocks",
}
_WORK = {
    "pack_raw_same_layout": "pack",
    "unpack_raw_same_layout": "unpack",
    "pack_raw_transposed": "pack\ntransposed",
    "encode_int8": "encode\nint8",
    "decode_int8": "decode\nint8",
    "encode_fp8_e4m3": "encode\nfp8_e4m3",
    "decode_fp8_e4m3": "decode\nfp8_e4m3",
}


def draw(lines: Sequence[Line], folder: Path) -> list[str]:
    """Draw what there is; return the names of the files. Without matplotlib: none."""
    try:
        import matplotlib as mpl
    except ImportError:
        return []
    mpl.rcParams["svg.hashsalt"] = "kvxfer"  # the same figures give the same file
    drawn = []
    for name, groups in (("fetch.svg", _FETCHES), ("work.svg", _WORK)):
        bars = {title: _bars(lines, key) for key, title in groups.items()}
        bars = {title: found for title, found in bars.items() if found}
        if bars:
            _chart(bars, folder / name)
            drawn.append(name)
    return drawn


def _bars(lines: Sequence[Line], name: str) -> dict[str, float]:
    found: dict[str, float] = {}
    for line in lines:
        if line["name"] != name or line.get("value") is None or line.get("unit") != "GB/s":
            continue
        found["kvxfer"] = line["value"]
        if line["baseline_value"] is not None:
            found[_short(line["baseline"])] = line["baseline_value"]
    return found


def _short(baseline: str) -> str:
    known = ("memcpy", "sockets", "nixl", "Mooncake", "UCXX", "torch")
    return next((name for name in known if name in baseline), baseline.split(",")[0])


def _chart(bars: dict[str, dict[str, float]], path: Path) -> None:
    from matplotlib.figure import Figure

    names = list(dict.fromkeys(name for group in bars.values() for name in group))
    colors = dict(zip(names, (f"C{index}" for index in range(len(names))), strict=True))
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    axes: Any = figure.add_subplot()
    width = 0.8 / max(len(group) for group in bars.values())
    seen = set()
    for place, group in enumerate(bars.values()):
        for index, (name, rate) in enumerate(group.items()):
            left = place + (index - (len(group) - 1) / 2) * width
            label = None if name in seen else name
            seen.add(name)
            axes.bar(left, rate, width * 0.92, color=colors[name], label=label)
            axes.annotate(f"{rate:.1f}", (left, rate), ha="center", va="bottom", fontsize="x-small")
    axes.set_xticks(range(len(bars)), list(bars))
    axes.set_ylabel("GB/s (1e9 bytes)")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize="small", frameon=False)
    figure.savefig(path, metadata={"Date": None})
