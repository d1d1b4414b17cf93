"""The verbs transport beside perftest and UCX, over the two rails of tests/verbs/rig.sh."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

from baselines import rdma
from baselines.host import CheckError

from kvbench.measure import KIB, MIB, Result, compare, missing
from kvbench.settings import Settings
from kvbench.sides import Consumer

ROOT = Path(__file__).resolve().parents[2]
WRITES = ROOT / "build" / "release" / "kvxfer_verbs_writes"
CONSUMER, PRODUCER = "rxe0", "rxe1"  # the ends of rail 0
HOST = "10.77.70.1"  # of CONSUMER
QUEUE_PAIRS = 2
NOT_THERE = "not installed (Debian: perftest, ucx-utils)"


class Writes:
    """Writes of one size over a link of its own, in another process (native/verbs_writes.cc).

    `runs` of them go out together, as the direct path writes, with one notice.
    """

    def __init__(self, size: int, window: int, runs: int = 1) -> None:
        self.size, self.window = size * runs, window // runs
        self.link = ""
        self._process = subprocess.Popen(
            [WRITES, CONSUMER, PRODUCER, *map(str, (size, self.window, QUEUE_PAIRS, runs))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def _ask(self, command: str) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(command + "\n")
        self._process.stdin.flush()
        answer: dict[str, Any] = json.loads(self._process.stdout.readline())
        return answer

    def run(self, count: int) -> float:
        """Seconds of so many writes."""
        answer = self._ask(f"run {count}")
        self.link = answer["link"]
        return float(answer["seconds"])

    def check(self) -> None:
        """Write once into cleared memory, which is compared."""
        wrong = self._ask("check")["wrong"]
        if wrong:
            raise CheckError(f"verbs: {wrong} of {self.window} writes differ")

    def counted(self, count: int) -> dict[str, object]:
        """Work requests, posts, completions and wake-ups of so many writes, for each GB."""
        self.run(1)
        before = counts_of(self.link)
        self.run(count)
        gigabytes = count * self.size / 1e9
        after = counts_of(self.link)
        return {f"{k}_per_gb": round((after[k] - before[k]) / gigabytes) for k in after}

    def __enter__(self) -> Writes:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def counts_of(link: str) -> dict[str, int]:
    """What a link says that it has done, out of its description."""
    found = re.search(
        r"(\d+) work requests in (\d+) posts, (\d+) completions, (\d+) wake-ups", link
    )
    assert found is not None, link
    return dict(
        zip(
            ("work_requests", "posts", "completions", "wake_ups"),
            map(int, found.groups()),
            strict=True,
        )
    )


def _beside(
    name: str,
    nbytes: int,
    ours: Callable[[], float],
    rivals: Sequence[tuple[rdma.Rival | None, str, str]],
    repetitions: int,
    extra: dict[str, object],
) -> Iterator[Result]:
    """Take turns with each rival that is there: (rival, what it is called, the bar)."""
    ours()
    rates: list[float] = []
    theirs: dict[str, list[float]] = {label: [] for rival, label, _ in rivals if rival is not None}
    for _ in range(repetitions):
        rates.append(nbytes / ours() / 1e9)
        for rival, label, _ in rivals:
            if rival is not None:
                theirs[label].append(rival.rate())
    for rival, label, bar in rivals:
        if rival is None:
            yield missing(name, "GB/s", label, NOT_THERE)
        else:
            yield compare(name, rates, "GB/s", label, theirs[label], bar, bytes=nbytes, **extra)


def _writes(
    settings: Settings, name: str, size: int, window: int, runs: int = 1
) -> Iterator[Result]:
    nbytes = (32 if settings.quick else 128) * MIB
    count = nbytes // size // runs
    rival = rdma.perftest(size, QUEUE_PAIRS, window // QUEUE_PAIRS, (CONSUMER, PRODUCER), HOST)
    with Writes(size, window, runs) as writes:
        writes.check()
        extra = writes.counted(count)
        yield from _beside(
            name,
            nbytes,
            lambda: writes.run(count),
            [(rival, "ib_write_bw", ">= 0.9")],
            settings.repetitions,
            {"under_way": window, "queue_pairs": QUEUE_PAIRS, "notices": count, **extra},
        )
        writes.check()


def write_1mib(settings: Settings) -> Iterator[Result]:
    """Writes of 1 MiB, 16 under way, beside ib_write_bw."""
    yield from _writes(settings, "write_1MiB", MIB, 16)


def write_16kib(settings: Settings) -> Iterator[Result]:
    """Writes of 16 KiB, 128 under way and posted in lists, beside ib_write_bw."""
    yield from _writes(settings, "write_16KiB_list", 16 * KIB, 128)


def write_16kib_direct(settings: Settings) -> Iterator[Result]:
    """Runs of 16 KiB, 128 under way, 32 with one notice as the direct path has it."""
    yield from _writes(settings, "write_16KiB_direct", 16 * KIB, 128, runs=32)


def fetch_packed(settings: Settings) -> Iterator[Result]:
    """A fetch of scattered runs of 16 KiB, beside one write for each and UCX's puts."""
    size, nbytes = 16 * KIB, (32 if settings.quick else 64) * MIB
    runs = nbytes // size
    rivals = [
        (
            rdma.perftest(size, QUEUE_PAIRS, 64, (CONSUMER, PRODUCER), HOST),
            "ib_write_bw, one write a run",
            ">= 1.0",
        ),
        (rdma.ucx_put(size, CONSUMER), "ucx_perftest over rc_verbs", ">= 1.0"),
    ]
    with ExitStack() as stack:
        consumer = stack.enter_context(
            Consumer(
                settings.native,
                "verbs",
                size,
                2 * nbytes,
                settings.pages,
                devices=(CONSUMER, PRODUCER),
            )
        )
        consumer.check(runs)
        yield from _beside(
            "fetch_packed_16KiB_runs",
            nbytes,
            _fetches(consumer, runs),
            rivals,
            settings.repetitions,
            {"run_bytes": size, "queue_pairs": QUEUE_PAIRS},
        )
        consumer.check(runs)


def _fetches(consumer: Consumer, runs: int) -> Callable[[], float]:
    def run() -> float:
        consumer.offer(runs)
        return consumer.fetch(runs)

    return run
