"""The parts of a gateway, put together; `app.py` gives them an address."""

from __future__ import annotations

from .admission import Admission
from .canary import Canaries
from .discovery import WatchedFile
from .exchange import Exchange
from .kv_events import KvEvents
from .legs import Legs
from .metrics import Metrics
from .monitor import Monitor
from .pool import Pool
from .prewarm import Prewarmer
from .prompts import Measure
from .relay import Relay
from .routing import Routing
from .settings import Role, Settings


class Gateway:
    """Everything between a client's request and the engines."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.metrics = Metrics()
        self.measure = Measure(settings.block_tokens)
        self.pool = Pool(settings)
        self.routing = Routing(settings, self.pool)
        self.legs = Legs(settings, self.metrics, self.measure)
        self.monitor = Monitor(
            settings, self.pool, self.legs, self.routing.link_meter, self.metrics
        )
        self.exchange = Exchange(settings, self.routing, self.legs, self.metrics)
        self.exchange.on_remote.append(self.monitor.remote)
        self.admission = Admission(self.capacity, settings.max_queue, settings.queue_timeout)
        self.monitor.on_up.append(lambda _: self.admission.wake())
        self.relay = Relay(settings, self.metrics)
        self.canaries = Canaries(
            settings, self.pool, self.legs, self.monitor, self.measure, self.metrics
        )
        self.prewarmer = Prewarmer(
            settings, self.pool, self.routing, self.exchange, self.measure, self.metrics
        )
        self._events = KvEvents(self.pool)
        self._file: WatchedFile | None = None

    def capacity(self) -> int:
        """Return how many requests may be served at a time."""
        return self.settings.max_inflight * len(self.pool.usable(Role.DECODE, None))

    async def start(self) -> None:
        """Connect to the engines and look at each of them once.

        Raises
        ------
        InvalidError
            The engines' file can't be read, or an engine is named twice.
        """
        self.legs.start()
        for entry in self.settings.engines:
            self.pool.add(entry, "options")
        if self.settings.engines_file is not None:
            self._file = WatchedFile(
                self.settings.engines_file, self.pool, self.settings.watch_interval
            )
            self._file.start()
        self._events.start()
        await self.monitor.start()
        self.canaries.start()

    async def stop(self) -> None:
        """End everything."""
        if self._file is not None:
            await self._file.stop()
        for part in (self.prewarmer, self.canaries, self._events, self.monitor, self.exchange):
            await part.stop()
        await self.pool.close()
        await self.legs.stop()

    def exposition(self) -> str:
        """Return all metrics as text."""
        metrics = self.metrics
        metrics.inside.set(to=self.admission.inside)
        metrics.waiting.set(to=self.admission.waiting)
        for gauge in metrics.engines:
            gauge.clear()
        for engine in self.pool:
            labels = (engine.name, engine.role.value)
            metrics.engine_up.set(*labels, to=float(bool(engine.healthy)))
            metrics.engine_open.set(*labels, to=float(engine.breaker.open))
            metrics.engine_inflight.set(*labels, to=engine.inflight)
            metrics.engine_tokens.set(*labels, to=engine.inflight_tokens)
            metrics.engine_load.set(*labels, to=engine.load)
            metrics.engine_blocks.set(*labels, to=len(engine.index))
            if engine.rate.rate is not None:
                metrics.engine_rate.set(*labels, to=engine.rate.rate)
        return metrics.registry.render()
