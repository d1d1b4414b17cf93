"""A request's way through the engines up to the first byte of its answer: flows and retries.

A prefill that fails is tried on one other engine, then the decode engine prefills. A decode engine
that fails before the first byte is replaced once. After the first byte nothing is repeated.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Callable, Coroutine
from typing import Any

from .admission import RefusedError
from .engines import Engine
from .legs import Answer, Grant, Kind, LegError, Legs
from .metrics import Metrics
from .prompts import Call
from .routing import Route, Routing
from .settings import Flow, Settings

logger = logging.getLogger("kvxfer.gateway")


class Exchange:
    """Gets answers from engines."""

    def __init__(
        self,
        settings: Settings,
        routing: Routing,
        legs: Legs,
        metrics: Metrics,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._settings, self._routing, self._legs = settings, routing, legs
        self._metrics, self._now = metrics, now
        self._tasks: set[asyncio.Task[Any]] = set()
        self.on_remote: list[Callable[[Engine], None]] = []
        """Called with each decode engine that was to fetch KV and has begun its answer."""

    async def stop(self) -> None:
        """End what still runs for clients that have left."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def answer(self, call: Call) -> tuple[Answer, Route]:
        """Return the answer of the engines that `decide` and their failures leave.

        Raises
        ------
        RefusedError
            No decode engine can take it.
        LegError
            Both decode engines that were asked failed.
        """
        route = self._routing.route(call)
        if route is None:
            raise RefusedError(503, "no_engine", "no decode engine can take a request now", 2)
        self._metrics.decisions.add(route.place.value, route.reason.value)
        logger.debug(
            "%s: %s (%s), %d of %d tokens uncached",
            call.headers.get("X-Request-Id"),
            route.place.value,
            route.reason.value,
            route.uncached,
            call.tokens,
        )
        return await self.follow(call, route), route

    async def follow(self, call: Call, route: Route) -> Answer:
        """Return the answer by way of the engines of `route`."""
        if route.prefill is None:
            return await self._decode(call, route, None)
        tried: list[Engine] = []
        if self._settings.flow is Flow.CONCURRENT and route.prefill.standing is not None:
            answer = await self._both(call, route, route.prefill, route.prefill.standing)
            if answer is not None:
                return answer
            tried.append(route.prefill)
        # It is spoken for, so that others who come meanwhile find it fuller.
        route.decode.context_tokens += call.tokens
        try:
            grant = await self._prefill(call, route, tried)
        finally:
            route.decode.context_tokens -= call.tokens
        return await self._decode(call, route, grant)

    async def _prefill(self, call: Call, route: Route, tried: list[Engine]) -> Grant | None:
        """Return what a prefill engine offers; None when two have failed, or there is no other."""
        engine = route.prefill if not tried else None
        reason = "failed"
        while len(tried) < 2:
            if engine is None:
                engine = self._routing.pick_prefill(call, route.decode, tried)
                if engine is None:
                    break
                if tried:
                    self._metrics.retries.add(engine.role.value, reason)
            try:
                return await self._legs.prefill(call, engine, route.prefill_uncached)
            except LegError as error:
                logger.warning("prefill: %s", error)
                reason = error.kind.value
                if error.kind is Kind.REFUSED:
                    break  # another would say the same; the decode engine tells the client
            tried.append(engine)
            engine = None
        self._fell_back(call, reason)
        return None

    async def _decode(self, call: Call, route: Route, grant: Grant | None) -> Answer:
        try:
            try:
                return await self._open(call, route.decode, grant, route.uncached)
            except LegError as error:
                first = error
            if first.kind is Kind.REFUSED:
                raise first
            other = self._routing.pick_decode(call, exclude=(route.decode,))
            if other is None and grant is not None and first.kind is not Kind.UNREACHABLE:
                other = route.decode  # without what it may have failed at
            if other is None:
                raise first
            logger.warning("decode: %s; now %s", first, other.name)
            self._metrics.retries.add(other.role.value, first.kind.value)
            if grant is not None and not (
                first.kind is Kind.UNREACHABLE and self._routing.pairs(grant.prefill, other)
            ):
                # Whether it was fetched nobody knows; an offer is good for one fetch.
                self._fell_back(call, f"decode_{first.kind.value}")
                grant.release()
                grant = None
            return await self._open(call, other, grant, call.tokens)
        finally:
            if grant is not None:
                grant.release()

    async def _open(self, call: Call, engine: Engine, grant: Grant | None, uncached: int) -> Answer:
        if grant is None:
            return await self._legs.open(call, engine, None, uncached)
        answer = await self._stay(self._legs.open(call, engine, grant.params, uncached))
        for tell in self.on_remote:
            tell(engine)
        return answer

    async def _both(
        self, call: Call, route: Route, prefill: Engine, known: dict[str, Any]
    ) -> Answer | None:
        """Ask both engines at once; return None when the prefill failed before an answer came."""
        transfer = uuid.uuid4().hex
        params = {**known, "transfer_id": transfer}
        side = asyncio.create_task(
            self._legs.prefill(call, prefill, route.prefill_uncached, transfer)
        )
        self._keep(side)
        opening = asyncio.create_task(self._legs.open(call, route.decode, params, route.uncached))
        began = self._now()
        prefill.inflight += 1  # until its KV is fetched, which may be after it has answered
        try:
            await asyncio.wait({opening, side}, return_when=asyncio.FIRST_COMPLETED)
            if not opening.done() and (failure := side.exception()) is not None:
                logger.warning("prefill: %s", failure)
                await self._cancel(opening)  # it waits for what will not come
                if isinstance(failure, LegError) and failure.kind is Kind.REFUSED:
                    self._fell_back(call, failure.kind.value)
                    return await self._decode(call, route, None)
                return None
            answer = await asyncio.shield(opening)
        except LegError as error:
            side.cancel()
            return await self._after(call, route, error)
        except asyncio.CancelledError:
            side.cancel()
            self._keep(asyncio.create_task(self._let_go(opening, began)))
            raise
        finally:
            prefill.inflight -= 1
        answer.on_close.append(side.cancel)
        for tell in self.on_remote:
            tell(route.decode)
        return answer

    async def _after(self, call: Call, route: Route, error: LegError) -> Answer:
        """Return the answer after a decode engine failed in the concurrent flow."""
        if error.kind is Kind.REFUSED:
            raise error
        other = self._routing.pick_decode(call, exclude=(route.decode,))
        if other is None:
            if error.kind is Kind.UNREACHABLE:
                raise error
            other = route.decode
        logger.warning("decode: %s; now %s", error, other.name)
        self._metrics.retries.add(other.role.value, error.kind.value)
        self._fell_back(call, f"decode_{error.kind.value}")
        return await self._legs.open(call, other, None, call.tokens)

    async def _stay(self, opening: Coroutine[Any, Any, Answer]) -> Answer:
        """Wait for an answer; if the client leaves, stay until the engine must know the request.

        The engine then tells the prefill side that its blocks are not needed. Had it never got as
        far, they would be held until their lease ends.
        """
        task, began = asyncio.create_task(opening), self._now()
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            self._keep(asyncio.create_task(self._let_go(task, began)))
            raise

    async def _let_go(self, task: asyncio.Task[Answer], began: float) -> None:
        left = self._settings.abort_grace - (self._now() - began)
        if left > 0:
            await asyncio.wait({task}, timeout=left)
        await self._cancel(task)

    async def _cancel(self, task: asyncio.Task[Answer]) -> None:
        task.cancel()
        await asyncio.wait({task})
        if not task.cancelled() and task.exception() is None:
            task.result().close()

    def _keep(self, task: asyncio.Task[Any]) -> None:
        """Hold a task that nobody waits for: the loop itself keeps none alive."""
        self._tasks.add(task)
        task.add_done_callback(self._forget)

    def _forget(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            if not isinstance(error, LegError):
                logger.error("unexpected", exc_info=error)
        elif not task.cancelled() and isinstance(grant := task.result(), Grant):
            grant.release()

    def _fell_back(self, call: Call, reason: str) -> None:
        self._metrics.fallbacks.add(reason)
        logger.warning(
            "%s: the decode engine prefills %d tokens (%s)",
            call.headers.get("X-Request-Id"),
            call.tokens,
            reason,
        )
