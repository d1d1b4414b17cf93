"""What only the process itself can check: bytes, deadlines, what is held."""

from __future__ import annotations

import contextlib
import gc
import os
import threading
import time
from ctypes import CDLL
from pathlib import Path
from typing import Any

from faults.campaign import content
from faults.campaign.rails import queue_pairs
from faults.campaign.shortage import Shortage
from faults.campaign.state import Fetching, Place, State
from kvtest import fake_gpu, fake_verbs
from kvtest.fake_gpu import HOST

import kvxfer

# Seconds that a handle may outlive its deadline before it counts as late: far above what a busy
# machine needs, and measured by a clock that stands still while the process cannot run.
SLACK = 5.0
# Bytes that allocators, numpy and caches of the reference may keep; ASan keeps 256 MiB of what was
# freed, and stacks of its own.
MEMORY_NOISE = (256 if "KVXFER_EXPECT_SANITIZE" in os.environ else 12) << 20
_HELD = 24  # verified fetches whose blocks are kept, to see whether somebody writes there later
# The handshake's threads come and go; with them sockets.
_PASSING = ("kvxfer-handshake", "kvxfer-connect", "campaign-flip")


class Checks:
    def __init__(self, state: State, shortage: Shortage) -> None:
        self._state, self._shortage = state, shortage
        self._ended: list[tuple[int, Fetching, float]] = []  # to be verified

    def collect(self) -> None:
        """Take note of what has ended, and check it."""
        state, now = self._state, time.monotonic()
        for place in state.places.values():
            with contextlib.suppress(kvxfer.ClosedError):
                place.agent.poll()
        awake = state.clock.seconds
        for at, fetching in list(state.fetches.items()):
            done, over = fetching.fetch.done, awake - fetching.deadline
            if done:  # perhaps long ago: we may have had no time to look
                over = min(over, fetching.fetch.report.seconds - fetching.timeout)
            if over > SLACK and not fetching.reported:
                fetching.reported = True
                state.say_fault(
                    "late", f"fetch {at} of offer {fetching.number} is {over:.1f} s over"
                )
            if done:
                del state.fetches[at]
                self._ended.append((at, fetching, now))
        self._collect_offers()
        # Numpy needs memory: what has ended is checked when there is some.
        while self._ended and "memory" not in self._shortage:
            self._verify(*self._ended.pop(0))

    def _collect_offers(self) -> None:
        state = self._state
        for key, offering in list(state.offers.items()):
            if offering.offer.released:
                del state.offers[key]
                content.garble(offering.place.paged, offering.blocks)
                offering.place.free += offering.blocks
                status = offering.offer.status
                assert status is not None
                state.say(
                    {
                        "event": "released",
                        "number": key[0],
                        "status": status.value,
                        "message": offering.offer.message[:300],
                    }
                )

    def _verify(self, at: int, fetching: Fetching, when: float) -> None:
        place = fetching.place
        status = fetching.fetch.status
        assert status is not None
        report = fetching.fetch.report
        event = {
            "event": "ended",
            "id": at,
            "number": fetching.number,
            "agent": place.plan.name,
            "status": status.value,
            "message": str(fetching.fetch.error or "")[:300],
            "time": when,
            "bytes": report.bytes,
            "path": report.path,
            "path why": report.path_why,
            "queue pairs": queue_pairs(report),
        }
        if not fetching.blocks:
            event["status"] = f"declined: {status.value}"
        elif status is kvxfer.Status.OK:
            codec = report.codec
            if self._state.sabotage == "wrong":
                g = place.plan.geometry
                view = place.paged.view(g.layers[0], g.planes[0])
                view[fetching.blocks[0], 0, fetching.first_slot, 0] ^= 1
            if not fetching.shared:
                self._check(place, at, fetching, codec, "when it ended")
                place.held.append((fetching, codec))
                if len(place.held) > _HELD:
                    self.free_oldest(place)
        elif not fetching.shared and not (self._state.doubtful and place.plan.device != HOST):
            content.poison(place.paged, fetching.blocks)
            place.free += fetching.blocks
        fetching.judged = True
        self._state.say(event)

    def _check(self, place: Place, at: int, fetching: Fetching, codec: str, moment: str) -> None:
        wrong = content.wrong_elements(
            place.paged,
            fetching.blocks,
            fetching.number,
            self._state.plans[fetching.number],
            self._state.sources[fetching.number],
            fetching.tokens,
            fetching.first_slot,
            codec,
        )
        if wrong:
            self._state.say_fault(
                "wrong",
                f"{place.plan.name}: {wrong} elements of offer {fetching.number} ({codec}, tokens "
                f"{fetching.tokens}) differ {moment}; fetch {at}",
            )

    def expect_untouched(self, place: Place, blocks: list[int], which: str) -> None:
        if not content.poisoned(place.paged, blocks):
            written = [block for block in blocks if not content.poisoned(place.paged, [block])]
            self._state.say_fault(
                "wrong", f"{place.plan.name}: {which} {written} were written into"
            )
            content.poison(place.paged, blocks)

    def free_oldest(self, place: Place) -> None:
        fetching, codec = place.held.pop(0)
        self._check(place, -1, fetching, codec, "some time after it ended")
        content.poison(place.paged, fetching.blocks)
        place.free += fetching.blocks

    def free_held(self, place: Place) -> None:
        while place.held:
            self.free_oldest(place)

    def end_bursts(self) -> None:
        bursts = self._state.bursts
        for at, running in list(bursts.items()):
            if all(fetching.judged for fetching in running):
                del bursts[at]
                place = running[0].place
                # One that failed may have left anything in the block that all of them share.
                if all(fetching.fetch.status is kvxfer.Status.OK for fetching in running):
                    self._check(place, at, running[0], "raw", "at the end of a burst")
                content.poison(place.paged, running[0].blocks)
                place.free += running[0].blocks

    def measure(self) -> None:
        """Say what is held. A fleet at rest holds nothing but its connections."""
        self.collect()
        self.end_bursts()
        state = self._state
        held = {}
        for name, place in state.places.items():
            if not state.fetches:
                self.free_held(place)
            held[name] = _held_by(place)
            if place.plan.role == "consumer" and not state.fetches:
                self.expect_untouched(place, sorted(place.free), "free blocks")
        gc.collect()
        CDLL(None).malloc_trim(0)
        names = [thread.name for thread in threading.enumerate()]
        state.say(
            {
                "event": "measured",
                "handles": len(state.fetches) + len(state.offers),
                "held": held,
                "busy": sum(name in _PASSING for name in names)
                + len(self._shortage)
                + state.clock.pending,
                "descriptors": len(os.listdir("/proc/self/fd")),
                "threads": len(os.listdir("/proc/self/task")),
                **_adapters(),
                **_gpus(),
                "memory": int(Path("/proc/self/statm").read_text().split()[1])
                * os.sysconf("SC_PAGE_SIZE"),
                "awake": state.clock.seconds,
            }
        )


def _adapters() -> dict[str, int]:
    """Return what RDMA adapters hold and were wrongly asked for, if they exist in this process."""
    there = "KVXFER_VERBS_LIBRARY" in os.environ
    return {
        "objects of adapters": fake_verbs.objects() if there else 0,
        "violations": fake_verbs.violations() if there else 0,
    }


def _gpus() -> dict[str, int]:
    """Return what is held of GPUs, and how often memory was freed too early."""
    there = "KVXFER_GPU_CODE" in os.environ
    return {
        "handles of GPUs": fake_gpu.gpus().open_handles() if there else 0,
        "early frees": fake_gpu.gpus().early_frees() if there else 0,
    }


def _held_by(place: Place) -> dict[str, Any]:
    stats = place.agent.stats
    return {
        "offers": stats.offers,
        "serving": stats.serving,
        "fetches": stats.fetches,
        "slots": stats.slots - stats.free_slots,
        "quarantined": stats.quarantined_slots,
        "blocks": place.plan.geometry.num_blocks - len(place.free),
        "peers": stats.peers,
    }
