"""An engine's answer on its way to the client, as the bytes that it is."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

import aiohttp
from aiohttp import web

from .legs import Answer, Kind
from .metrics import Metrics
from .routing import Route
from .settings import Settings

logger = logging.getLogger("kvxfer.gateway")


class Watchdog:
    """Calls `bark` when `last` has been left alone for too long. One timer, however many pieces."""

    def __init__(self, limit: float, bark: Callable[[], None]) -> None:
        self._limit, self._bark = limit, bark
        self._loop = asyncio.get_running_loop()
        self.last = self._loop.time()
        self._timer = self._loop.call_later(limit, self._look)

    def stop(self) -> None:
        """Bark no more."""
        self._timer.cancel()

    def _look(self) -> None:
        left = self.last + self._limit - self._loop.time()
        if left <= 0:
            self._bark()
        else:
            self._timer = self._loop.call_later(left, self._look)


class Relay:
    """Passes answers on and measures them."""

    def __init__(
        self, settings: Settings, metrics: Metrics, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._settings, self._metrics, self._now = settings, metrics, now

    async def send(
        self, request: web.Request, answer: Answer, route: Route, arrived: float
    ) -> web.StreamResponse:
        """Pass an answer on to its end; closes it. `arrived` is when the request came."""
        place = route.place.value
        metrics, status = self._metrics, answer.response.status
        headers = {
            "Content-Type": answer.response.headers.get("Content-Type", "application/json"),
            "X-Request-Id": answer.call.headers["X-Request-Id"],
            "X-Kvxfer-Place": place,
            "X-Kvxfer-Reason": route.reason.value,
        }
        if status == 200:
            metrics.prompt_tokens.add(place, by=answer.call.tokens)
            metrics.uncached_tokens.add(place, by=route.uncached)
        if answer.whole:
            answer.close(complete=True)
            metrics.seconds.observe(place, value=self._now() - arrived)
            return web.Response(status=status, headers=headers, body=answer.first)
        response = web.StreamResponse(status=status, headers=headers)
        complete = False
        try:
            complete = await self._stream(request, response, answer, place, arrived)
        except (ConnectionResetError, aiohttp.ClientConnectionResetError):
            metrics.left.add("streaming")
        finally:
            answer.close(complete)
        return response

    async def _stream(
        self,
        request: web.Request,
        response: web.StreamResponse,
        answer: Answer,
        place: str,
        arrived: float,
    ) -> bool:
        """Return whether all of it was passed on."""
        content, now = answer.response.content, self._now
        gaps = answer.engine.gaps.recent
        writing = True

        def give_up() -> None:
            if not writing:
                answer.response.close()
            elif request.transport is not None:  # the client has stopped to read
                request.transport.abort()

        watchdog = Watchdog(self._settings.idle_timeout, give_up)
        first = last = now()
        pieces, piece = 0, answer.first
        try:
            await response.prepare(request)
            while piece:
                await response.write(piece)
                writing, wrote = False, now()
                pieces += piece.count(b"\n\n")
                try:
                    piece = await content.readany()
                except (aiohttp.ClientError, asyncio.TimeoutError) as error:
                    self._cut(request, answer, error)
                    return False
                at, writing = now(), True
                if piece and wrote - last < at - wrote:  # else it was the client that was slow
                    gaps.append(at - last)
                watchdog.last = last = at
            await response.write_eof()
        finally:
            watchdog.stop()
        if answer.response.status == 200 and answer.call.stream:
            self._measured(place, arrived, first, last, pieces)
        return True

    def _cut(self, request: web.Request, answer: Answer, error: Exception) -> None:
        """End a client's answer so that it can't be taken for complete: nothing is repeated."""
        logger.error("%s: lost in the middle of an answer: %r", answer.engine.name, error)
        answer.engine.breaker.failed(self._now())
        self._metrics.failures.add(answer.engine.name, f"stream_{Kind.LOST.value}")
        if request.transport is not None:
            request.transport.abort()

    def _measured(self, place: str, arrived: float, first: float, last: float, pieces: int) -> None:
        metrics, slo = self._metrics, self._settings.slo
        ttft, tokens = first - arrived, max(1, pieces - 1)  # the last piece is [DONE]
        tpot = (last - first) / max(1, tokens - 1)
        metrics.ttft.observe(place, value=ttft)
        metrics.tpot.observe(place, value=tpot)
        metrics.seconds.observe(place, value=last - arrived)
        metrics.output_tokens.add(place, by=tokens)
        met = ttft <= slo.ttft and tpot <= slo.tpot
        metrics.promises.add("yes" if met else "no")
