"""kvxfer moves a request's KV cache from the engine that prefilled it to the one that decodes it.

The prefill side makes an `Agent`, registers its `Cache` and offers a request's blocks; the decode
side fetches them with the offer's ticket. See the README for a first example.

Importing this package loads no native code: what needs it is imported when it is first asked for.
"""

from importlib import import_module
from typing import TYPE_CHECKING

# These two before anything else imports them: the functions have the names of their modules.
from kvxfer.codecs import Codec, CodecInfo, CodecRates, codec_rates, codecs, tiered
from kvxfer.config import Config
from kvxfer.cover import Ranks
from kvxfer.errors import (
    ClosedError,
    ConfigError,
    Error,
    HandshakeError,
    InvalidError,
    LayoutError,
    ResourceError,
    Status,
    TicketError,
    TransferError,
)
from kvxfer.ticket import AgentRef, Ticket, issue_ticket
from kvxfer.transports import Transport, transports

if TYPE_CHECKING:
    from kvxfer._core import __version__
    from kvxfer.agent import Agent
    from kvxfer.cache import Cache
    from kvxfer.handles import Fetch, Offer, Report

_LATER = {
    "Agent": "kvxfer.agent",
    "Cache": "kvxfer.cache",
    "Fetch": "kvxfer.handles",
    "Offer": "kvxfer.handles",
    "Report": "kvxfer.handles",
    "__version__": "kvxfer._core",
}

__all__ = [
    "Agent",
    "AgentRef",
    "Cache",
    "ClosedError",
    "Codec",
    "CodecInfo",
    "CodecRates",
    "Config",
    "ConfigError",
    "Error",
    "Fetch",
    "HandshakeError",
    "InvalidError",
    "LayoutError",
    "Offer",
    "Ranks",
    "Report",
    "ResourceError",
    "Status",
    "Ticket",
    "TicketError",
    "TransferError",
    "Transport",
    "__version__",
    "codec_rates",
    "codecs",
    "issue_ticket",
    "tiered",
    "transports",
]


if not TYPE_CHECKING:  # for whom any name would be there

    def __getattr__(name: str) -> object:
        if name not in _LATER:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(import_module(_LATER[name]), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
