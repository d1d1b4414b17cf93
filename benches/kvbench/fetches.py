"""Fetches between two processes: rates, latency, and what the digest costs."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing

from baselines import peers
from baselines.host import ScatteredMemcpy, Sockets, best_streams, label
from baselines.mooncake_pair import MooncakePair
from baselines.nixl import HOW_TO_INSTALL, OPERATIONS, NixlPair, Operation, Transport
from baselines.ucxx_pair import UcxxPair

from kvbench.child import ChildError
from kvbench.measure import KIB, Contender, Result, Round, alone, compare, interleave, missing
from kvbench.settings import Settings
from kvbench.sides import Consumer, why_missing

IDLE_SECONDS = 2.0
PAIRS: tuple[tuple[str, Transport], ...] = (("shm", "posix"), ("tcp", "tcp"))
MEMCPY = "memcpy, 1 thread, the same scattered runs"


def fetch_shm(settings: Settings) -> Iterator[Result]:
    """256 MiB in runs of 16 KiB over shared memory, beside memcpy and NIXL."""
    yield from _fetch(
        settings, "fetch_shm", "shm", 16 * KIB, "posix", memcpy_bar=">= 1.1", nixl_bar=">= 1.1"
    )


def fetch_tcp(settings: Settings) -> Iterator[Result]:
    """256 MiB over loopback TCP, beside plain sockets and NIXL."""
    streams = best_streams(settings.native, settings.nbytes, settings.pages)
    for run_bytes in (16 * KIB, 4 * KIB, 64 * KIB):
        name = "fetch_tcp" if run_bytes == 16 * KIB else f"fetch_tcp_{label(run_bytes)}"
        yield from _fetch(
            settings,
            name,
            "tcp",
            run_bytes,
            "tcp",
            streams=streams,
            sockets_bar=">= 0.85" if run_bytes == 16 * KIB else "",
            nixl_bar=">= 1.0",
        )


def _fetch(
    settings: Settings,
    name: str,
    transport: str,
    run_bytes: int,
    nixl_transport: Transport,
    memcpy_bar: str = "",
    nixl_bar: str = "",
    streams: int = 0,
    sockets_bar: str = "",
) -> Iterator[Result]:
    nbytes = settings.nbytes
    runs = nbytes // run_bytes
    nixl_name = f"nixl {nixl_transport}, no progress thread"
    absent = why_missing()
    if absent is not None:
        yield missing(name, "GB/s", MEMCPY if transport == "shm" else "plain sockets", absent)
        return
    with ExitStack() as stack:
        consumer = stack.enter_context(
            Consumer(settings.native, transport, run_bytes, 2 * nbytes, settings.pages)
        )
        consumer.check(runs)
        contenders = [consumer.contender(runs)]
        if transport == "shm":
            memcpy = ScatteredMemcpy(settings.native, nbytes, run_bytes, settings.pages)
            contenders.append(memcpy.contender())
        if streams:
            sockets = stack.enter_context(Sockets(settings.native, nbytes, settings.pages, streams))
            contenders.append(sockets.contender())
        nixl, why = None, HOW_TO_INSTALL
        if settings.nixl_python is not None:
            try:
                nixl = stack.enter_context(
                    NixlPair(settings.nixl_python, nixl_transport, 2 * nbytes, settings.pages)
                )
                key, operation = best_operation(nixl, run_bytes, runs)
                contenders.append(nixl.contender(key))
                nixl_name = f"{nixl.name}, {operation}"
            except ChildError as error:
                nixl, why = None, str(error)
        others = _add_others(settings, stack, transport, run_bytes, contenders)
        measured = interleave(contenders, settings.repetitions)
        consumer.check(runs)
        cpu = {n: s.cpu_seconds_per_gb(nbytes) for n, s in measured.series.items()}
        idle = {"kvxfer": consumer.idle_cores(IDLE_SECONDS)}
        if "nixl" in measured.failed:
            nixl, why = None, measured.failed["nixl"]
        if nixl is not None:
            nixl.check(key)
            idle["nixl"] = nixl.idle_cores(IDLE_SECONDS)
        ours = measured.series["kvxfer"].rates(nbytes)
        common = {"bytes": nbytes, "run_bytes": run_bytes, "foreign_cores": measured.foreign_cores}
        if transport == "shm":
            yield compare(
                name,
                ours,
                "GB/s",
                MEMCPY,
                measured.series["scattered"].rates(nbytes),
                memcpy_bar,
                **common,
                **consumer.report(runs),
            )
        if streams:
            label_ = contenders[1].name
            yield compare(
                name,
                ours,
                "GB/s",
                f"plain {label_}",
                measured.series[label_].rates(nbytes),
                sockets_bar,
                **common,
                **consumer.report(runs),
            )
        for rival, baseline in others:
            if rival in measured.series:
                theirs = measured.series[rival].rates(nbytes)
                yield compare(name, ours, "GB/s", baseline, theirs, **common)
            else:
                yield missing(name, "GB/s", rival, measured.failed.get(rival, baseline))
        if nixl is None:
            yield alone(name, ours, "GB/s", why, **common, cpu_s_per_gb=cpu, idle_cores=idle)
            return
        yield compare(
            name,
            ours,
            "GB/s",
            nixl_name,
            measured.series["nixl"].rates(nbytes),
            nixl_bar,
            **common,
            cpu_s_per_gb=cpu,
            idle_cores=idle,
        )


def _add_others(
    settings: Settings,
    stack: ExitStack,
    transport: str,
    run_bytes: int,
    contenders: list[Contender],
) -> list[tuple[str, str]]:
    """Add the rivals that have TCP only; return contender and name of each, or name and why not."""
    python = peers.python()
    if transport != "tcp" or python is None:
        return []
    found = []
    runs = settings.nbytes // run_bytes
    if why := peers.missing("Mooncake"):
        found.append(("Mooncake", why))
    else:
        try:
            pair = MooncakePair(python, 2 * settings.nbytes, settings.pages)
            stack.enter_context(closing(pair))
            contenders.append(pair.contender(pair.prepare(run_bytes, runs)))
            found.append(("mooncake", pair.name))
        except ChildError as error:
            found.append(("Mooncake", str(error)))
    if run_bytes == 16 * KIB:
        if why := peers.missing("UCXX"):
            found.append(("UCXX", why))
        else:
            try:
                ucxx = UcxxPair(python, settings.nbytes, settings.pages)
                stack.enter_context(closing(ucxx))
                contenders.append(ucxx.contender())
                found.append(("ucxx", ucxx.name))
            except ChildError as error:
                found.append(("UCXX", str(error)))
    return found


def best_operation(
    pair: NixlPair, run_bytes: int, runs: int, repetitions: int = 5
) -> tuple[str, Operation]:
    """The key of NIXL's faster way to move these runs: it depends on transport and machine."""
    keys = {pair.prepare(run_bytes, runs, operation): operation for operation in OPERATIONS}
    tried = interleave([pair.contender(key, key) for key in keys], repetitions)
    if not tried.series:
        raise ChildError("; ".join(tried.failed.values()))
    best = min(tried.series, key=lambda key: statistics.median(tried.series[key].seconds))
    return best, keys[best]


def digest(settings: Settings) -> Iterator[Result]:
    """What the digest costs, as a share of the time of a fetch."""
    absent = why_missing()
    for transport in ("shm", "tcp"):
        name, base = f"digest_{transport}", "the same fetch without digest"
        if absent is not None:
            yield missing(name, "share", base, absent)
            continue
        run_bytes, nbytes = 16 * KIB, settings.nbytes
        runs = nbytes // run_bytes
        with (
            Consumer(settings.native, transport, run_bytes, 2 * nbytes, settings.pages) as on,
            Consumer(
                settings.native, transport, run_bytes, 2 * nbytes, settings.pages, digest=False
            ) as off,
        ):
            on.check(runs)
            off.check(runs)
            measured = interleave(
                [on.contender(runs, "on"), off.contender(runs, "off")], settings.repetitions
            )
            on.check(runs)
        with_, without = measured.series["on"].seconds, measured.series["off"].seconds
        shares = [1 - b / a for a, b in zip(with_, without, strict=True)]
        share = statistics.median(shares)
        yield Result(
            name,
            share,
            "share",
            base,
            share,
            statistics.median(without) * 1e3,
            len(shares),
            min(shares),
            max(shares),
            "<= 0.15",
            {
                "fetch_ms": round(statistics.median(with_) * 1e3, 3),
                "without_ms": round(statistics.median(without) * 1e3, 3),
                "foreign_cores": measured.foreign_cores,
            },
        )


def fetch_latency_1block(settings: Settings) -> Iterator[Result]:
    """One block of 64 KiB: median and p99, in turns of fifty with NIXL."""
    batch, turns = 50, 10 if settings.quick else 60
    run_bytes = 64 * KIB
    pool_bytes = 64 << 20
    absent = why_missing()
    for transport, nixl_transport in PAIRS:
        name = f"fetch_latency_1block_{transport}"
        if absent is not None:
            yield missing(name, "us", f"nixl {nixl_transport}, no progress thread", absent)
            continue
        with ExitStack() as stack:
            consumer = stack.enter_context(
                Consumer(settings.native, transport, run_bytes, pool_bytes, settings.pages)
            )
            consumer.check(1)
            contenders = [consumer.contender(1, count=batch)]
            operations: list[Operation] = []
            if settings.nixl_python is not None:
                pair = stack.enter_context(
                    NixlPair(settings.nixl_python, nixl_transport, pool_bytes, settings.pages)
                )
                for operation in OPERATIONS:
                    operations.append(operation)
                    key = pair.prepare(run_bytes, 1, operation)
                    contenders.append(pair.contender(key, operation, batch))
            measured = interleave(contenders, turns)
            consumer.check(1)
        yield from _latency_results(name, f"nixl {nixl_transport}", measured, operations)


def _latency_results(
    name: str, nixl_name: str, measured: Round, operations: Sequence[Operation]
) -> Iterator[Result]:
    """Median and p99 over all, and as ratio the median of the turns' own ratios of them."""
    for suffix, q in (("", 0.5), ("_p99", 0.99)):
        ours = [_quantile(times, q) for times in measured.series["kvxfer"].samples]
        everything = [x for times in measured.series["kvxfer"].samples for x in times]
        lasted = [operation for operation in operations if operation in measured.series]
        compared: list[Operation | None] = [*lasted] or [None]
        for operation in compared:
            result = Result(
                name + suffix,
                _quantile(everything, q),
                "us",
                "; ".join(measured.failed.values()) or HOW_TO_INSTALL,
                None,
                None,
                len(everything),
                min(everything) * 1e6,
                max(everything) * 1e6,
                extra={"foreign_cores": measured.foreign_cores},
            )
            if operation is not None:
                samples = measured.series[operation].samples
                theirs = [_quantile(times, q) for times in samples]
                result.baseline = f"{nixl_name}, no progress thread, {operation}"
                result.ratio = statistics.median(a / b for a, b in zip(ours, theirs, strict=True))
                result.baseline_value = _quantile([x for t in samples for x in t], q)
            yield result


def _quantile(seconds: Sequence[float], q: float) -> float:
    """In microseconds."""
    return sorted(seconds)[min(len(seconds) - 1, int(q * len(seconds)))] * 1e6
