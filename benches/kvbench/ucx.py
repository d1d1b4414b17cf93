"""The ucx transport beside UCXX, and what ucx_perftest says of the same machine."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, closing
from unittest import mock

from baselines import peers
from baselines.host import Memcpy
from baselines.ucx import TRANSPORTS, PerftestError, put_rate
from baselines.ucxx_pair import ENVIRONMENT, UcxxPair

from kvbench.child import ChildError
from kvbench.measure import KIB, MIB, Contender, Result, alone, compare, interleave, missing
from kvbench.settings import Settings
from kvbench.sides import Consumer, why_missing

BASELINE = "memcpy, 1 thread, contiguous"
REPETITIONS = 3  # each starts two processes


def ucx(settings: Settings) -> Iterator[Result]:
    """ucx_put_*: puts of 64 MiB, beside memcpy; of 16 KiB, which stay in the caches."""
    perftest = peers.ucx_perftest()
    if perftest is None:
        yield missing("ucx_put", "GB/s", BASELINE, peers.missing("ucx_perftest"))
        return
    memcpy = Memcpy(settings.native, settings.nbytes, settings.pages)
    for transport in TRANSPORTS:
        for size, suffix in ((64 * MIB, "64m"), (16 * KIB, "16k_cached")):
            name = f"ucx_put_{transport}_{suffix}"

            def put(transport: str = transport, size: int = size) -> list[float]:
                # As seconds that so many bytes would take, which `interleave` keeps and drops.
                count = max(4, 256 * MIB // size)
                rate = put_rate(perftest, transport, size, count)
                return [settings.nbytes / rate / 1e9]

            try:
                measured = interleave(
                    [Contender("put", put), memcpy.contender()], REPETITIONS, warmup=0
                )
            except PerftestError as error:
                yield missing(name, "GB/s", BASELINE, str(error))
                continue
            yield compare(
                name,
                measured.series["put"].rates(settings.nbytes),
                "GB/s",
                BASELINE,
                measured.series["memcpy"].rates(settings.nbytes),
                foreign_cores=measured.foreign_cores,
                version=perftest.version,
            )


def fetch_ucx(settings: Settings) -> Iterator[Result]:
    """256 MiB in runs of 16 KiB over UCX's sockets, beside UCXX."""
    import kvxfer

    name, unit, run_bytes, nbytes = "fetch_ucx_tcp", "GB/s", 16 * KIB, settings.nbytes
    usual = {key: value for key, value in ENVIRONMENT.items() if value is not None}
    with mock.patch.dict(os.environ, usual), ExitStack() as stack:
        found = kvxfer.transports()["ucx"]
        if (absent := why_missing() or (None if found.available else found.why)) is not None:
            yield missing(name, unit, "UCXX", absent)
            return
        runs = nbytes // run_bytes
        consumer = stack.enter_context(
            Consumer(settings.native, "ucx", run_bytes, 2 * nbytes, settings.pages)
        )
        consumer.check(runs)
        contenders = [consumer.contender(runs)]
        python, why, baseline = peers.python(), peers.missing("UCXX"), ""
        if python is not None and not why:
            try:
                pair = stack.enter_context(closing(UcxxPair(python, nbytes, settings.pages)))
                contenders.append(pair.contender())
                baseline = pair.name
            except ChildError as error:
                why = str(error)
        measured = interleave(contenders, settings.repetitions)
        consumer.check(runs)
        ours = measured.series["kvxfer"].rates(nbytes)
        common = {"bytes": nbytes, "run_bytes": run_bytes, "foreign_cores": measured.foreign_cores}
        common |= {
            "cpu_s_per_gb": {n: s.cpu_seconds_per_gb(nbytes) for n, s in measured.series.items()}
        }
        if "ucxx" in measured.series:
            theirs = measured.series["ucxx"].rates(nbytes)
            yield compare(name, ours, unit, baseline, theirs, **common, **consumer.report(runs))
        else:
            yield alone(name, ours, unit, measured.failed.get("ucxx", why), **common)
