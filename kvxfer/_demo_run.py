"""Runs the demo's transfers: starts the producer's process, fetches, checks and times."""

from __future__ import annotations

import contextlib
import ctypes
import json
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import numpy as np
from numpy import random

import kvxfer
from kvxfer import _demo_kv as kv

SHORT_TOKENS = 700  # fills no whole number of blocks on either side
_SPARE_BLOCKS = 8  # that nobody asks for
_FETCH_TIMEOUT = 60.0

Progress = Callable[[str], None]


class DemoError(Exception):
    """Something that the user should read, without a traceback."""


class Producer:
    """The process of the prefill side."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    def start(self) -> None:
        # Ctrl-C is for this process, which then ends that one: so that has a process group of its
        # own, and one that comes just now waits until we know whom to end.
        interrupts: list[int] = []
        handler = signal.signal(signal.SIGINT, lambda number, _: interrupts.append(number))
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "kvxfer._demo_producer"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )
        finally:
            signal.signal(signal.SIGINT, handler)
        if interrupts:
            raise KeyboardInterrupt

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def ask(self, **command: object) -> dict[str, Any]:
        assert self._process is not None
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(command) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            status = self._process.wait()
            raise DemoError(f"the producer's process {self.pid} ended with status {status}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def __enter__(self) -> Producer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._process is None:
            return
        with contextlib.suppress(BrokenPipeError):  # it has ended already
            assert self._process.stdin is not None
            self._process.stdin.close()  # which it takes as the end
        try:
            self._process.wait(3.0 if kind is None else 1.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()


@dataclass
class Result:
    """What one line of the table says."""

    model: str
    transport: str
    tokens: int
    short_tokens: int
    bytes: int
    seconds: list[float] = field(default_factory=list)
    memcpy_seconds: list[float] = field(default_factory=list)
    path: str = ""
    why: str = ""
    wire_order: str = ""
    link: str = ""
    differences: list[kv.Difference] = field(default_factory=list)

    @property
    def median_seconds(self) -> float:
        return statistics.median(self.seconds)

    @property
    def gbps(self) -> float:
        return self.bytes / self.median_seconds / 1e9

    @property
    def share_of_memcpy(self) -> float:
        """Median over the repetitions, each compared with the memcpy made right before it."""
        pairs = zip(self.memcpy_seconds, self.seconds, strict=True)
        return statistics.median(copy / fetch for copy, fetch in pairs)

    def record(self) -> dict[str, object]:
        """Return the object that ``--json`` prints."""
        return {
            "model": self.model,
            "transport": self.transport,
            "tokens": self.tokens,
            "bytes": self.bytes,
            "seconds": self.median_seconds,
            "gb_per_s": self.gbps,
            "memcpy_gb_per_s": self.bytes / statistics.median(self.memcpy_seconds) / 1e9,
            "share_of_memcpy": self.share_of_memcpy,
            "repeat": len(self.seconds),
            "short_fetch_tokens": self.short_tokens,
            "path": self.path,
            "why": self.why,
            "wire_order": self.wire_order,
            "link": self.link,
            "exact": not self.differences,
            "differences": [str(difference) for difference in self.differences],
        }


class Consumer:
    """The decode side of one model: its cache, and two requests to fetch."""

    def __init__(self, model: kv.Model, tokens: int) -> None:
        self.model = model
        short = min(SHORT_TOKENS, tokens)
        self.producer_blocks, sources = _draw(kv.PRODUCER_BLOCK_SIZE, tokens, short)
        blocks, targets = _draw(kv.CONSUMER_BLOCK_SIZE, tokens, short)
        self.request = kv.Request(tokens, sources[0], targets[0])
        self.short = kv.Request(short, sources[1], targets[1])
        self.tensors = kv.allocate(model, model.consumer_axes, blocks, kv.CONSUMER_BLOCK_SIZE)
        kv.poison(self.tensors)
        self.cache = kvxfer.Cache(
            self.tensors,
            axes=model.consumer_axes,
            planes=model.planes,
            dtype="bfloat16",
            model=model.name,
            first_head=model.first_head,
        )
        self._scratch = np.ones(tokens * model.token_bytes, np.uint8)

    def run(self, producer: Producer, transport: str, repeat: int, progress: Progress) -> Result:
        """Fetch over one transport: once to warm up, then timed, then check."""
        title = f"{self.model.name} over {transport}"
        result = Result(
            self.model.name,
            transport,
            self.request.tokens,
            self.short.tokens,
            self.request.tokens * self.model.token_bytes,
        )
        progress(f"{title}: connecting")
        producer.ask(do="serve", transport=transport)
        with kvxfer.Agent("decode-0", transport=transport) as agent:
            agent.register(self.cache)
            progress(f"{title}: fetching, to warm up")
            self._fetch(agent, producer, self.request)
            for turn in range(repeat):
                progress(f"{title}: fetching, {turn + 1} of {repeat}")
                result.memcpy_seconds.append(self._memcpy())
                if turn == repeat - 1:
                    kv.poison(self.tensors)  # what is checked below is this fetch's work
                seconds, report = self._fetch(agent, producer, self.request)
                result.seconds.append(seconds)
            result.path, result.why = report.path, report.why
            result.wire_order, result.link = report.wire_order, report.link
            self._fetch(agent, producer, self.short)
        producer.ask(do="done")
        for done, difference in enumerate(self.check(), 1):
            progress(f"{title}: checking layer {done} of {self.model.layers}")
            result.differences += difference
        return result

    def check(self) -> Iterator[list[kv.Difference]]:
        """Yield the differences in each layer."""
        model = self.model
        extents = kv.shape(model, model.producer_axes, self.producer_blocks, kv.PRODUCER_BLOCK_SIZE)
        for layer, planes in enumerate(self.tensors.values()):
            found = []
            for plane, got in enumerate(planes):
                source = kv.contents(layer, plane, extents)
                found += kv.compare(model, layer, plane, got, source, [self.request, self.short])
            yield found

    def _fetch(
        self, agent: kvxfer.Agent, producer: Producer, request: kv.Request
    ) -> tuple[float, kvxfer.Report]:
        answer = producer.ask(do="offer", blocks=request.producer_blocks, tokens=request.tokens)
        start = time.perf_counter()
        fetch = agent.fetch(
            answer["ticket"], self.cache, request.consumer_blocks, timeout=_FETCH_TIMEOUT
        )
        fetch.wait()
        return time.perf_counter() - start, fetch.report

    def _memcpy(self) -> float:
        """Copy as many bytes of the cache elsewhere; return the seconds that took."""
        target, left = self._scratch.ctypes.data, self._scratch.nbytes
        start = time.perf_counter()
        for planes in self.tensors.values():
            for tensor in planes:
                size = min(left, tensor.nbytes)
                ctypes.memmove(target, tensor.ctypes.data, size)
                target += size
                left -= size
        return time.perf_counter() - start


def _draw(block_size: int, *requests: int) -> tuple[int, list[list[int]]]:
    """Return how many blocks a cache has, and which of them each request of so many tokens gets."""
    counts = [kv.blocks_for(tokens, block_size) for tokens in requests]
    total = sum(counts) + _SPARE_BLOCKS
    order = random.default_rng(block_size).permutation(total).tolist()
    tables = []
    for count in counts:
        tables.append(order[:count])
        order = order[count:]
    return total, tables


def needed_bytes(model: kv.Model, tokens: int) -> int:
    """Return about how much memory both processes take together."""
    caches = 2 * (tokens + SHORT_TOKENS + _SPARE_BLOCKS * kv.CONSUMER_BLOCK_SIZE)
    return (caches + tokens) * model.token_bytes + (400 << 20)


def run(
    models: Sequence[str], transports: Sequence[str], tokens: int, repeat: int, progress: Progress
) -> Iterator[Result]:
    """Yield the results, model by model and transport by transport."""
    with Producer() as producer:
        producer.start()
        for key in models:
            model = kv.MODELS[key]
            progress(f"{model.name}: filling the two caches")
            consumer = Consumer(model, tokens)
            producer.ask(do="load", model=key, blocks=consumer.producer_blocks)
            for transport in transports:
                yield consumer.run(producer, transport, repeat, progress)
            del consumer
