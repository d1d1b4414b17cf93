"""Writes the generated part of docs/benchmarks.md, and its plots."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from kvbench import plots

Line = dict[str, Any]

BEGIN = "<!-- begin: what make bench writes -->"
END = "<!-- end: what make bench writes -->"

_ALT = {"fetch.svg": "Rates of fetches", "work.svg": "Rates of packing and of codecs"}
# What each line is called on the page; those without a name are left out.
TITLES = {
    "fetch_shm": "shared memory, 16 KiB blocks",
    "fetch_tcp": "TCP, 16 KiB blocks",
    "fetch_tcp_4k": "TCP, 4 KiB blocks",
    "fetch_tcp_64k": "TCP, 64 KiB blocks",
    "fetch_ucx_tcp": "UCX's sockets, 16 KiB blocks",
    "fetch_latency_1block_shm": "shared memory, median",
    "fetch_latency_1block_shm_p99": "shared memory, 99 %",
    "fetch_latency_1block_tcp": "TCP, median",
    "fetch_latency_1block_tcp_p99": "TCP, 99 %",
    "pack_raw_same_layout": "packing, same order of axes",
    "unpack_raw_same_layout": "unpacking, same order of axes",
    "pack_raw_transposed": "packing, token-major into head-major",
    "encode_fp8_e4m3": "encoding fp8_e4m3",
    "decode_fp8_e4m3": "decoding fp8_e4m3",
    "encode_int8": "encoding int8",
    "decode_int8": "decoding int8",
    "ucx_put_tcp_64m": "ucx_perftest, TCP, 64 MiB",
    "ucx_put_shm_64m": "ucx_perftest, shared memory, 64 MiB",
    "ucx_put_tcp_16k_cached": "ucx_perftest, TCP, 16 KiB (in the caches)",
    "ucx_put_shm_16k_cached": "ucx_perftest, shared memory, 16 KiB (in the caches)",
    "host_scattered_16k": "memcpy of scattered runs of 16 KiB",
    "host_sockets_1": "plain sockets, 1 stream",
    "host_sockets_2": "plain sockets, 2 streams",
    "host_sockets_4": "plain sockets, 4 streams",
}


def write(lines: Sequence[Line], docs: Path) -> None:
    """Put the tables of a run into docs/benchmarks.md and the plots beside it."""
    target = docs / "benchmarks.md"
    text = target.read_text()
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    if not after:
        raise ValueError(f"{target} lacks the marks {BEGIN} and {END}")
    folder = docs / "benchmarks"
    folder.mkdir(exist_ok=True)
    drawn = plots.draw(lines, folder)
    target.write_text(f"{before}{BEGIN}\n{_generated(lines, drawn)}{END}{after}")


def _generated(lines: Sequence[Line], drawn: Iterable[str]) -> str:
    env = lines[0]
    sections = [
        _stamp(env, lines),
        _rivals(lines),
        "### Fetches\n",
        f"One fetch of {env['bytes'] >> 20} MiB between two processes, blocks at random places on "
        "both sides, every chunk verified; GB/s are 10^9 bytes of KV a second.\n",
        _images(name for name in drawn if name.startswith("fetch")),
        _compared(lines, "GB/s", "fetch_"),
        _costs(lines),
        "### One block\n",
        "One block of 64 KiB, in microseconds; below 1 kvxfer is faster.\n",
        _compared(lines, "us", "fetch_latency"),
        "### Packing and codecs\n",
        "One thread, digest included.\n",
        _images(name for name in drawn if name.startswith("work")),
        _compared(lines, "GB/s", "pack_", "unpack_", "encode_", "decode_"),
        "### Shares and growth\n",
        _single(lines),
        "### The machine itself\n",
        _compared(lines, "GB/s", "host_", "ucx_", ours="GB/s"),
    ]
    return "\n".join(filter(None, sections)) + "\n"


def _stamp(env: Line, lines: Sequence[Line]) -> str:
    versions = env["versions"]
    took = next((line["seconds"] for line in lines if line["name"] == "end"), None)
    noisy = sum(bool(line.get("noisy")) for line in lines)
    text = (
        f"Measured {env['time'][:10]} on {env['cpu']}, {env['cores']} cores, Linux "
        f"{env['kernel']}, "
        f"huge pages {env['thp']} (shared memory: {env['shmem_thp']}); kvxfer {versions['kvxfer']}"
        f"{' at ' + env['commit'] if env.get('commit') else ''}, Python {versions['python']}, "
        f"{versions['libc']}; load {env['load'][0]} at the start"
    )
    text += f"; the run took {took} s" if took else ""
    text += f"; others disturbed {noisy} lines, marked *" if noisy else ""
    return text + ".\n"


def _rivals(lines: Sequence[Line]) -> str:
    rows = [
        (line["rival"], line["version"] if not line["why"] else "", line["why"] or "measured")
        for line in lines
        if line["name"] == "rival"
    ]
    rows += [(line["name"], "", f"failed: {line['failed']}") for line in lines if "failed" in line]
    return _table(("beside", "version", "in this run"), rows)


def _compared(lines: Sequence[Line], unit: str, *prefixes: str, ours: str = "kvxfer") -> str:
    rows = []
    for line in lines:
        name = line["name"]
        if name not in TITLES or line.get("unit") != unit or not name.startswith(prefixes):
            continue
        if line["value"] is None:
            rows.append((TITLES[name], "-", line["baseline"], "-", line.get("why", "-")))
            continue
        mark = "*" if line.get("noisy") else ""
        rows.append(
            (
                TITLES[name],
                _number(line["value"]) + mark,
                line["baseline"] if line["ratio"] is not None else "-",
                _number(line["baseline_value"]),
                _number(line["ratio"]),
            )
        )
    header = ("what", f"{ours}, {unit}" if ours == "kvxfer" else ours, "beside", unit, "ratio")
    return _table(header, rows)


def _costs(lines: Sequence[Line]) -> str:
    """Return CPU seconds per GB and what is used at rest, of the lines that have both."""
    rows = []
    for line in lines:
        costs = line.get("cpu_s_per_gb")
        if line["name"] not in TITLES or not isinstance(costs, dict):
            continue
        idle = line.get("idle_cores", {})
        for who, seconds in costs.items():
            rest = idle.get(who)
            rows.append(
                (
                    TITLES[line["name"]],
                    who,
                    " + ".join(f"{value:.2f}" for value in seconds),
                    "-" if rest is None else f"{sum(rest):.4f}".rstrip("0").rstrip("."),
                )
            )
    return _table(("what", "who", "CPU seconds a GB", "cores at rest"), rows)


def _single(lines: Sequence[Line]) -> str:
    rows = []
    for line in lines:
        if not line["name"].startswith(("digest_", "growth_")) or line.get("value") is None:
            continue
        value = f"{line['value']:.1%}" if line["unit"] == "share" else _number(line["value"])
        unit = "" if line["unit"] == "share" else line["unit"]
        rows.append(
            (line["name"], f"{value} {unit}".strip(), line["baseline"], _number(line["ratio"]))
        )
    return _table(("what", "value", "beside", "ratio"), rows)


def _images(names: Iterable[str]) -> str:
    return "".join(f"![{_ALT[name]}](benchmarks/{name})\n" for name in names)


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    if not rows:
        return ""
    lines = [header, ["---"] * len(header), *rows]
    return "".join(f"| {' | '.join(cell.replace('|', '/') for cell in row)} |\n" for row in lines)


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"
