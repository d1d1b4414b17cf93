"""Writes the README's table of what was measured."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

Line = dict[str, Any]
Row = tuple[str, str, str]

BEGIN = "<!-- begin: what make bench measures -->"
END = "<!-- end: what make bench measures -->"


class _Lines:
    """Looks up what a run gave; KeyError where it gave nothing of the kind."""

    def __init__(self, lines: Sequence[Line]) -> None:
        self._lines = lines

    def find(self, name: str, beside: str = "") -> Line:
        for line in self._lines:
            there = line["name"] == name and line.get("value") is not None
            if there and beside.lower() in line["baseline"].lower():
                return line
        raise KeyError(name)

    def value(self, name: str) -> str:
        return _number(self.find(name)["value"])

    def ratio(self, name: str, beside: str) -> str:
        return f"{self.find(name, beside)['ratio']:.2f}"

    def best(self, name: str) -> str:
        """Of NIXL's two operations."""
        found = [
            line["baseline_value"]
            for line in self._lines
            if line["name"] == name and line.get("baseline_value") is not None
        ]
        if not found:
            raise KeyError(name)
        return _number(min(found))


def write(lines: Sequence[Line], readme: Path) -> None:
    """Put the table between the README's two marks."""
    before, _, rest = readme.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    if not after:
        raise ValueError(f"{readme} lacks the marks {BEGIN} and {END}")
    readme.write_text(f"{before}{BEGIN}\n{_generated(lines)}{END}{after}")


def _generated(lines: Sequence[Line]) -> str:
    env, noisy = lines[0], sum(bool(line.get("noisy")) for line in lines)
    disturbed = f", with {noisy} of its lines disturbed by other work" if noisy else ""
    rows = [("what", "kvxfer", "beside"), ("---", "---", "---")]
    for row in _ROWS:
        try:
            rows.append(row(_Lines(lines)))
        except KeyError:
            continue  # it was not measured in this run
    table = "".join(f"| {' | '.join(row)} |\n" for row in rows)
    return (
        f"One run of {env['time'][:10]} at {env.get('commit') or 'an unknown commit'}{disturbed}: "
        f"{env['cpu']}, {env['cores']} cores, {env['bytes'] >> 20} MiB a fetch.\n\n{table}"
    )


def _shm(found: _Lines) -> Row:
    what = "fetch over shared memory, 16 KiB blocks, digest verified"
    memcpy, nixl = found.ratio("fetch_shm", "memcpy"), found.ratio("fetch_shm", "nixl")
    beside = f"{memcpy} of one thread's memcpy of the same runs; {nixl} of NIXL, both sides polling"
    return what, f"{found.value('fetch_shm')} GB/s", beside


def _tcp(found: _Lines) -> Row:
    ratios = {who: found.ratio("fetch_tcp", who) for who in ("sockets", "nixl", "Mooncake", "UCXX")}
    beside = (
        f"{ratios['sockets']} of plain sockets, which copy nothing else; {ratios['nixl']} of NIXL, "
        f"{ratios['Mooncake']} of Mooncake, {ratios['UCXX']} of UCXX over TCP"
    )
    return "fetch over loopback TCP", f"{found.value('fetch_tcp')} GB/s", beside


def _other_blocks(found: _Lines) -> Row:
    rates = " / ".join(found.value(f"fetch_tcp_{size}") for size in ("4k", "64k"))
    nixl = " / ".join(found.ratio(f"fetch_tcp_{size}", "nixl") for size in ("4k", "64k"))
    return "the same in blocks of 4 / 64 KiB", f"{rates} GB/s", f"{nixl} of NIXL over TCP"


def _processor(found: _Lines) -> Row:
    costs = found.find("fetch_shm", "nixl")["cpu_s_per_gb"]
    ours, theirs = (" + ".join(f"{s:.2f}" for s in costs[who]) for who in ("kvxfer", "nixl"))
    what = "processor time over shared memory, producer + consumer"
    return what, f"{ours} s/GB", f"NIXL {theirs} s/GB"


def _rest(found: _Lines) -> Row:
    idle = found.find("fetch_shm", "nixl")["idle_cores"]
    ours, theirs = (_number(sum(idle[who])) for who in ("kvxfer", "nixl"))
    return "cores busy at rest", ours, f"NIXL {theirs}, where it has to answer"


def _one_block(found: _Lines) -> Row:
    names = {how: f"fetch_latency_1block_{how}" for how in ("shm", "tcp")}
    ours, theirs = (
        f"{of(names['shm'])} us shm, {of(names['tcp'])} us TCP" for of in (found.value, found.best)
    )
    return "one block of 64 KiB, median", ours, f"NIXL, polling: {theirs}"


def _digest(found: _Lines) -> Row:
    shares = (f"{found.find(f'digest_{how}')['value']:.0%}" for how in ("shm", "tcp"))
    return "the digest's share of a fetch", "{} shm, {} TCP".format(*shares), ""


def _packing(found: _Lines) -> Row:
    names = "pack_raw_same_layout", "unpack_raw_same_layout", "pack_raw_transposed"
    rates = ", ".join(found.value(name) for name in names)
    ratios = ", ".join(found.ratio(name, "memcpy") for name in names)
    what = "packing, unpacking, packing token-major into head-major; one thread, digest included"
    return what, f"{rates} GB/s", f"{ratios} of one contiguous memcpy"


def _codec(found: _Lines) -> Row:
    names = "encode_int8", "decode_int8"
    rates = ", ".join(found.value(name) for name in names)
    eager = ", ".join(found.ratio(name, "torch") for name in names)
    return "encoding, decoding int8; one thread", f"{rates} GB/s", f"{eager} of eager torch"


def _growth(found: _Lines) -> Row:
    ends = [
        found.find(f"growth_memory_{how}_{side}")
        for how in ("shm", "tcp")
        for side in ("producer", "consumer")
    ]
    most = max(line["value"] for line in ends)
    return f"memory growth over {ends[0]['n']:,} fetches", f"{most:.0f} B", ""


_ROWS = (
    _shm,
    _processor,
    _tcp,
    _other_blocks,
    _rest,
    _one_block,
    _digest,
    _packing,
    _codec,
    _growth,
)


def _number(value: float) -> str:
    if abs(value) >= 100:
        return f"{value:.0f}"
    return f"{value:.1f}" if abs(value) >= 1 else f"{value:.2g}"
