"""A layer's K and V through a codec: fetched by one agent from another, as between two engines."""

from __future__ import annotations

import contextlib
from types import TracebackType

import numpy as np

from kvxfer._quality_run import Array, Coded, LayerKv
from kvxfer.agent import Agent
from kvxfer.cache import Cache

_SECONDS = 300.0  # for one layer: bounds how long a fault can last, never reached otherwise


class RoundTrip:
    """Two agents of this process, and fetches between them. Close it, or use it in ``with``.

    Parameters
    ----------
    dtype
        Of both sides' caches.
    """

    def __init__(self, dtype: str) -> None:
        self._dtype = dtype
        with contextlib.ExitStack() as stack:
            self._producer = stack.enter_context(
                Agent("quality-prefill", listen="loopback:", transport="loopback")
            )
            self._consumer = stack.enter_context(Agent("quality-decode", transport="loopback"))
            self._open = stack.pop_all()

    def __call__(self, codec: str, layer: LayerKv, prompt_tokens: int) -> Coded:
        """Send the K and V that a layer holds of a request of that many tokens."""
        names = tuple(layer.planes)
        sources = [np.ascontiguousarray(layer.planes[name])[None] for name in names]
        targets = [np.zeros_like(source) for source in sources]
        with contextlib.ExitStack() as stack:
            caches = []
            for agent, planes in ((self._producer, sources), (self._consumer, targets)):
                cache = Cache(
                    {"layer": tuple(planes)}, axes="BHNC", planes=names, dtype=self._dtype
                )
                agent.register(cache)
                stack.callback(agent.unregister, cache)
                caches.append(cache)
            offer = stack.enter_context(
                self._producer.offer(
                    caches[0],
                    [0],
                    prompt_tokens - layer.first_token,
                    first_token=layer.first_token,
                )
            )
            fetch = self._consumer.fetch(
                offer.ticket, caches[1], [0], first_slot=0, codec=codec, timeout=_SECONDS
            )
            fetch.wait()
            report = fetch.report
        planes_back: dict[str, Array] = {
            name: target[0] for name, target in zip(names, targets, strict=True)
        }
        return Coded(planes_back, report.bytes, report.wire_bytes, report.exceptions)

    def close(self) -> None:
        """Close both agents."""
        self._open.close()

    def __enter__(self) -> RoundTrip:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
