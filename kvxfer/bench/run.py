"""The running side: fetches, checks and times."""

from __future__ import annotations

import contextlib
import ctypes
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

import kvxfer
from kvxfer._numbers import format_bytes
from kvxfer.bench.case import BenchError, Case, WrongBytesError
from kvxfer.bench.channel import Channel
from kvxfer.bench.nixl import NixlPairs, NixlTurn
from kvxfer.bench.pool import TOLERANCE, Pool, block_tables
from kvxfer.bench.result import Result, Rival
from kvxfer.bench.settings import agent_settings
from kvxfer.bench.sockets import SocketReceiver, best_sockets
from kvxfer.bench.stamp import available_bytes
from kvxfer.config import Config
from kvxfer.handshake import Frame

_FETCH_TIMEOUT = 60.0
_LARGE = 1 << 20  # bytes from which transfers are compared with memcpy and sockets
_BATCH = 32  # offers that are made at once
_TURN = 1.0  # seconds that a batch takes at most, where one transfer does not take longer
_LEAST = 5  # repetitions
_FEWEST = 3  # where there is no time for those
_SMALL_SHARE = 0.25  # of the time that a large transfer gets, where there is a limit
_MOST = 2000
_TRIAL = 64 << 20  # bytes at most that the streams of plain sockets are chosen by

Progress = Callable[[str], None]


@dataclass(frozen=True)
class Choices:
    """What holds for all cases of a run."""

    seconds: float
    """About how long a case is timed."""
    verify: bool
    limits: bool
    """Whether to measure what the link carries without us."""
    within: float = math.inf
    """Seconds that all cases together should take at most: the fewer, the fewer repetitions."""


class _Fetcher:
    """This side's agent and cache for one case."""

    def __init__(self, case: Case, pool: Pool, agent: kvxfer.Agent) -> None:
        self._agent = agent
        self._cache = agent.register(pool.cache())
        blocks = block_tables(case)[1]
        size = case.block_size
        self._parts = [blocks[begin // size : -(-end // size)] for begin, end in case.parts()]
        self._codec = case.codec
        self.reports: list[kvxfer.Report] = []

    def fetch(self, tickets: Sequence[Frame]) -> float:
        """Return the seconds of one transfer, all of its fetches together."""
        start = time.perf_counter()
        fetches = [
            self._agent.fetch(
                ticket,
                self._cache,
                blocks,
                timeout=_FETCH_TIMEOUT,
                codec=self._codec,
            )
            for ticket, blocks in zip(tickets, self._parts, strict=True)
        ]
        try:
            for fetch in fetches:
                fetch.wait()
        except BaseException:
            for fetch in fetches:
                fetch.cancel()
            raise
        seconds = time.perf_counter() - start
        self.reports = [fetch.report for fetch in fetches]
        return seconds


class Runner:
    """Runs cases against one serving side."""

    def __init__(
        self,
        channel: Channel,
        config: Config,
        choices: Choices,
        nixl: NixlPairs | None,
        progress: Progress,
    ) -> None:
        self._channel, self._config, self._choices = channel, config, choices
        self._nixl, self._progress = nixl, progress
        self._cleanup = contextlib.ExitStack()
        self._sockets: SocketReceiver | None = None
        self._scratch = np.empty(0, np.uint8)
        self._end = self._case_end = time.monotonic() + choices.within
        hello = channel.ask("hello")
        self.other_stamp: Frame = hello["stamp"]

    def close(self) -> None:
        self._cleanup.close()

    def run(self, cases: Sequence[Case]) -> Iterator[Result]:
        """Yield a result for each case; one that can't be had says why.

        Raises
        ------
        WrongBytesError
            A transfer delivered something else than what was sent.
        BenchError
            The other side has ended.
        """
        for number, case in enumerate(cases, 1):
            where = f"[{number}/{len(cases)}] {case.name}"
            self._case_end = self._share(cases[number - 1 :])
            try:
                yield self._case(case, where)
            except WrongBytesError:
                raise
            except kvxfer.Error as error:
                yield Result(case, why=str(error))
            except BenchError as error:
                self._channel.ask("release")  # raises where it is the other side that has ended
                yield Result(case, why=str(error))

    def _share(self, left: Sequence[Case]) -> float:
        """Return when the first of the cases that are left should have ended."""
        shares = [1.0 if case.bytes >= _LARGE else _SMALL_SHARE for case in left]
        now = time.monotonic()
        return now + (self._end - now) * shares[0] / sum(shares)

    def _case(self, case: Case, where: str) -> Result:
        self._check_memory(case)
        self._progress(f"{where}: filling {case.pool_bytes >> 20} MiB on both sides")
        settings = agent_settings(case)
        pool = Pool(case)
        if self._choices.verify:
            pool.poison()
        self._channel.ask("prepare", case=case.frame())
        config = self._config.replace(**settings)
        with kvxfer.Agent("bench-run", config=config) as agent:
            fetcher = _Fetcher(case, pool, agent)
            self._progress(f"{where}: connecting, and the first transfer")
            first = fetcher.fetch(self._offers(case, 1)[0])
            result = self._checked(Result(case), pool, fetcher)
            self._time(result, pool, fetcher, where, first)
            if self._choices.verify:
                pool.poison()
                fetcher.fetch(self._offers(case, 1)[0])
                result = self._checked(result, pool, fetcher)
        self._channel.ask("release")
        return result

    def _checked(self, result: Result, pool: Pool, fetcher: _Fetcher) -> Result:
        report = fetcher.reports[0]
        result.wire_bytes = sum(each.wire_bytes for each in fetcher.reports)
        result.report = {
            "transport": report.transport,
            "why": report.why,
            "path": report.path,
            "path_why": report.path_why,
            "codec": report.codec,
            "codec_why": report.codec_why,
            "link": report.link,
        }
        if self._choices.verify:
            pool.check(report.codec)
            tolerance = TOLERANCE.get(report.codec, max(TOLERANCE.values()))
            result.verified = f"within {tolerance}" if tolerance else "exact"
        return result

    def _time(
        self, result: Result, pool: Pool, fetcher: _Fetcher, where: str, first: float
    ) -> None:
        case = result.case
        limit = self._limit(result, pool, where)
        nixl = self._nixl_turn(result, where)
        batch = _BATCH // case.in_flight if case.bytes < _LARGE else 1
        batch = min(batch, max(1, int(_TURN / first)))
        serving = running = 0.0
        end = time.monotonic() + self._choices.seconds
        turn = 0.0  # seconds of one
        while not self._enough(len(result.seconds), end, turn):
            self._progress(f"{where}: {len(result.seconds) + 1} transfers")
            began = time.monotonic()
            if limit is not None and result.limit is not None:
                result.limit.seconds.append(limit())
            if nixl is not None:
                try:
                    result.rivals[-1].seconds += nixl.run(batch)
                except BenchError as error:
                    result.rivals[-1], nixl = Rival("NIXL", why=str(error)), None
            offers = self._offers(case, max(1, batch))
            before, mine = self._channel.ask("cpu")["seconds"], time.process_time()
            result.seconds += [fetcher.fetch(tickets) for tickets in offers]
            running += time.process_time() - mine
            serving += self._channel.ask("cpu")["seconds"] - before
            turn = time.monotonic() - began
        result.cpu_seconds = (serving, running)

    def _enough(self, done: int, end: float, turn: float) -> bool:
        now = time.monotonic()
        if done >= _FEWEST and now + turn > self._case_end:
            return True
        return done >= _LEAST and (now >= end or done >= _MOST)

    def _offers(self, case: Case, count: int) -> list[list[Frame]]:
        tickets = self._channel.ask("offer", count=count)["tickets"]
        step = case.in_flight
        return [tickets[begin : begin + step] for begin in range(0, len(tickets), step)]

    def _limit(self, result: Result, pool: Pool, where: str) -> Callable[[], float] | None:
        """Return what runs the yardstick of this link once, and enter its name."""
        case = result.case
        if not self._choices.limits or case.bytes < _LARGE:
            return None
        if result.report["transport"] == "tcp":
            if self._sockets is None:
                self._progress(f"{where}: looking what plain sockets carry")
                nbytes = min(case.bytes, _TRIAL)
                sockets = best_sockets(self._channel, self._config, nbytes)
                self._sockets = self._cleanup.enter_context(sockets)
            receiver = self._sockets
            plural = "" if receiver.streams == 1 else "s"
            result.limit = Rival(f"plain sockets, {receiver.streams} stream{plural}")
            return lambda: receiver.run(case.bytes)
        if result.report["transport"] == "shm" and case.memory == "host":
            result.limit = Rival("memcpy, 1 thread")
            if self._scratch.nbytes < case.bytes:
                self._scratch = np.ones(case.bytes, np.uint8)
            return lambda: self._memcpy(pool, case.bytes)
        return None

    def _memcpy(self, pool: Pool, nbytes: int) -> float:
        target, left = self._scratch.ctypes.data, nbytes
        start = time.perf_counter()
        for address, size in pool.addresses():
            size = min(left, size)
            ctypes.memmove(target, address, size)
            target, left = target + size, left - size
        return time.perf_counter() - start

    def _nixl_turn(self, result: Result, where: str) -> NixlTurn | None:
        transport = result.report["transport"]
        if self._nixl is None or result.report["codec"] != "raw" or result.case.memory != "host":
            return None
        if transport not in ("shm", "tcp"):
            return None
        self._progress(f"{where}: preparing NIXL")
        try:
            half = (time.monotonic() + self._case_end) / 2
            turn = self._nixl.turn(transport, result.case.block_bytes, result.case.runs, half)
        except BenchError as error:
            result.rivals.append(Rival("NIXL", why=str(error)))
            return None
        result.rivals.append(Rival(turn.name))
        return turn

    def _check_memory(self, case: Case) -> None:
        needed = case.pool_bytes + (case.bytes if self._choices.limits else 0)
        available = available_bytes()
        if available is not None and needed > available:
            raise BenchError(
                f"this side needs {format_bytes(needed)} of memory; {format_bytes(available)} are "
                "available: choose fewer blocks or tokens"
            )
