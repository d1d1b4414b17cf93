"""Fetches with and without a codec over a link of a known rate."""

from __future__ import annotations

import os
import statistics
import sys
from collections.abc import Iterator
from types import TracebackType
from typing import Any

from baselines.host import DST_SEED, SRC_SEED

from kvbench.child import Child
from kvbench.codecs import DATA_SEED, MOST_OFF
from kvbench.kv import KvPool
from kvbench.measure import Contender, Result, alone, compare, interleave, missing, timed
from kvbench.settings import Settings
from kvbench.shaped import FAR, ShapedError, ShapedLink
from kvbench.sides import TIMEOUT_S, why_missing

BITS_PER_SECOND = 10_000_000_000
RAW = "the same fetch, raw, over the same link of 10 Gbit/s"
CODECS = ("fp8_e4m3", "int8")
SHORT = {"fp8_e4m3": "fp8", "int8": "int8"}
EXACT = {"k": 0.0, "v": 0.0}
# Llama 3 70B: what 32,768 tokens are in 16 bit, over 80 layers of 8 heads of 128, K and V.
CONTEXT = "Llama-70B, 32768 tokens"
CONTEXT_BYTES = 80 * 2 * 8 * 128 * 2 * 32768


class Pair:
    """A consumer here and a producer at the far end of a shaped link."""

    def __init__(self, link: ShapedLink, settings: Settings) -> None:
        import kvxfer

        self._kv = KvPool(settings.nbytes, settings.pages, DST_SEED, None)
        self._source = KvPool(settings.nbytes, settings.pages, SRC_SEED, DATA_SEED)
        self._agent: Any = None
        secret = os.urandom(16).hex()
        command = [*link.far_command, sys.executable, "-m", "kvbench.kv_producer"]
        self._child = Child("kvxfer producer", command)
        try:
            self._child.ask(
                "start",
                listen=f"{FAR}:0",
                secret=secret,
                nbytes=settings.nbytes,
                pages=settings.pages,
                seed=DATA_SEED,
            )
            self._agent = kvxfer.Agent("bench-consumer", transport="tcp", secret=secret)
            self._cache = self._agent.register(self._kv.cache())
        except BaseException:
            self.close()
            raise
        self._ticket: Any = None
        self.reports: dict[str, Any] = {}

    def check(self, codec: str, most: dict[str, float]) -> None:
        """Fetch once into poison and compare."""
        self._kv.poison()
        self.offer()
        self.fetch(codec)
        self._kv.check_against(self._source, most)

    def offer(self) -> None:
        """Have the producer make the offer that fetch() takes; not timed."""
        self._ticket = self._child.ask("offer")["ticket"]

    def fetch(self, codec: str) -> float:
        """Seconds of one fetch."""
        blocks = self._kv.blocks.tolist()

        def work() -> None:
            fetch = self._agent.fetch(
                self._ticket, self._cache, blocks=blocks, timeout=TIMEOUT_S, codec=codec
            )
            fetch.wait()
            self.reports[codec] = fetch.report

        return timed(work)

    def contender(self, codec: str) -> Contender:
        """Its turn."""
        pids = (self._child.pid, os.getpid())
        return Contender(codec, lambda: [self.fetch(codec)], pids, before=self.offer)

    def close(self) -> None:
        """End both sides."""
        if self._agent is not None:
            self._agent.close()
        self._child.close()

    def __enter__(self) -> Pair:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def fetch_shaped(settings: Settings) -> Iterator[Result]:
    """Raw, coded and automatic fetches in turns, and what they make of a long context."""
    absent = why_missing()
    if absent is not None:
        yield missing("fetch_tcp_fp8", "GB/s", RAW, absent)
        return
    try:
        link = ShapedLink(BITS_PER_SECOND)
    except ShapedError as error:
        yield missing("fetch_tcp_fp8", "GB/s", RAW, f"no link of 10 Gbit/s: {error}")
        return
    with link, Pair(link, settings) as pair:
        pair.check("raw", EXACT)
        for codec in CODECS:
            pair.check(codec, MOST_OFF[codec])
        names = ("raw", *CODECS, "auto")
        measured = interleave([pair.contender(name) for name in names], settings.repetitions)
        for codec in CODECS:
            pair.check(codec, MOST_OFF[codec])
    raw = measured.series["raw"].rates(settings.nbytes)
    common: dict[str, object] = {
        "foreign_cores": measured.foreign_cores,
        "link_gb_s": BITS_PER_SECOND / 8e9,
    }
    yield alone(
        "fetch_tcp_raw", raw, "GB/s", "none: what the coded ones are compared with", **common
    )
    for codec in (*CODECS, "auto"):
        rates = measured.series[codec].rates(settings.nbytes)
        report = pair.reports[codec]
        yield compare(
            f"fetch_tcp_{SHORT.get(codec, codec)}",
            rates,
            "GB/s",
            RAW,
            raw,
            ">= 1.85" if codec == "fp8_e4m3" else "",
            **common,
            codec=report.codec,
            why=report.codec_why,
            wire_bytes=report.wire_bytes,
        )
    for codec in ("raw", *CODECS):
        rates = measured.series[codec].rates(settings.nbytes)
        share = pair.reports[codec].wire_bytes / settings.nbytes
        on_paper = CONTEXT_BYTES * share / (BITS_PER_SECOND / 8)
        seconds = [CONTEXT_BYTES / rate / 1e9 for rate in rates]
        yield Result(
            f"context_{SHORT.get(codec, codec)}",
            statistics.median(seconds),
            "s",
            f"{CONTEXT}, {CONTEXT_BYTES >> 30} GiB, at 10 Gbit/s on paper",
            statistics.median(s / on_paper for s in seconds),
            on_paper,
            len(seconds),
            min(seconds),
            max(seconds),
            extra={"wire_gib": round(CONTEXT_BYTES * share / 2**30, 2)},
        )
