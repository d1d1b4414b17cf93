"""What ucx_perftest says of the same machine: UCX's own figure, of one contiguous buffer."""

from __future__ import annotations

from collections.abc import Iterator

from baselines import peers
from baselines.host import Memcpy
from baselines.ucx import TRANSPORTS, PerftestError, put_rate

from kvbench.measure import KIB, MIB, Contender, Result, compare, interleave, missing
from kvbench.settings import Settings

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
