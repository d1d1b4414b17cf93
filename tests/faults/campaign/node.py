"""One process of the fleet: an agent or two, and the checks that only it can make.

The driver sends commands and gets events back; a node never waits for its peers. It checks what a
fetch has left in its cache as soon as it has ended, and that nobody writes into free blocks.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import sys
import threading
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from faults.campaign import clock, content, gpu_faults, shortage
from faults.campaign.checks import MEMORY_NOISE, SLACK, Checks
from faults.campaign.gpu_cache import GpuRefusedError, WatchedCache
from faults.campaign.schedule import PROBES, AgentPlan, OfferPlan
from faults.campaign.state import Fetching, Offering, Place, State
from kvtest import fake_gpu, fake_verbs
from kvtest.agents import CERTIFICATE, devices, listen_address, transport_name
from kvtest.caches import Geometry, Paged
from kvtest.fake_gpu import HOST

import kvxfer
from kvxfer import _core

# How a process says that it is short of something. CPython and numpy now and then answer a failed
# allocation with SystemError, no exception having been set.
_SHORT = (kvxfer.Error, OSError, MemoryError, SystemError, RuntimeError)


class Node:
    """What the driver's commands do. `say` sends an event to it.

    As `sabotage`, bytes of fetches are made "wrong", fetches are wanted earlier and thus "late",
    a descriptor is "leak"ed, or memory is left to "grow"; on GPUs an "event" is kept, or copies
    are "short".
    """

    def __init__(self, say: Callable[[dict[str, Any]], None], sabotage: str | None) -> None:
        self.shortage = shortage.Shortage()
        self._state = State(say, sabotage)
        self._state.clock.start()
        self._checks = Checks(self._state, self.shortage)
        self._leaked: list[object] = []

    # Life

    def start(
        self,
        plan: AgentPlan,
        transport: str,
        secret: str | None,
        tls: bool,
        address: str | None,
        traces: str,
    ) -> None:
        producing = plan.role != "consumer"
        listen = None
        if producing:
            listen = address or listen_address(transport)
        agent = kvxfer.Agent(
            plan.name,
            listen=listen,
            transport=transport_name(transport),
            secret=secret,
            trace_dir=traces,
            **devices(transport, producing=producing),
            **(CERTIFICATE if tls else {}),
            **dict(plan.knobs),
        )
        old = self._state.places.get(plan.name)
        doubtful = self._state.doubtful and plan.device != HOST
        paged = self._cache(plan) if old is None or doubtful else old.paged
        agent.register(paged.cache)
        agent.fileno()
        everything = list(range(plan.geometry.num_blocks))
        self._state.places[plan.name] = Place(plan, agent, paged, everything)
        if plan.role == "consumer":
            content.poison(paged, everything)
        self._state.say(
            {
                "event": "started",
                "agent": plan.name,
                "address": agent.address if listen else None,
                "incarnation": agent.incarnation,
            }
        )

    def _cache(self, plan: AgentPlan) -> Paged:
        if plan.device == HOST:
            return Paged(plan.geometry)
        self._have_peer_memory(plan)
        return WatchedCache(plan.geometry, plan.device, streams=plan.streams)

    def close(self, agent: str, **about: Any) -> None:
        """Close the agent in good order, and start it again at the same address."""
        self.shortage.end_all()
        place = self._state.places[agent]
        address = place.agent.address if place.plan.role != "consumer" else None
        place.agent.close()
        self._checks.collect()
        for fetching in self._state.fetches.values():
            if fetching.place is place:
                self._state.say_fault("late", f"{fetching.fetch!r} after close()")
        self._checks.end_bursts()
        self._checks.free_held(place)
        if place.plan.device != HOST:
            gpu_faults.end()
        if address is not None and address.startswith("loopback:"):
            address = None
        self.start(place.plan, address=address, **about)

    def connect(self, agent: str, name: str, address: str) -> None:
        with contextlib.suppress(kvxfer.Error):
            self._state.places[agent].agent.connect(name, address)

    def loopback(self, consumer: str, producer: str, faults: dict[str, float]) -> None:
        wrong = _core.LoopbackFaults()
        for name, value in faults.items():
            setattr(wrong, name, value)
        places = self._state.places
        ours, theirs = places[consumer].agent, places[producer].agent
        ours._peers.attach_loopback(theirs._peers, wrong)

    # Work

    def know(self, number: int, plan: OfferPlan, source: Geometry) -> None:
        self._state.plans[number], self._state.sources[number] = plan, source

    def offer(self, agent: str, number: int, ticket: kvxfer.Ticket) -> None:
        plan, place = self._state.plans[number], self._state.places[agent]
        if (number, agent) in self._state.offers:
            return
        needed = place.plan.geometry.blocks_for(plan.tokens)
        if len(place.free) < needed:
            self._skip("no free blocks to offer")
            return
        blocks = [place.free.pop(0) for _ in range(needed)]
        try:
            if place.late:
                place.late.fill_late(blocks, number, plan)
            else:
                content.fill(place.paged, blocks, number, plan)
            offer = place.agent.offer(
                place.paged.cache,
                blocks,
                ticket=ticket,
                lease=plan.lease,
                consumers=plan.consumers,
                ready=plan.ready,
                stream=place.stream,
            )
        except kvxfer.InvalidError as error:
            place.free += blocks
            if "was used before" not in str(error):  # it was rejected, or has ended already
                raise
            self._skip("the offer is over")
            return
        except GpuRefusedError as error:
            place.free += blocks
            self._skip(str(error))
            return
        except BaseException:
            place.free += blocks
            raise
        self._state.offers[number, agent] = Offering(place, offer, blocks)

    def _skip(self, why: str) -> None:
        self._state.say({"event": "skipped", "why": why})

    def ready(self, agent: str, number: int, layer: str) -> None:
        offering = self._state.offers.get((number, agent))
        if offering is not None:
            offering.offer.mark_ready(layer, stream=offering.place.stream)

    def release(self, agent: str, number: int) -> None:
        offering = self._state.offers.get((number, agent))
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
        plan, place = self._state.plans[number], self._state.places[agent]
        tokens = (plan.first_token + skip, plan.first_token + plan.tokens)
        slot = tokens[0] % place.plan.geometry.block_size
        blocks = self._take(place, place.plan.geometry.blocks_for(tokens[1] - tokens[0], slot))
        if blocks is None:
            return
        try:
            self._checks.expect_untouched(place, blocks, "free blocks")
            if place.late:
                place.late.poison_late([blocks[0], blocks[-1]])
            fetch = place.agent.fetch(
                ticket,
                place.paged.cache,
                blocks,
                tokens=slice(*tokens),
                timeout=timeout,
                codec=codec,
                stream=place.stream,
            )
        except GpuRefusedError as error:
            place.free += blocks
            self._skip(str(error))
            return
        except BaseException:
            place.free += blocks
            raise
        if self._state.sabotage == "leak" and id < PROBES and not self._leaked:
            self._leaked.append(os.open("/dev/null", os.O_RDONLY))
        elif self._state.sabotage == "event" and id < PROBES:
            fake_gpu.gpus().make_event(place.plan.device)
        elif self._state.sabotage == "short" and id == 0:
            fake_gpu.gpus().lose_copied(1)
        elif self._state.sabotage == "grow":
            self._leaked.append(bytearray(b"x") * (2 * MEMORY_NOISE))
        wanted = timeout - (timeout + 2 * SLACK if self._state.sabotage == "late" else 0.0)
        deadline = self._state.clock.seconds + wanted
        self._state.fetches[id] = Fetching(
            place, fetch, number, blocks, tokens, slot, wanted, deadline
        )

    def _take(self, place: Place, count: int) -> list[int] | None:
        """Take so many blocks to fetch into, if there are."""
        while len(place.free) < count and place.held:
            self._checks.free_oldest(place)
        if len(place.free) < count:
            self._skip("no free blocks to fetch into")
            return None
        return [place.free.pop(0) for _ in range(count)]

    def burst(
        self,
        agent: str,
        id: int,  # noqa: A002
        number: int,
        ticket: kvxfer.Ticket,
        count: int,
        timeout: float,
    ) -> None:
        """Ask for the same tokens many times at once, all into one block.

        So its bytes can be judged only if none of them fails.
        """
        plan, place = self._state.plans[number], self._state.places[agent]
        blocks = self._take(place, 1)
        if blocks is None:
            return
        tokens = (plan.first_token, plan.first_token + plan.tokens)
        running: list[Fetching] = []
        try:
            for at in range(id, id + count):
                fetch = place.agent.fetch(
                    ticket, place.paged.cache, blocks, timeout=timeout, stream=place.stream
                )
                deadline = self._state.clock.seconds + timeout
                fetching = Fetching(
                    place, fetch, number, blocks, tokens, 0, timeout, deadline, shared=True
                )
                self._state.fetches[at] = fetching
                running.append(fetching)
        finally:
            if running:
                self._state.bursts[id] = running
            else:
                place.free += blocks

    def cancel(self, id: int, *, done: bool = False) -> None:  # noqa: A002
        fetching = self._state.fetches.get(id)
        if fetching is None or fetching.shared:
            return
        fetching.fetch.cancel(done=done)
        # On return the blocks are ours again.
        self._checks.collect()

    def give_up(self, id: int) -> None:  # noqa: A002
        """Cancel for good: the producers count it."""
        self.cancel(id, done=True)

    def decline(
        self,
        agent: str,
        id: int,  # noqa: A002
        number: int,
        ticket: kvxfer.Ticket,
        timeout: float,
    ) -> None:
        place = self._state.places[agent]
        fetch = place.agent.decline(ticket, place.paged.cache, timeout=timeout)
        deadline = self._state.clock.seconds + timeout
        self._state.fetches[id] = Fetching(place, fetch, number, [], (0, 0), 0, timeout, deadline)

    def reject(self, agent: str, number: int, ticket: kvxfer.Ticket) -> None:
        del number
        self._state.places[agent].agent.reject(ticket, "the campaign says so")

    def renew(self, agent: str, number: int, ticket: kvxfer.Ticket) -> None:
        del number
        self._state.places[agent].agent.renew(ticket)

    # Faults that a process does to itself

    def limit(self, what: str) -> None:
        self.shortage.begin(what)

    def unlimit(self, what: str) -> None:
        self.shortage.end(what)

    def clock(self, by: float) -> None:
        clock.jump(by)

    def break_adapters(self, how: str, device: str) -> None:
        shortage.break_adapters(how, device)

    def mend_adapters(self) -> None:
        shortage.mend_adapters()
        for place in self._state.places.values():
            self._have_peer_memory(place.plan)

    def _have_peer_memory(self, plan: AgentPlan) -> None:
        if dict(plan.knobs).get("gpudirect") == "peermem":
            fake_verbs.set_peer_memory(fake_gpu.gpus().peer_memory)

    def break_gpus(self, fault: str, call: str, nth: int, times: int, seconds: float) -> None:
        self._state.doubtful |= gpu_faults.KINDS[fault].renews
        gpu_faults.begin(fault, call, nth, times)
        self._state.clock.after(seconds, gpu_faults.end)

    def renew_gpus(self, **about: Any) -> None:
        """Begin anew where GPUs were given up: with other agents, and other caches."""
        for name, place in list(self._state.places.items()):
            if place.plan.device != HOST:
                self.close(name, **about)
        self._state.doubtful = False

    def flip(self, agent: str, seconds: float) -> None:
        shortage.flip(self._state.places[agent].agent, seconds)

    # Rest

    def end(self) -> None:
        """Withdraw the offers that would last: the others have to end by their leases."""
        for (number, _), offering in self._state.offers.items():
            if self._state.plans[number].lease > 5:
                offering.offer.release()

    def measure(self) -> None:
        self._checks.measure()

    # The loop

    def turn(self, pipe: Connection) -> bool:
        """Do the commands that are there and see what has ended. False at the driver's end."""
        with selectors.DefaultSelector() as selector:
            selector.register(pipe.fileno(), selectors.EVENT_READ)
            for place in self._state.places.values():
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
            except _SHORT as error:
                self._state.say(
                    {
                        "event": "refused",
                        "what": method,
                        "why": type(error).__name__,
                        "short": isinstance(error, kvxfer.ResourceError),
                        "id": args.get("id"),
                        "message": str(error)[:300],
                    }
                )
            except Exception as error:  # noqa: BLE001 - the driver reports it
                self._say_error(method, error)
        self._checks.collect()
        return True

    def _say_error(self, method: str, error: Exception) -> None:
        where = traceback.format_exc()[-1500:]
        self._state.say_fault("error", f"{method}: {error!r:.300}\n{where}")

    def close_all(self) -> None:
        for place in self._state.places.values():
            place.agent.close()


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
            except _SHORT:
                if not node.shortage:
                    raise
                time.sleep(0.01)  # no descriptor for the selector: the limit is lifted soon
                _commands_while_limited(node, pipe)
    node.close_all()


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
        with contextlib.suppress(*_SHORT):
            getattr(node, method)(**args)


if __name__ == "__main__":
    with Connection(int(sys.argv[1])) as connection:
        serve(connection, sys.argv[2] or None)
