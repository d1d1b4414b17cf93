"""One process of the fleet: an agent or two, and the checks that only it can make.

The driver sends commands and gets events back; a node never waits for its peers. It checks what a
fetch has left in its cache as soon as it has ended, and that nobody writes into free blocks.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import mmap
import os
import random
import resource
import selectors
import sys
import threading
import time
import traceback
from collections.abc import Callable
from ctypes import CDLL
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from faults.campaign import content
from faults.campaign.schedule import AgentPlan, OfferPlan
from kvtest.agents import listen_address
from kvtest.caches import Geometry, Paged

import kvxfer
from kvxfer import _core

# Seconds that a handle may outlive its deadline before it counts as late: far above what a busy
# machine needs, and measured by a clock that stands still while the process cannot run.
SLACK = 5.0
_HELD = 24  # verified fetches whose blocks are kept, to see whether somebody writes there later


class AwakeClock(threading.Thread):
    """Seconds in which this process could run: it stands still while the process is stopped."""

    def __init__(self) -> None:
        super().__init__(daemon=True, name="campaign-clock")
        self.seconds = 0.0

    def run(self) -> None:
        before = time.monotonic()
        while True:
            time.sleep(0.02)
            now = time.monotonic()
            self.seconds += min(now - before, 0.1)
            before = now


@dataclasses.dataclass
class Fetching:
    agent: str
    fetch: kvxfer.Fetch
    number: int
    blocks: list[int]
    tokens: tuple[int, int]
    first_slot: int
    deadline: float  # of the awake clock
    shared: bool = False  # its block belongs to a burst
    reported: bool = False


@dataclasses.dataclass
class Offering:
    agent: str
    offer: kvxfer.Offer
    blocks: list[int]


@dataclasses.dataclass
class Place:
    """An agent with its cache."""

    plan: AgentPlan
    agent: kvxfer.Agent
    paged: Paged
    free: list[int]
    held: list[tuple[Fetching, str]] = dataclasses.field(default_factory=list)


class Node:
    """What the driver's commands do. `say` sends an event to it."""

    def __init__(self, say: Callable[[dict[str, Any]], None], sabotage: str | None) -> None:
        self.say, self.sabotage = say, sabotage
        self.clock = AwakeClock()
        self.clock.start()
        self.places: dict[str, Place] = {}
        self.plans: dict[int, OfferPlan] = {}
        self.sources: dict[int, Geometry] = {}
        self.offers: dict[tuple[int, str], Offering] = {}
        self.fetches: dict[int, Fetching] = {}
        self.bursts: dict[int, list[Fetching]] = {}
        self.ended: list[tuple[int, Fetching, float]] = []  # to be verified
        self.limited: dict[str, Callable[[], None]] = {}
        self.leaked: list[Any] = []

    # Life

    def start(
        self, plan: AgentPlan, transport: str, secret: str | None, address: str | None
    ) -> None:
        listen = None
        if plan.role != "consumer":
            listen = address or listen_address(transport)
        agent = kvxfer.Agent(
            plan.name, listen=listen, transport=transport, secret=secret, **dict(plan.knobs)
        )
        old = self.places.get(plan.name)
        paged = old.paged if old else Paged(plan.geometry)
        agent.register(paged.cache)
        agent.fileno()
        everything = list(range(plan.geometry.num_blocks))
        self.places[plan.name] = Place(plan, agent, paged, everything)
        if plan.role == "consumer":
            content.poison(paged, everything)
        self.say(
            {
                "event": "started",
                "agent": plan.name,
                "address": agent.address if listen else None,
                "incarnation": agent.incarnation,
            }
        )

    def close(self, agent: str, transport: str, secret: str | None) -> None:
        """Close the agent in good order, and start it again at the same address."""
        place = self.places[agent]
        address = place.agent.address if place.plan.role != "consumer" else None
        place.agent.close()
        self._collect()
        for fetching in [f for f in self.fetches.values() if f.agent == agent]:
            self.say({"event": "fault", "what": "late", "why": f"{fetching.fetch!r} after close()"})
        self._free_held(place)
        if address is not None and address.startswith("loopback:"):
            address = None
        self.start(place.plan, transport, secret, address)

    def connect(self, agent: str, name: str, address: str) -> None:
        with contextlib.suppress(kvxfer.Error):
            self.places[agent].agent.connect(name, address)

    def loopback(self, consumer: str, producer: str, faults: dict[str, float]) -> None:
        wrong = _core.LoopbackFaults()
        for name, value in faults.items():
            setattr(wrong, name, value)
        ours, theirs = self.places[consumer].agent, self.places[producer].agent
        ours._peers.attach_loopback(theirs._peers, wrong)

    # Work

    def know(self, number: int, plan: OfferPlan, source: Geometry) -> None:
        self.plans[number], self.sources[number] = plan, source

    def offer(self, agent: str, number: int, ticket: kvxfer.Ticket) -> None:
        plan, place = self.plans[number], self.places[agent]
        if (number, agent) in self.offers:
            return
        needed = place.plan.geometry.blocks_for(plan.tokens)
        if len(place.free) < needed:
            self.say({"event": "skipped", "why": "no free blocks to offer"})
            return
        blocks = [place.free.pop(0) for _ in range(needed)]
        content.fill(place.paged, blocks, number, plan)
        try:
            offer = place.agent.offer(
                place.paged.cache,
                blocks,
                ticket=ticket,
                lease=plan.lease,
                consumers=plan.consumers,
                ready=plan.ready,
            )
        except kvxfer.InvalidError as error:
            place.free += blocks
            if "was used before" not in str(error):  # it was rejected, or has ended already
                raise
            self.say({"event": "skipped", "why": "the offer is over"})
            return
        except BaseException:
            place.free += blocks
            raise
        self.offers[number, agent] = Offering(agent, offer, blocks)

    def ready(self, agent: str, number: int, layer: str) -> None:
        offering = self.offers.get((number, agent))
        if offering is not None:
            offering.offer.mark_ready(layer)

    def release(self, agent: str, number: int) -> None:
        offering = self.offers.get((number, agent))
        if offering is not None:
            offering.offer.release()

    def fetch(
        self,
        agent: str,
        id: int,  # noqa: A002
        number: int,
        ticket: kvxfer.Ticket,
        skip: int,
        timeout: float,
        codec: str,
    ) -> None:
        plan, place = self.plans[number], self.places[agent]
        size = place.plan.geometry.block_size
        tokens = (plan.first_token + skip, plan.first_token + plan.tokens)
        slot = tokens[0] % size
        needed = place.plan.geometry.blocks_for(tokens[1] - tokens[0], slot)
        while len(place.free) < needed and place.held:
            self._free_oldest(place)
        if len(place.free) < needed:
            self.say({"event": "skipped", "why": "no free blocks to fetch into"})
            return
        blocks = [place.free.pop(0) for _ in range(needed)]
        self._expect_untouched(place, blocks, "free blocks")
        allowed = timeout + (120.0 if self.sabotage == "late" else 0.0)
        try:
            fetch = place.agent.fetch(
                ticket,
                place.paged.cache,
                blocks,
                tokens=slice(*tokens),
                timeout=allowed,
                codec=codec,
            )
        except BaseException:
            place.free += blocks
            raise
        if self.sabotage == "leak":
            self.leaked.append(os.open("/dev/null", os.O_RDONLY))
        deadline = self.clock.seconds + timeout
        self.fetches[id] = Fetching(agent, fetch, number, blocks, tokens, slot, deadline)

    def burst(
        self,
        agent: str,
        id: int,  # noqa: A002
        number: int,
        ticket: kvxfer.Ticket,
        count: int,
        timeout: float,
    ) -> None:
        """Ask for the same tokens many times at once, all into one block."""
        plan, place = self.plans[number], self.places[agent]
        while not place.free and place.held:
            self._free_oldest(place)
        if not place.free:
            self.say({"event": "skipped", "why": "no free blocks to fetch into"})
            return
        blocks = [place.free.pop(0)]
        tokens = (plan.first_token, plan.first_token + plan.tokens)
        running = self.bursts.setdefault(id, [])
        for at in range(id, id + count):
            fetch = place.agent.fetch(ticket, place.paged.cache, blocks, timeout=timeout)
            deadline = self.clock.seconds + timeout
            fetching = Fetching(agent, fetch, number, blocks, tokens, 0, deadline, shared=True)
            self.fetches[at] = fetching
            running.append(fetching)

    def cancel(self, id: int) -> None:  # noqa: A002
        fetching = self.fetches.get(id)
        if fetching is None or fetching.shared:
            return
        fetching.fetch.cancel()
        # On return the blocks are ours again.
        self._collect()

    def give_up(self, id: int) -> None:  # noqa: A002
        """Cancel for good: the producers count it."""
        fetching = self.fetches.get(id)
        if fetching is not None and not fetching.shared:
            fetching.fetch.cancel(done=True)
            self._collect()

    def decline(
        self,
        agent: str,
        id: int,  # noqa: A002
        number: int,
        ticket: kvxfer.Ticket,
        timeout: float,
    ) -> None:
        place = self.places[agent]
        fetch = place.agent.decline(ticket, place.paged.cache, timeout=timeout)
        deadline = self.clock.seconds + timeout
        self.fetches[id] = Fetching(agent, fetch, number, [], (0, 0), 0, deadline)

    def reject(self, agent: str, number: int, ticket: kvxfer.Ticket) -> None:
        del number
        self.places[agent].agent.reject(ticket, "the campaign says so")

    # Faults that a process does to itself

    def limit(self, what: str) -> None:
        if what in self.limited:
            return
        if what == "descriptors":
            kind, value = resource.RLIMIT_NOFILE, 1 + max(map(int, os.listdir("/proc/self/fd")))
            spare = []
        elif what == "memory":
            pages = int(Path("/proc/self/statm").read_text().split()[0])
            kind, value = resource.RLIMIT_AS, pages * os.sysconf("SC_PAGE_SIZE") + (256 << 10)
        else:
            start = threading.Thread.start

            def refuse(_: threading.Thread) -> None:
                raise RuntimeError("can't start new thread")

            threading.Thread.start = refuse  # type: ignore[method-assign]

            def unlimit() -> None:
                threading.Thread.start = start  # type: ignore[method-assign]

            self.limited[what] = unlimit
            return
        before = resource.getrlimit(kind)
        resource.setrlimit(kind, (value, before[1]))
        if what == "descriptors":
            with contextlib.suppress(OSError):
                while True:
                    spare.append(os.open("/dev/null", os.O_RDONLY))

        def lift() -> None:
            if what == "descriptors":
                for descriptor in spare:
                    os.close(descriptor)
            resource.setrlimit(kind, before)

        self.limited[what] = lift

    def unlimit(self, what: str) -> None:
        lift = self.limited.pop(what, None)
        if lift is not None:
            lift()

    def flip(self, agent: str, seconds: float) -> None:
        """Let memory of the arena go bad for a while: one bit after another, anywhere in it."""
        core = self.places[agent].agent._core
        descriptor, size = os.dup(core.arena_fd()), core.arena_bytes()

        def work() -> None:
            draw = random.Random(size)
            end = time.monotonic() + seconds
            with (
                os.fdopen(descriptor, "r+b", buffering=0) as file,
                mmap.mmap(file.fileno(), size) as arena,
            ):
                while time.monotonic() < end:
                    for _ in range(50):
                        at = draw.randrange(size)
                        arena[at] ^= 1 << draw.randrange(8)
                    time.sleep(0.001)

        threading.Thread(target=work, daemon=True, name="campaign-flip").start()

    # Checks

    def _say_fault(self, what: str, why: str) -> None:
        self.say({"event": "fault", "what": what, "why": why})

    def _say_error(self, method: str, error: Exception) -> None:
        where = traceback.format_exc()[-1500:]
        self._say_fault("error", f"{method}: {error!r:.300}\n{where}")

    def _expect_untouched(self, place: Place, blocks: list[int], which: str) -> None:
        if not content.poisoned(place.paged, blocks):
            self._say_fault("wrong", f"{place.plan.name}: {which} {blocks} were written into")
            content.poison(place.paged, blocks)

    def _collect(self) -> None:
        """Take note of what has ended, and check it."""
        now = time.monotonic()
        for place in self.places.values():
            with contextlib.suppress(kvxfer.ClosedError):
                place.agent.poll()
        awake = self.clock.seconds
        for at, fetching in list(self.fetches.items()):
            if fetching.fetch.done:
                del self.fetches[at]
                if awake > fetching.deadline + SLACK and not fetching.reported:
                    self._late(at, fetching, awake)
                self.ended.append((at, fetching, now))
            elif awake > fetching.deadline + SLACK and not fetching.reported:
                fetching.reported = True
                self._late(at, fetching, awake)
        for key, offering in list(self.offers.items()):
            if offering.offer.released:
                del self.offers[key]
                place = self.places[offering.agent]
                content.garble(place.paged, offering.blocks)
                place.free += offering.blocks
                status = offering.offer.status
                assert status is not None
                self.say({"event": "released", "number": key[0], "status": status.value})
        # Numpy needs memory: what has ended is checked when there is some.
        if "memory" not in self.limited:
            ended, self.ended = self.ended, []
            for at, fetching, when in ended:
                self._verify(at, fetching, when)

    def _late(self, at: int, fetching: Fetching, awake: float) -> None:
        over = awake - fetching.deadline
        self._say_fault("late", f"fetch {at} of offer {fetching.number} is {over:.1f} s over")

    def _verify(self, at: int, fetching: Fetching, when: float) -> None:
        place = self.places[fetching.agent]
        status = fetching.fetch.status
        assert status is not None
        report = fetching.fetch.report
        event = {
            "event": "ended",
            "id": at,
            "number": fetching.number,
            "status": status.value,
            "message": str(fetching.fetch.error or "")[:300],
            "time": when,
            "bytes": report.bytes,
        }
        if not fetching.blocks:
            event["status"] = f"declined: {status.value}"
        elif status is kvxfer.Status.OK:
            codec = report.codec
            if self.sabotage == "wrong":
                g = place.plan.geometry
                view = place.paged.view(g.layers[0], g.planes[0])
                view[fetching.blocks[0], 0, fetching.first_slot, 0] ^= 1
            self._check(place, at, fetching, codec, "when it ended")
            if not fetching.shared:
                place.held.append((fetching, codec))
                if len(place.held) > _HELD:
                    self._free_oldest(place)
        elif not fetching.shared:
            content.poison(place.paged, fetching.blocks)
            place.free += fetching.blocks
        self.say(event)

    def _check(self, place: Place, at: int, fetching: Fetching, codec: str, moment: str) -> None:
        wrong = content.wrong_elements(
            place.paged,
            fetching.blocks,
            fetching.number,
            self.plans[fetching.number],
            self.sources[fetching.number],
            fetching.tokens,
            fetching.first_slot,
            codec,
        )
        if wrong:
            self._say_fault(
                "wrong",
                f"{place.plan.name}: {wrong} elements of offer {fetching.number} ({codec}, tokens "
                f"{fetching.tokens}) differ {moment}; fetch {at}",
            )

    def _free_oldest(self, place: Place) -> None:
        fetching, codec = place.held.pop(0)
        self._check(place, -1, fetching, codec, "some time after it ended")
        content.poison(place.paged, fetching.blocks)
        place.free += fetching.blocks

    def _free_held(self, place: Place) -> None:
        while place.held:
            self._free_oldest(place)

    def _end_bursts(self) -> None:
        for at, running in list(self.bursts.items()):
            if all(f.fetch.done for f in running):
                del self.bursts[at]
                place = self.places[running[0].agent]
                content.poison(place.paged, running[0].blocks)
                place.free += running[0].blocks

    def end(self) -> None:
        """Withdraw the offers that would last: the others have to end by their leases."""
        for (number, _), offering in self.offers.items():
            if self.plans[number].lease > 5:
                offering.offer.release()

    def measure(self) -> None:
        """Say what is held. A fleet at rest holds nothing but its connections."""
        self._collect()
        self._end_bursts()
        if not self.fetches:
            for place in self.places.values():
                self._free_held(place)
        held = {}
        for name, place in self.places.items():
            stats = place.agent.stats
            held[name] = {
                "offers": stats.offers,
                "serving": stats.serving,
                "fetches": stats.fetches,
                "slots": stats.slots - stats.free_slots,
                "quarantined": stats.quarantined_slots,
                "blocks": place.plan.geometry.num_blocks - len(place.free),
                "peers": stats.peers,
            }
            if place.plan.role == "consumer" and not self.fetches:
                self._expect_untouched(place, sorted(place.free), "free blocks")
        gc.collect()
        CDLL(None).malloc_trim(0)
        # The handshake's threads come and go; with them sockets.
        names = [t.name for t in threading.enumerate()]
        busy = sum(n in ("kvxfer-handshake", "kvxfer-connect", "campaign-flip") for n in names)
        self.say(
            {
                "event": "measured",
                "handles": len(self.fetches) + len(self.offers),
                "held": held,
                "busy": busy + len(self.limited),
                "descriptors": len(os.listdir("/proc/self/fd")),
                "threads": len(os.listdir("/proc/self/task")),
                "memory": int(Path("/proc/self/statm").read_text().split()[1])
                * os.sysconf("SC_PAGE_SIZE"),
                "awake": self.clock.seconds,
            }
        )

    # The loop

    def turn(self, pipe: Connection) -> bool:
        """Do the commands that are there and see what has ended. False at the driver's end."""
        with selectors.DefaultSelector() as selector:
            selector.register(pipe.fileno(), selectors.EVENT_READ)
            for place in self.places.values():
                selector.register(place.agent.fileno(), selectors.EVENT_READ)
            selector.select(0.05)
        while pipe.poll(0):
            try:
                method, args = pipe.recv()
            except EOFError:
                return False
            if method == "exit":
                return False
            try:
                getattr(self, method)(**args)
            except kvxfer.InvalidError as error:
                self._say_error(method, error)
            except (kvxfer.Error, OSError, MemoryError, RuntimeError) as error:
                self.say(
                    {
                        "event": "refused",
                        "what": method,
                        "why": type(error).__name__,
                        "id": args.get("id"),
                        "message": str(error)[:300],
                    }
                )
            except Exception as error:  # noqa: BLE001 - the driver reports it
                self._say_error(method, error)
        self._collect()
        return True


def serve(pipe: Connection, sabotage: str | None) -> None:
    lock = threading.Lock()

    def say(event: dict[str, Any]) -> None:
        with lock:
            pipe.send(event)

    node = Node(say, sabotage)
    with contextlib.suppress(OSError):  # the driver has gone
        while True:
            try:
                if not node.turn(pipe):
                    break
            except (OSError, MemoryError, kvxfer.ResourceError):
                if not node.limited:
                    raise
                time.sleep(0.01)  # no descriptor for the selector: the limit is lifted soon
                _commands_while_limited(node, pipe)
    for place in node.places.values():
        place.agent.close()


def _commands_while_limited(node: Node, pipe: Connection) -> None:
    """Without descriptors or memory only the end of that can be awaited."""
    waiting = []
    while pipe.poll(0):
        method, args = pipe.recv()
        if method == "unlimit":
            node.unlimit(**args)
        else:
            waiting.append((method, args))
    for method, args in waiting:
        with contextlib.suppress(kvxfer.Error, OSError, MemoryError):
            getattr(node, method)(**args)


if __name__ == "__main__":
    with Connection(int(sys.argv[1])) as connection:
        serve(connection, sys.argv[2] or None)
