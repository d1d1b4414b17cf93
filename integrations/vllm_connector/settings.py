"""The connector's options: what stands in ``kv_connector_extra_config``."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from kvxfer.codecs import Codec
from kvxfer.config import Config
from kvxfer.errors import ConfigError, InvalidError

_KINDS: dict[str, Any] = {
    "str": str,
    "str | None": (str, type(None)),
    "int": int,
    "float": (int, float),
    "bool": bool,
    "Mapping[str, Any]": Mapping,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """Options of one engine. Unknown ones are refused, with the list of those that exist."""

    codec: str = "auto"
    """Encoding on the wire, as in `kvxfer.Agent.fetch`; the decode side's counts."""
    host: str | None = None
    """Where the prefill side listens. Left out: loopback, or with a shared secret this host."""
    port: int = 0
    """The prefill side's first port, one more for each rank; 0 takes free ones."""
    lease: float = 30.0
    """Seconds that the prefill side keeps blocks without a word from the decode side."""
    load_timeout: float = 60.0
    """Seconds after which a load fails on the decode side."""
    concurrent: bool = True
    """Prefill side: where the proxy asks both sides at once, send while computing, not after."""
    same_vllm: bool = True
    """Refuse a peer that runs another vLLM version."""
    watchdog: float = 10.0
    """Seconds after which a waiting transfer gets a line in the log."""
    agent: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Knobs of `kvxfer.Config`, as ``{"transport": "tcp"}``."""

    @classmethod
    def of(cls, extra: Mapping[str, Any]) -> Settings:
        """Read the options; raises ConfigError where one is unknown or out of range."""
        known = {field.name for field in dataclasses.fields(cls)}
        if unknown := sorted(set(extra) - known):
            raise ConfigError(
                f"kv_connector_extra_config has {', '.join(unknown)}, which KvxferConnector does "
                f"not know; it knows {', '.join(sorted(known))}"
            )
        for field in dataclasses.fields(cls):
            kind, value = _KINDS[str(field.type)], extra.get(field.name, field.default)
            if value is dataclasses.MISSING:
                continue
            if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
                raise ConfigError(
                    f"kv_connector_extra_config: {field.name} is {value!r}: expected {field.type}"
                )
        settings = cls(**extra)
        for name in ("lease", "load_timeout", "watchdog"):
            if not 0 < getattr(settings, name) < math.inf:
                raise ConfigError(
                    f"kv_connector_extra_config: {name} is {getattr(settings, name)!r}: it must be "
                    "positive and finite"
                )
        knobs = {field.name for field in dataclasses.fields(Config)}
        if unknown := sorted(set(settings.agent) - knobs):
            raise ConfigError(
                f"kv_connector_extra_config: agent has {', '.join(map(str, unknown))}, which "
                f"kvxfer.Config does not know; it knows {', '.join(sorted(knobs))}"
            )
        try:
            Codec.parse(settings.codec)
        except InvalidError as error:
            raise ConfigError(f"kv_connector_extra_config: {error}") from error
        if not 0 <= settings.port < 1 << 16:
            raise ConfigError(f"kv_connector_extra_config: port is {settings.port}: no such port")
        return settings
