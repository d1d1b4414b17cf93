"""What a gateway is told at its start."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from kvxfer.errors import InvalidError
from kvxfer.serving import Link, Policy, Slo
from kvxfer.serving.checks import at_least, positive


class Role(str, enum.Enum):
    """What an engine is for. One that decodes can prefill too, and does when nobody else can."""

    PREFILL = "prefill"
    DECODE = "decode"


class Flow(str, enum.Enum):
    """Whether the decode engine is asked after the prefill engine or at the same time."""

    SERIAL = "serial"
    CONCURRENT = "concurrent"


@dataclass(frozen=True, slots=True)
class Entry:
    """An engine as an operator names it."""

    url: str
    role: Role
    kv_events: str | None = None
    """ZMQ address on which it publishes what its prefix cache holds."""

    def __post_init__(self) -> None:
        try:
            parts = urlsplit(self.url)
            usable = parts.scheme in ("http", "https") and parts.hostname and (parts.port or 80) > 0
            usable = usable and self.url == f"{parts.scheme}://{parts.netloc}"
        except ValueError:
            usable = False
        if not usable or "@" in self.url:
            raise InvalidError(f"{self.url!r} is no engine; write http://HOST:PORT")
        if self.kv_events is not None and not self.kv_events.startswith(("tcp://", "ipc://")):
            raise InvalidError(f"kv_events is {self.kv_events!r}; write tcp://HOST:PORT")

    @classmethod
    def read(cls, value: Any) -> Entry:  # noqa: ANN401 - what JSON carries
        """Return the entry in a JSON object.

        Raises
        ------
        InvalidError
            It is none; the message says why.
        """
        if not isinstance(value, dict):
            raise InvalidError(f"{value!r:.80} is no engine; write an object with url and role")
        unknown = value.keys() - {"url", "role", "kv_events"}
        if unknown:
            raise InvalidError(f"{', '.join(sorted(unknown))}: not known of an engine")
        url, role, events = value.get("url"), value.get("role"), value.get("kv_events")
        if not isinstance(url, str) or role not in [one.value for one in Role]:
            raise InvalidError(f"{value!r:.120}: url is text, role 'prefill' or 'decode'")
        if not isinstance(events, str | None):
            raise InvalidError(f"kv_events is {events!r:.80}; write tcp://HOST:PORT")
        return cls(url.rstrip("/"), Role(role), events)


@dataclass(frozen=True, slots=True)
class Settings:
    """All that can be set. Durations are seconds."""

    engines: tuple[Entry, ...] = ()
    engines_file: str | None = None
    flow: Flow = Flow.SERIAL

    slo: Slo = Slo(ttft=2.0, tpot=0.05)
    policy: Policy = Policy()
    link: Link | None = None
    """None learns it from what the decode engines report."""

    prefill_rate: float | None = None
    """Tokens a second of one prefill engine; None learns it."""

    decode_rate: float | None = None
    """Tokens a second that a decode engine prefills; None learns it."""

    chunk_tokens: int = 2048
    """Tokens of prefill that a decode engine takes into one step (max_num_batched_tokens)."""

    max_inflight: int = 256
    """Requests at a time, for each decode engine that works."""

    max_queue: int = 512
    """Requests that may wait beyond that; the next is told to come back."""

    queue_timeout: float = 30.0
    max_body: int = 64 << 20  # bytes
    connect_timeout: float = 3.0
    prefill_timeout: float = 120.0
    first_byte_timeout: float = 300.0
    idle_timeout: float = 120.0
    """Between two pieces of an answer."""

    abort_grace: float = 0.5
    """How long a request whose client has left stays with a decode engine that is to fetch its KV:
    one that has not reached its scheduler yet would not free the prefill engine's blocks."""

    watch_interval: float = 1.0
    """Between two looks at an engine's health and metrics."""

    health_timeout: float = 3.0
    breaker_failures: int = 3
    breaker_cooldown: float = 5.0
    canary_interval: float = 300.0
    """Between two proofs that a pair of engines moves KV; 0 turns them off."""

    register_ttl: float = 15.0
    """How long an engine that registered itself is kept without a heartbeat."""

    drain_timeout: float = 600.0
    block_tokens: int = 16
    prefix_tokens: int = 2_000_000
    """Most tokens that are remembered as cached, for each engine."""

    tokenize: bool = False
    """Ask a decode engine for a prompt's tokens instead of estimating them."""

    api_keys: frozenset[str] = frozenset()
    """Keys of clients; without any, what a client sends is passed to the engines."""

    engine_key: str | None = None
    """Key that the engines want, in place of the client's."""

    admin_key: str | None = None
    """Key of /admin; without one it is closed."""

    def __post_init__(self) -> None:
        for name in ("max_inflight", "breaker_failures", "block_tokens", "chunk_tokens"):
            at_least(name, getattr(self, name), 1)
        for name in ("max_queue", "abort_grace", "canary_interval", "max_body"):
            at_least(name, getattr(self, name))
        for name in (
            "queue_timeout",
            "connect_timeout",
            "prefill_timeout",
            "first_byte_timeout",
            "idle_timeout",
            "watch_interval",
            "health_timeout",
            "breaker_cooldown",
            "register_ttl",
            "drain_timeout",
            "prefix_tokens",
        ):
            positive(name, getattr(self, name))
        for name in ("prefill_rate", "decode_rate"):
            if getattr(self, name) is not None:
                positive(name, getattr(self, name))
