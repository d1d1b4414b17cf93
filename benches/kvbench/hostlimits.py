"""The yardsticks by themselves: what this machine gives memcpy, plain sockets and NIXL."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from contextlib import ExitStack

from baselines.host import Memcpy, ScatteredMemcpy, Sockets, label
from baselines.nixl import HOW_TO_INSTALL, OPERATIONS, NixlPair, Transport

from kvbench.measure import KIB, Result, Round, compare, interleave, missing
from kvbench.settings import Settings

CONTIGUOUS = "memcpy, 1 thread, contiguous"
SIZES = (4 * KIB, 16 * KIB, 64 * KIB)


def host(settings: Settings) -> Iterator[Result]:
    """Scattered memcpy and plain sockets, in proportion to memcpy."""
    memcpy = Memcpy(settings.native, settings.nbytes, settings.pages)
    yield from _scattered(settings, memcpy)
    yield from _sockets(settings, memcpy)


def host_nixl(settings: Settings) -> Iterator[Result]:
    """NIXL by itself, in proportion to memcpy."""
    if settings.nixl_python is None:
        yield missing("host_nixl", "GB/s", CONTIGUOUS, HOW_TO_INSTALL)
        return
    memcpy = Memcpy(settings.native, settings.nbytes, settings.pages)
    transports: tuple[Transport, ...] = ("posix", "tcp")
    for transport in transports:
        yield from _nixl(settings, settings.nixl_python, transport, memcpy)


def _scattered(settings: Settings, memcpy: Memcpy) -> Iterator[Result]:
    for run_bytes in SIZES:
        scattered = ScatteredMemcpy(settings.native, settings.nbytes, run_bytes, settings.pages)
        measured = interleave([scattered.contender(), memcpy.contender()], settings.repetitions)
        scattered.check()
        yield _to_memcpy(settings, f"host_scattered_{label(run_bytes)}", "scattered", measured)


def _sockets(settings: Settings, memcpy: Memcpy) -> Iterator[Result]:
    with ExitStack() as stack:
        all_ = [
            stack.enter_context(Sockets(settings.native, settings.nbytes, settings.pages, n))
            for n in (1, 2, 4)
        ]
        measured = interleave(
            [*(s.contender() for s in all_), memcpy.contender()], settings.repetitions
        )
        for sockets in all_:
            sockets.check()
            yield _to_memcpy(
                settings, f"host_sockets_{sockets.streams}", sockets.contender().name, measured
            )


def _nixl(
    settings: Settings, python: str, transport: Transport, memcpy: Memcpy
) -> Iterator[Result]:
    with NixlPair(python, transport, 2 * settings.nbytes, settings.pages) as pair:
        for run_bytes in SIZES:
            for operation in OPERATIONS:
                key = pair.prepare(run_bytes, settings.nbytes // run_bytes, operation)
                measured = interleave(
                    [pair.contender(key), memcpy.contender()], settings.repetitions
                )
                pair.check(key)
                yield _to_memcpy(
                    settings,
                    f"host_nixl_{transport}_{operation.lower()}_{label(run_bytes)}",
                    "nixl",
                    measured,
                )
        for operation in OPERATIONS:
            key = pair.prepare(64 * KIB, 1, operation)
            times = sorted(x * 1e6 for x in pair.transfer(key, 3000))
            yield Result(
                f"host_nixl_{transport}_{operation.lower()}_latency_64k",
                statistics.median(times),
                "us",
                "none",
                None,
                None,
                len(times),
                times[0],
                times[-1],
                extra={"p99": round(times[int(0.99 * len(times))], 2)},
            )
        yield Result(
            f"host_nixl_{transport}_idle", sum(pair.idle_cores(1.0)), "cores", "none", None, None, 1
        )


def _to_memcpy(settings: Settings, name: str, contender: str, measured: Round) -> Result:
    series = measured.series[contender]
    return compare(
        name,
        series.rates(settings.nbytes),
        "GB/s",
        CONTIGUOUS,
        measured.series["memcpy"].rates(settings.nbytes),
        cpu_s_per_gb=series.cpu_seconds_per_gb(settings.nbytes),
        foreign_cores=measured.foreign_cores,
    )
