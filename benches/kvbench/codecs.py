"""Encoding and decoding in one process and thread, beside memcpy and torch's eager operations."""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

from baselines.host import DST_SEED, SRC_SEED, Memcpy
from baselines.nixl import HOW_TO_INSTALL

from kvbench.child import BENCHES, Child
from kvbench.kv import HEADS, KvPool
from kvbench.measure import MIB, Contender, Result, compare, interleave, missing, timed
from kvbench.memory import POISON, Pool
from kvbench.settings import Settings
from kvbench.sides import why_missing

# Of K and of V, as the engine encodes them: scheme, scale format, group.
ENCODINGS = {
    "fp8_e4m3": [("fp8_e4m3", "bfloat16", 128)] * 2,
    "int8": [("int8_channel", "bfloat16", 0), ("int8", "bfloat16", 128)],
}
DATA_SEED = 30
SEED = 1
CHUNK_BYTES = 2 * MIB  # of memory, about what a slot of 4 MiB is filled from
MEMCPY = "memcpy of the same bytes, 1 thread, contiguous"
EAGER = "torch eager, 1 thread"
# Largest relative L2 error of each plane that a sound codec shows on these data.
MOST_OFF = {
    "fp8_e4m3": {"k": 0.04, "v": 0.04},
    "int8": {"k": 0.01, "v": 0.015},
}
BARS = {"avx512": ">= 0.5", "avx2": ">= 0.35"}


class Coder:
    """kvxfer's plans over one pool, and its fused gather, encode and digest."""

    def __init__(self, kv: KvPool, codec: str) -> None:
        from kvxfer import _core

        self._core: Any = _core
        cache = kv.cache()
        self._plan = _core.PanelPlan(
            cache.layout,
            _core.BlockTable(kv.blocks.tolist()),
            _core.Slice([0], 0, HEADS, 0, kv.num_tokens),
            [0, 1],
            _core.PanelFormat(encodings=ENCODINGS[codec]),
        )
        panels = self._plan.num_panels()
        step = max(1, panels * CHUNK_BYTES // kv.nbytes)
        self._bounds = [(i, min(i + step, panels)) for i in range(0, panels, step)]
        self._slot = max(self._plan.most_bytes(*bound) for bound in self._bounds)
        self.wire = Pool(self._slot * len(self._bounds))
        self._sizes = [0] * len(self._bounds)

    @property
    def wire_bytes(self) -> int:
        """Bytes of all chunks as they were encoded last."""
        return sum(self._sizes)

    def encode(self) -> None:
        """Gather, encode and digest all chunks."""
        for i, (begin, end) in enumerate(self._bounds):
            slot = self.wire.bytes[i * self._slot : (i + 1) * self._slot]
            self._sizes[i] = self._pack(begin, end, slot)

    def _pack(self, begin: int, end: int, slot: object) -> int:
        # Streamed, as the engine packs into memory that another process reads.
        packed = self._core.pack_panels(self._plan, begin, end, slot, SEED, True, True)
        return int(packed[0])

    def decode(self, source: Coder) -> None:
        """Verify the digest of, decode and scatter what `source` has encoded."""
        for i, (begin, end) in enumerate(self._bounds):
            first = i * self._slot
            chunk = source.wire.bytes[first : first + source._sizes[i]]  # noqa: SLF001
            self._core.unpack_panels(self._plan, begin, end, chunk, SEED)


def codec(settings: Settings) -> Iterator[Result]:
    """encode_* and decode_* of each codec with each SIMD variant of this machine."""
    absent = why_missing()
    if absent is not None:
        yield missing("encode", "GB/s", MEMCPY, absent)
        return
    from kvxfer import _core

    best = _core.simd_variant()
    source = KvPool(settings.nbytes, settings.pages, SRC_SEED, DATA_SEED)
    target = KvPool(settings.nbytes, settings.pages, DST_SEED, None)
    memcpy = Memcpy(settings.native, settings.nbytes, settings.pages)
    with ExitStack() as stack:
        eager = stack.enter_context(Eager(settings.nixl_python)) if settings.nixl_python else None
        try:
            for variant in _core.simd_variants():
                if variant == "scalar" and settings.quick:
                    continue
                _core.set_simd_variant(variant)
                for name in ENCODINGS:
                    yield from _measure(
                        settings, name, variant, best, source, target, memcpy, eager
                    )
        finally:
            _core.set_simd_variant(best)


def _measure(
    settings: Settings,
    name: str,
    variant: str,
    best: str,
    source: KvPool,
    target: KvPool,
    memcpy: Memcpy,
    eager: Eager | None,
) -> Iterator[Result]:
    coder, decoder = Coder(source, name), Coder(target, name)

    def check() -> dict[str, float]:
        coder.wire.fill(POISON)
        target.poison()
        coder.encode()
        decoder.decode(coder)
        return target.check_against(source, MOST_OFF[name])

    off = check()
    pids = (os.getpid(),)
    with_eager = eager is not None and variant == best
    contenders = [
        Contender("encode", lambda: [timed(coder.encode)], pids),
        memcpy.contender(),
        Contender("decode", lambda: [timed(lambda: decoder.decode(coder))], pids),
    ]
    if eager is not None and with_eager:
        contenders += eager.contenders(name)
    repetitions = settings.repetitions if variant != "scalar" else 3
    measured = interleave(contenders, repetitions)
    check()
    suffix = "" if variant == best else f"_{variant}"
    copies = measured.series["memcpy"]
    for direction in ("encode", "decode"):
        series = measured.series[direction]
        rates = series.rates(settings.nbytes)
        common: dict[str, object] = {
            "simd": variant,
            "foreign_cores": measured.foreign_cores,
            "ratio_cpu": round(
                statistics.median(b[0] / a[0] for a, b in zip(series.cpu, copies.cpu, strict=True)),
                3,
            ),
        }
        yield compare(
            f"{direction}_{name}{suffix}",
            rates,
            "GB/s",
            MEMCPY,
            copies.rates(settings.nbytes),
            BARS.get(variant, ""),
            **common,
            wire_ratio=round(settings.nbytes / coder.wire_bytes, 4),
            relative_l2=off,
        )
        if with_eager:
            theirs = measured.series[f"eager_{direction}"].rates(Eager.NBYTES)
            yield compare(f"{direction}_{name}", rates, "GB/s", EAGER, theirs, ">= 12", **common)
    if variant == best and eager is None:
        yield missing(f"encode_{name}", "GB/s", EAGER, HOW_TO_INSTALL)


class Eager:
    """torch on one thread in a process of its own: amax, scale, cast, one operation at a time."""

    NBYTES = 16 * MIB  # slow enough that more would only take time

    def __init__(self, python: str) -> None:
        self._child = Child(
            "torch",
            [python, str(BENCHES / "baselines" / "torch_codec.py")],
            {"OMP_NUM_THREADS": "1"},
        )
        self._child.ask("start", nbytes=self.NBYTES, heads=HEADS)

    def contenders(self, codec: str) -> list[Contender]:
        """Its turns."""

        def turn(operation: str) -> Callable[[], list[float]]:
            return lambda: [self._child.ask("run", operation=operation, codec=codec)["seconds"]]

        return [
            Contender(f"eager_{operation}", turn(operation), (self._child.pid, os.getpid()))
            for operation in ("encode", "decode")
        ]

    def __enter__(self) -> Eager:
        return self

    def __exit__(self, *_: object) -> None:
        self._child.close()
