"""Whether cost grows with the number of runs, and memory with the number of fetches."""

from __future__ import annotations

from collections.abc import Iterator

from kvbench.host import open_fds, resident_bytes, threads
from kvbench.measure import KIB, MIB, Result, compare, interleave, missing
from kvbench.settings import Settings
from kvbench.sides import Consumer, why_missing

RUN_BYTES = 4 * KIB


def growth(settings: Settings) -> Iterator[Result]:
    """Time per run with 1k, 8k and 32k runs in a fetch; memory held after many fetches."""
    absent = why_missing()
    if absent is not None:
        yield missing("growth_runs", "ns/run", "1k runs", absent)
        yield missing("growth_memory", "B", "before", absent)
        return
    yield from _runs(settings)
    for transport in ("shm", "tcp"):
        yield from _memory(settings, transport)


def _runs(settings: Settings) -> Iterator[Result]:
    counts = (1024, 8 * 1024, 32 * 1024)
    for transport in ("shm", "tcp"):
        with Consumer(
            settings.native, transport, RUN_BYTES, 2 * counts[-1] * RUN_BYTES, settings.pages
        ) as consumer:
            for runs in counts:
                consumer.check(runs)
            measured = interleave(
                [consumer.contender(runs, str(runs)) for runs in counts], settings.repetitions
            )
            consumer.check(counts[-1])
        per_run = {
            runs: [s / runs * 1e9 for s in measured.series[str(runs)].seconds] for runs in counts
        }
        for runs in counts[1:]:
            yield compare(
                f"growth_runs_{runs // 1024}k_{transport}",
                per_run[runs],
                "ns/run",
                "1k runs in one fetch",
                per_run[counts[0]],
                "<= 1.25",
                run_bytes=RUN_BYTES,
                foreign_cores=measured.foreign_cores,
            )


def _memory(settings: Settings, transport: str) -> Iterator[Result]:
    # A producer remembers how its last 4096 offers ended: growth begins to count behind them.
    fetches, settle, batch = (1000, 5000, 100) if settings.quick else (10_000, 5000, 100)
    with Consumer(settings.native, transport, 64 * KIB, 64 * MIB, settings.pages) as consumer:

        def many(count: int) -> None:
            for _ in range(count // batch):
                consumer.offer(1, batch)
                for _ in range(batch):
                    consumer.fetch(1)

        consumer.check(1)
        many(settle)
        before = [_held(pid) for pid in consumer.pids]
        many(fetches)
        after = [_held(pid) for pid in consumer.pids]
        consumer.check(1)
    grown = [a[0] - b[0] for a, b in zip(after, before, strict=True)]
    for side, bytes_, a, b in zip(("producer", "consumer"), grown, after, before, strict=True):
        yield Result(
            f"growth_memory_{transport}_{side}",
            float(bytes_),
            "B",
            f"resident after {settle} fetches",
            a[0] / b[0],
            float(b[0]),
            fetches,
            bar="<= 1.001",
            extra={"fds": a[1] - b[1], "threads": a[2] - b[2]},
        )


def _held(pid: int) -> tuple[int, int, int]:
    return resident_bytes(pid), open_fds(pid), threads(pid)
