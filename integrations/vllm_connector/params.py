"""kv_transfer_params: what the two engines tell each other through the proxy.

The keys of vLLM's NIXL connector, so that proxies need not know the difference, and one of ours,
``"kvxfer"``, with the tickets and what has to match.
"""

from __future__ import annotations

import array
import hashlib
import hmac
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

VERSION = 1
Params = dict[str, Any]


class ParamsError(ValueError):
    """kv_transfer_params that cannot be used; says why."""


@dataclass(frozen=True)
class Remote:
    """The prefill side of one request, as the decode side was told."""

    engine: str
    request: str
    num_tokens: int | None
    """Tokens on offer; None in the concurrent flow, where the prompt decides."""
    tickets: Mapping[str, Any]
    """By cache; without them `transfer` and `agents` say where to ask."""
    digest: str | None
    """Of the tokens on offer; None in the concurrent flow."""
    fields: Mapping[str, str]
    decode_tp_size: int
    lease: float
    """Seconds."""
    transfer: str | None
    agents: Mapping[str, Any]
    block_sizes: Mapping[str, int]
    """Tokens of a block there, by cache, where they are told."""

    @property
    def offer(self) -> str:
        """Names what is on offer, among all prefill engines."""
        return f"{self.engine}/{self.request}"


def prompt_digest(request: Any, num_tokens: int) -> str:  # noqa: ANN401 - vllm's Request
    """Identify what the first tokens' KV depends on: tokens, images, adapter."""
    tokens = array.array("q", request.prompt_token_ids[:num_tokens])
    state = hashlib.sha256(tokens.tobytes())
    for feature in getattr(request, "mm_features", None) or ():
        state.update(f"|{feature.identifier}@{feature.mm_position.offset}".encode())
    if request.lora_request is not None:
        state.update(f"|lora {request.lora_request.lora_name}".encode())
    return state.hexdigest()[:32]


def transfer_name(transfer: str, request: Any, num_tokens: int) -> str:  # noqa: ANN401 - a Request
    """Name a transfer for both sides alike, by what the proxy calls it and by the prompt.

    Prompts that share the proxy's name, as those of one API request do, get names of their own.
    """
    digest = prompt_digest(request, num_tokens)
    return hashlib.sha256(f"{digest}/{transfer}".encode(errors="backslashreplace")).hexdigest()[:32]


def transfer_generation(transfer: str, key: str, secret: str | None) -> bytes:
    """Return the generation of a transfer that the proxy has named, for both sides alike."""
    return hmac.digest((secret or "").encode(), f"{transfer}/{key}".encode(), "sha256")[:16]


def prefill_reply(
    *,
    engine: str,
    request: str,
    address: str,
    blocks: tuple[list[int], ...],
    num_tokens: int,
    tp_size: int,
    pp_size: int,
    ours: Mapping[str, Any],
) -> Params:
    """Return what the prefill side answers: NIXL's keys and ours."""
    host, _, port = address.rpartition(":")
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_block_ids": [list(group) for group in blocks],
        "remote_engine_id": engine,
        "remote_request_id": request,
        "remote_host": host,
        "remote_port": int(port) if port.isdecimal() else 0,
        "tp_size": tp_size,
        "dcp_size": 1,
        "pp_size": pp_size,
        "remote_num_tokens": num_tokens,
        "remote_blocks_expiry_time": None,
        "transfer_mode": "pull",
        "kvxfer": {"v": VERSION, **ours},
    }


def parse(params: Mapping[str, Any]) -> Remote:
    """Read what came with a request for the decode side.

    Raises
    ------
    ParamsError
        Nothing can be fetched with it.
    """
    ours = params.get("kvxfer")
    if not isinstance(ours, Mapping):
        raise ParamsError(
            "kv_transfer_params asks for a remote prefill, but has no 'kvxfer': the proxy must "
            "hand on what the prefill engine answered, and that must run KvxferConnector too"
        )
    if ours.get("v") != VERSION:
        raise ParamsError(
            f"kv_transfer_params is of version {ours.get('v')!r}, this engine reads {VERSION}: "
            "run the same kvxfer release on both sides"
        )
    try:
        transfer = params.get("transfer_id")
        tickets = dict(ours.get("tickets") or {})
        agents = dict(ours.get("agents") or {})
        sizes = dict(ours.get("block_sizes") or {})
        if not tickets and not (transfer and agents):
            raise ParamsError("kv_transfer_params has neither tickets nor transfer_id and agents")
        return Remote(
            engine=str(params.get("remote_engine_id")),
            request=str(params.get("remote_request_id") or transfer),
            num_tokens=_count("remote_num_tokens", params) if tickets else None,
            tickets=tickets,
            digest=str(ours["digest"]) if tickets else None,
            fields={str(name): str(value) for name, value in dict(ours["fields"]).items()},
            decode_tp_size=_count("decode_tp_size", {"decode_tp_size": 1, **ours}),
            lease=_lease(ours.get("lease", 30)),
            transfer=None if tickets else str(transfer),
            agents=agents,
            block_sizes={key: _count(key, sizes) for key in sizes},
        )
    except ParamsError:
        raise
    except (LookupError, TypeError, ValueError, OverflowError) as error:
        raise ParamsError(f"kv_transfer_params is malformed: {error!r}") from error


def _count(name: str, given: Mapping[str, Any]) -> int:
    count = int(given[name])
    if count < 1:
        raise ParamsError(f"kv_transfer_params has {name} {count}: it must be positive")
    return count


def _lease(given: Any) -> float:  # noqa: ANN401 - what JSON carries
    lease = float(given)
    if not (math.isfinite(lease) and lease > 0):
        raise ParamsError(f"kv_transfer_params has lease {lease}: it must be positive and finite")
    return lease
