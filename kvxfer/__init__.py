"""kvxfer moves a request's KV cache from the engine that prefilled it to the one that decodes it.

The prefill side makes an `Agent`, registers its `Cache` and offers a request's blocks; the decode
side fetches them with the offer's ticket. See the README for a first example.
"""

from kvxfer import _core
from kvxfer.agent import Agent
from kvxfer.cache import Cache
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
from kvxfer.handles import Fetch, Offer, Report
from kvxfer.ticket import AgentRef, Ticket, issue_ticket
from kvxfer.transports import Transport, transports

__version__: str = _core.__version__

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
