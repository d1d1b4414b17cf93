"""Faults that a process does to itself: what it needs is not there, or goes bad."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import random
import resource
import threading
import time
from collections.abc import Callable
from pathlib import Path

from kvtest import fake_verbs

import kvxfer

ADAPTER_FAULTS = (
    "port",
    "queue pairs",
    "completion queues",
    "adapter",
    "held",
    "unheard",
    "no queue pairs",
    "no registrations",
    "no sends",
)
_CALLS = {"no queue pairs": "create_qp", "no registrations": "reg_mr", "no sends": "post_send"}


class Shortage:
    """What this process has no more of, until that is lifted."""

    def __init__(self) -> None:
        self._lifts: dict[str, Callable[[], None]] = {}

    def __len__(self) -> int:
        return len(self._lifts)

    def __contains__(self, what: str) -> bool:
        return what in self._lifts

    def begin(self, what: str) -> None:
        if what not in self._lifts:
            self._lifts[what] = getattr(self, "_no_" + what)()

    def end(self, what: str) -> None:
        lift = self._lifts.pop(what, None)
        if lift is not None:
            lift()

    def end_all(self) -> None:
        for what in list(self._lifts):
            self.end(what)

    def _no_descriptors(self) -> Callable[[], None]:
        spare: list[int] = []
        lift = _lower(resource.RLIMIT_NOFILE, 1 + max(map(int, os.listdir("/proc/self/fd"))))
        with contextlib.suppress(OSError):
            while True:
                spare.append(os.open("/dev/null", os.O_RDONLY))

        def close_and_lift() -> None:
            for descriptor in spare:
                os.close(descriptor)
            lift()

        return close_and_lift

    def _no_memory(self) -> Callable[[], None]:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        return _lower(resource.RLIMIT_AS, pages * os.sysconf("SC_PAGE_SIZE") + (256 << 10))

    def _no_disk(self) -> Callable[[], None]:
        # No file grows: logs and traces, and the shared memory of an arena.
        return _lower(resource.RLIMIT_FSIZE, 0)

    def _no_threads(self) -> Callable[[], None]:
        start = threading.Thread.start

        def refuse(_: threading.Thread) -> None:
            raise RuntimeError("can't start new thread")

        def lift() -> None:
            threading.Thread.start = start  # type: ignore[method-assign]

        threading.Thread.start = refuse  # type: ignore[method-assign]
        return lift


def _lower(limit: int, value: int) -> Callable[[], None]:
    before = resource.getrlimit(limit)
    resource.setrlimit(limit, (value, before[1]))
    return lambda: resource.setrlimit(limit, before)


def break_adapters(how: str, device: str) -> None:
    """Let adapters fail that exist in this process alone."""
    if how in _CALLS:
        fake_verbs.fail_calls(_CALLS[how], errno.ENOMEM, times=2)
    elif how == "port":
        fake_verbs.set_port(device, False)
    elif how == "queue pairs":
        fake_verbs.break_queue_pairs(device)
    elif how == "completion queues":
        fake_verbs.overrun_completion_queues(device)
    elif how == "adapter":
        fake_verbs.fail_device(device)
    elif how == "held":
        fake_verbs.hold_sends(True)
    elif how == "unheard":
        fake_verbs.lose_acknowledgements(device, True)
    else:
        raise ValueError(how)


def mend_adapters() -> None:
    fake_verbs.library().fake_verbs_forget_faults()
    for device in fake_verbs.DEVICES:
        fake_verbs.set_port(device, True)


def flip(agent: kvxfer.Agent, seconds: float) -> None:
    """Let memory of the arena go bad for a while: one bit after another, anywhere in it."""
    core = agent._core
    descriptor, size = os.dup(core.arena_fd()), core.arena_bytes()

    def work() -> None:
        draw = random.Random(size)
        end = time.monotonic() + seconds
        with (
            contextlib.suppress(OSError),  # memory is short at the moment
            os.fdopen(descriptor, "r+b", buffering=0) as file,
            mmap.mmap(file.fileno(), size) as arena,
        ):
            while time.monotonic() < end:
                for _ in range(50):
                    at = draw.randrange(size)
                    arena[at] ^= 1 << draw.randrange(8)
                time.sleep(0.001)

    try:
        threading.Thread(target=work, daemon=True, name="campaign-flip").start()
    except BaseException:
        os.close(descriptor)
        raise
