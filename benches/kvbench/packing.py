"""Pack and unpack within one process and thread, beside one memcpy of as many bytes."""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Iterator

from baselines.host import DATA_SEED, DST_SEED, SRC_SEED, Memcpy

from kvbench.measure import Contender, Result, compare, interleave, missing, timed
from kvbench.memory import POISON, Pool
from kvbench.plans import Packer
from kvbench.settings import Settings
from kvbench.shapes import PagedPlane, Shape
from kvbench.sides import why_missing

BASELINE = "memcpy, 1 thread, contiguous"


def pack(settings: Settings) -> Iterator[Result]:
    """Blocks of 16 tokens, 8 heads of 128 two-byte elements, at random places."""
    absent = why_missing()
    if absent is not None:
        for name in ("pack_raw_same_layout", "unpack_raw_same_layout", "pack_raw_transposed"):
            yield missing(name, "GB/s", BASELINE, absent)
        return
    memcpy = Memcpy(settings.native, settings.nbytes, settings.pages)
    yield from _pack(settings, memcpy, "pack_raw_same_layout", "BNHC", ">= 0.85")
    yield from _unpack(settings, memcpy)
    yield from _pack(settings, memcpy, "pack_raw_transposed", "BHNC", ">= 0.5")


def _pack(
    settings: Settings, memcpy: Memcpy, name: str, wire_axes: str, bar: str
) -> Iterator[Result]:
    plane = PagedPlane(Shape(), "BNHC", settings.nbytes, settings.pages, SRC_SEED, DATA_SEED)
    packer = Packer(plane, wire_axes)
    wire = Pool(settings.nbytes, settings.pages)

    def check() -> None:
        wire.fill(POISON)
        packer.pack(wire.bytes)
        packer.check(wire.bytes)

    def work(with_digest: bool) -> None:
        packer.pack(wire.bytes, with_digest)

    yield from _measured(settings, memcpy, name, bar, check, work)


def _unpack(settings: Settings, memcpy: Memcpy) -> Iterator[Result]:
    plane = PagedPlane(Shape(), "BNHC", settings.nbytes, settings.pages, DST_SEED, None)
    unpacker = Packer(plane, "BNHC")
    wire = Pool(settings.nbytes, settings.pages)
    wire.fill_random(DATA_SEED)

    def check() -> None:
        plane.pool.fill(POISON)
        unpacker.unpack(wire.bytes)
        unpacker.check(wire.bytes)
        plane.check_others(POISON)

    def work(with_digest: bool) -> None:
        unpacker.unpack(wire.bytes, with_digest)

    yield from _measured(settings, memcpy, "unpack_raw_same_layout", ">= 0.85", check, work)


def _measured(
    settings: Settings,
    memcpy: Memcpy,
    name: str,
    bar: str,
    check: Callable[[], None],
    work: Callable[[bool], None],
) -> Iterator[Result]:
    pids = (os.getpid(),)
    check()
    measured = interleave(
        [
            Contender("digest", lambda: [timed(lambda: work(True))], pids),
            memcpy.contender(),
            Contender("no_digest", lambda: [timed(lambda: work(False))], pids),
        ],
        settings.repetitions,
    )
    check()
    memcpy_series = measured.series["memcpy"]
    theirs = memcpy_series.rates(settings.nbytes)
    for with_, suffix, its_bar in (("digest", "", bar), ("no_digest", "_no_digest", "")):
        series = measured.series[with_]
        yield compare(
            name + suffix,
            series.rates(settings.nbytes),
            "GB/s",
            BASELINE,
            theirs,
            its_bar,
            ratio_cpu=round(
                statistics.median(
                    b[0] / a[0] for a, b in zip(series.cpu, memcpy_series.cpu, strict=True)
                ),
                3,
            ),
            foreign_cores=measured.foreign_cores,
        )
