"""The two requests that one of a client becomes: to a prefill and to a decode engine."""

from __future__ import annotations

import asyncio
import enum
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import aiohttp

from .engines import Engine
from .metrics import Metrics
from .prompts import PARAMS, Call, Measure, decode_body, prefill_body
from .settings import Settings

MOST_READ = 16 << 20
"""Bytes up to which an answer of known length is read before any of it is passed on."""

MOST_ERROR = 64 << 10
_STREAM_ERROR = b'data: {"error"'
_STANDING = ("v", "fields", "lease", "agents")


class Kind(str, enum.Enum):
    """How a leg failed."""

    UNREACHABLE = "unreachable"
    """Nothing was sent."""

    LOST = "lost"
    TIMEOUT = "timeout"
    ERROR = "error"
    BUSY = "busy"
    REFUSED = "refused"
    """A 4xx: the client's mistake, not the engine's."""

    GARBAGE = "garbage"
    NO_PARAMS = "no_params"
    """A prefill engine that does not offer its KV."""

    @property
    def trips(self) -> bool:
        """Whether it speaks against the engine."""
        return self not in (Kind.BUSY, Kind.REFUSED)


class LegError(Exception):
    """An engine did not do what it was asked."""

    def __init__(
        self, kind: Kind, engine: Engine, message: str, status: int = 502, body: bytes = b""
    ) -> None:
        super().__init__(f"{engine.name}: {message}")
        self.kind, self.engine, self.status, self.body = kind, engine, status, body


@dataclass(slots=True)
class Grant:
    """What a prefill engine offers; it holds blocks until they are fetched."""

    prefill: Engine
    params: dict[str, Any]
    held: bool = True

    def release(self) -> None:
        """Note that the decode engine has fetched it, or nobody will."""
        if self.held:
            self.held = False
            self.prefill.inflight -= 1


class Answer:
    """A decode engine's answer with its first bytes. Who gets one closes it."""

    def __init__(
        self,
        call: Call,
        engine: Engine,
        response: aiohttp.ClientResponse,
        first: bytes,
        whole: bool,
    ) -> None:
        self.call, self.engine = call, engine
        self.response, self.first, self.whole = response, first, whole
        self.on_close: list[Callable[[], object]] = []
        self._open = True

    def close(self, complete: bool = False) -> None:
        """Hang up, which aborts the request where the engine still works on it."""
        if not self._open:
            return
        self._open = False
        if complete:
            self.response.release()
        else:
            self.response.close()
        self.engine.context_tokens -= self.call.tokens
        self.engine.inflight -= 1
        for call in self.on_close:
            call()


class Legs:
    """Sends requests to engines and keeps account of them."""

    def __init__(
        self,
        settings: Settings,
        metrics: Metrics,
        measure: Measure,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._settings, self._metrics, self._measure, self._now = settings, metrics, measure, now
        self._session: aiohttp.ClientSession | None = None

    @property
    def session(self) -> aiohttp.ClientSession:
        """The one pool of connections."""
        assert self._session is not None, "start() comes first"
        return self._session

    def start(self) -> None:
        """Open the pool of connections; needs a running loop."""
        settings = self._settings
        self._session = aiohttp.ClientSession(
            # Engines close idle connections after 5 s: one must not be reused just then.
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=3.0),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=settings.connect_timeout),
            headers={"Accept-Encoding": "identity", "Content-Type": "application/json"},
            auto_decompress=False,
            cookie_jar=aiohttp.DummyCookieJar(),
            read_bufsize=1 << 18,
        )

    async def stop(self) -> None:
        """Close all connections."""
        if self._session is not None:
            await self._session.close()

    async def prefill(
        self, call: Call, engine: Engine, uncached: int, transfer: str | None = None
    ) -> Grant:
        """Have a prompt computed by a prefill engine.

        Raises
        ------
        LegError
            It did not, or does not offer the KV.
        """
        params: dict[str, Any] = {"do_remote_decode": True, "do_remote_prefill": False}
        if transfer is not None:
            params["transfer_id"] = transfer
        began, done = self._now(), 0
        engine.breaker.begin()
        engine.inflight += 1
        engine.inflight_tokens += uncached
        engine.rate.begin(began)
        grant = None
        try:
            answer = await asyncio.wait_for(
                self._json(call, engine, prefill_body(call, params)),
                self._settings.prefill_timeout,
            )
            grant = Grant(engine, self._params(engine, answer))
            done = uncached
        except (LegError, aiohttp.ClientError, asyncio.TimeoutError, OSError, ValueError) as error:
            raise self._failed(engine, error) from error
        except BaseException:
            engine.breaker.abandoned()
            raise
        finally:
            now = self._now()
            engine.rate.end(now, done)
            engine.inflight_tokens -= uncached
            if grant is None:
                engine.inflight -= 1
        engine.breaker.succeeded()
        engine.index.add(call.hashes)
        self._metrics.prefill.observe(engine.name, value=now - began)
        self._learn(call, answer)
        return grant

    async def open(
        self, call: Call, engine: Engine, params: Mapping[str, Any] | None, uncached: int
    ) -> Answer:
        """Ask a decode engine; return its answer when the first bytes are there.

        `params` is what a prefill engine offers; without it, `uncached` tokens are prefilled here.

        Raises
        ------
        LegError
            It failed before anything of an answer came.
        """
        local = 0 if params is not None else uncached
        began, done = self._now(), 0
        engine.breaker.begin()
        engine.inflight += 1
        engine.context_tokens += call.tokens
        engine.inflight_tokens += local
        if local:
            engine.rate.begin(began)
        answer = None
        try:
            answer = await asyncio.wait_for(
                self._first(call, engine, decode_body(call, params)),
                self._settings.first_byte_timeout,
            )
            done = local if answer.response.status == 200 else 0
        except (LegError, aiohttp.ClientError, asyncio.TimeoutError, OSError, ValueError) as error:
            raise self._failed(engine, error) from error
        except BaseException:
            engine.breaker.abandoned()
            raise
        finally:
            engine.inflight_tokens -= local
            if local:
                engine.rate.end(self._now(), done)
            if answer is None:
                engine.context_tokens -= call.tokens
                engine.inflight -= 1
        engine.breaker.succeeded()
        if answer.response.status == 200:
            engine.index.add(call.hashes)
        return answer

    async def _json(self, call: Call, engine: Engine, body: bytes) -> Any:  # noqa: ANN401
        async with self.session.post(
            engine.at(call.path), data=body, headers=call.headers
        ) as response:
            if response.status != 200:
                raise await self._status(engine, response)
            return json.loads(await response.read())

    async def _first(self, call: Call, engine: Engine, body: bytes) -> Answer:
        response = await self.session.post(engine.at(call.path), data=body, headers=call.headers)
        try:
            if response.status >= 500 or response.status == 429:
                raise await self._status(engine, response)
            length = response.content_length
            if length is not None and length <= MOST_READ:
                return Answer(call, engine, response, await response.read(), whole=True)
            first = await response.content.readany()
            if not first and call.stream:
                raise LegError(Kind.GARBAGE, engine, "an empty answer")
            if first.startswith(_STREAM_ERROR) and not clients_fault(200, first[6:]):
                raise LegError(Kind.ERROR, engine, "the stream begins with an error", 500, first)
            return Answer(call, engine, response, first, whole=False)
        except BaseException:
            response.close()
            raise

    async def _status(self, engine: Engine, response: aiohttp.ClientResponse) -> LegError:
        body = await response.content.read(MOST_ERROR)
        status = response.status
        if status in (429, 503):
            kind = Kind.BUSY
        elif status < 500 or clients_fault(status, body):
            kind = Kind.REFUSED
        else:
            kind = Kind.ERROR
        return LegError(kind, engine, f"status {status}: {body[:200]!r}", status, body)

    def _failed(self, engine: Engine, error: Exception) -> LegError:
        if isinstance(error, LegError):
            failure = error
        elif isinstance(error, (asyncio.TimeoutError, TimeoutError)) and not isinstance(
            error, aiohttp.ClientError
        ):
            failure = LegError(Kind.TIMEOUT, engine, "no answer in time", 504)
        elif isinstance(error, (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError)):
            failure = LegError(Kind.UNREACHABLE, engine, repr(error))
        elif isinstance(error, ValueError):
            failure = LegError(Kind.GARBAGE, engine, repr(error))
        else:
            failure = LegError(Kind.LOST, engine, repr(error))
        if failure.kind.trips:
            engine.breaker.failed(self._now())
        else:
            engine.breaker.succeeded()
        if failure.kind in (Kind.UNREACHABLE, Kind.LOST):
            engine.standing = None  # it may come back as another
        self._metrics.failures.add(engine.name, failure.kind.value)
        return failure

    def _params(self, engine: Engine, answer: Any) -> dict[str, Any]:  # noqa: ANN401
        params = answer.get(PARAMS) if isinstance(answer, dict) else None
        if params is None:
            raise LegError(Kind.NO_PARAMS, engine, f"an answer without {PARAMS}")
        if not isinstance(params, dict) or not params.get("do_remote_prefill"):
            raise LegError(Kind.GARBAGE, engine, f"{PARAMS} that offer nothing: {params!r:.200}")
        engine.standing = standing(params)
        return params

    def _learn(self, call: Call, answer: Any) -> None:  # noqa: ANN401
        usage = answer.get("usage")
        tokens = usage.get("prompt_tokens") if isinstance(usage, dict) else None
        if isinstance(tokens, int):
            self._measure.learn(call, tokens)


def standing(params: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return of an offer what holds for later requests too, None if its engine serves serially."""
    ours = params.get("kvxfer")
    if not isinstance(ours, Mapping) or not ours.get("agents"):
        return None
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": params.get("remote_engine_id"),
        "kvxfer": {name: ours[name] for name in _STANDING if name in ours},
    }


def clients_fault(status: int, body: bytes) -> bool:
    """Whether an error is about the request, whatever its status says: some engines answer 500."""
    try:
        found = json.loads(body.split(b"\n", 1)[0] if status == 200 else body)
        error = found.get("error", found)
        code = error.get("code")
        kind = str(error.get("type"))
    except (ValueError, AttributeError):
        return False
    if isinstance(code, int) and 400 <= code < 500:
        return True
    return kind in ("BadRequestError", "NotFoundError", "invalid_request_error")
