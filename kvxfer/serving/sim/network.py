"""Transfers that share the links of their two ends."""

from __future__ import annotations

from collections.abc import Callable

from kvxfer.serving.sim.clock import Clock


class Flow:
    """Bytes on their way from one engine to another."""

    __slots__ = ("done", "ends", "rate", "remaining", "settled", "version")

    def __init__(self, ends: tuple[Port, Port], size: float, done: Callable[[], None]) -> None:
        self.ends = ends
        self.remaining = size
        self.done = done
        self.rate = 0.0
        self.settled = 0.0
        self.version = 0


class Port:
    """One engine's connection: the flows over it share its bandwidth evenly."""

    __slots__ = ("bytes_per_second", "flows")

    def __init__(self, bytes_per_second: float) -> None:
        self.bytes_per_second = bytes_per_second
        self.flows: dict[Flow, None] = {}


class Network:
    """Moves flows. Each gets the smaller of its fair shares at its two ends."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.bytes_moved = 0.0

    def start(self, source: Port, target: Port, size: float, done: Callable[[], None]) -> Flow:
        """Send `size` bytes; `done` is called when they have arrived."""
        self.bytes_moved += size
        flow = Flow((source, target), size, done)
        flow.settled = self._clock.now
        source.flows[flow] = None
        target.flows[flow] = None
        self._share(source, target)
        return flow

    def extend(self, flow: Flow, size: float) -> None:
        """Add bytes to a flow that is still under way."""
        self.bytes_moved += size
        self._settle(flow)
        flow.remaining += size
        self._schedule(flow)

    def _share(self, source: Port, target: Port) -> None:
        flows = source.flows if source is target else {**source.flows, **target.flows}
        for flow in flows:
            rate = min(port.bytes_per_second / len(port.flows) for port in flow.ends)
            if rate != flow.rate:
                self._settle(flow)
                flow.rate = rate
                self._schedule(flow)

    def _settle(self, flow: Flow) -> None:
        now = self._clock.now
        flow.remaining = max(0.0, flow.remaining - flow.rate * (now - flow.settled))
        flow.settled = now

    def _schedule(self, flow: Flow) -> None:
        flow.version += 1
        version = flow.version
        when = self._clock.now + flow.remaining / flow.rate
        self._clock.at(when, lambda: self._arrived(flow, version))

    def _arrived(self, flow: Flow, version: int) -> None:
        if version != flow.version:
            return
        flow.version += 1
        source, target = flow.ends
        source.flows.pop(flow)
        target.flows.pop(flow, None)
        self._share(source, target)
        flow.done()
