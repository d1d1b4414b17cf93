"""A decode engine that fetches and handles what can go wrong."""

from __future__ import annotations

import json
from typing import Any

import kvxfer


def fetch(text: str, tensors: dict[str, tuple[object, object]], blocks: list[int]) -> float:
    ticket: dict[str, Any] = json.loads(text)
    with kvxfer.Agent("decode-0") as agent:
        cache = agent.register(kvxfer.Cache(tensors, axes="BNHC"))
        handle: kvxfer.Fetch = agent.fetch(
            ticket, cache, blocks, tokens=slice(512, None), first_slot=0, timeout=10.0
        )
        handle.wait()
        report: kvxfer.Report = handle.report
        assert report.path == "staged"
        codec: kvxfer.Codec = kvxfer.tiered(recent=1000, sinks=4, codec="int8")
        agent.fetch(ticket, cache, blocks, codec=codec).wait()
        agent.fetch(ticket, cache, blocks, codec="auto").wait()
        return report.bytes / report.seconds + report.gbps


def outcome(agent: kvxfer.Agent, ticket: kvxfer.Ticket, cache: kvxfer.Cache) -> str:
    try:
        handle = agent.fetch(ticket, cache, range(4))
        handle.wait(timeout=1.0)
    except kvxfer.TransferError as error:
        if error.status in (kvxfer.Status.STALE, kvxfer.Status.EXPIRED):
            return "prefill again"
        return f"{error.status.value}: {error}"
    except kvxfer.TicketError as error:
        return str(error)
    except kvxfer.Error as error:
        return f"kvxfer: {error}"
    except TimeoutError:
        handle.cancel()
    failure: kvxfer.TransferError | None = handle.error
    status: kvxfer.Status | None = handle.status
    if failure is not None:
        raise failure
    return "running" if status is None else status.name


def shared(agent: kvxfer.Agent, ticket: kvxfer.Ticket, cache: kvxfer.Cache, rank: int) -> None:
    ranks = kvxfer.Ranks(own=rank, heads=[(0, 4), (4, 8)], layers=[("a",), ("a",)])
    fetch = agent.fetch(ticket, cache, range(4), ranks=ranks)
    fetch.cancel(done=True)
    declined: kvxfer.Fetch = agent.decline(ticket, cache, ranks=ranks, timeout=5.0)
    declined.wait()
    rates: kvxfer.CodecRates = kvxfer.codec_rates()
    print(rates.encode / rates.pack, kvxfer.__version__.upper())


def known() -> dict[str, str]:
    found: dict[str, kvxfer.CodecInfo] = kvxfer.codecs()
    return {name: codec.about for name, codec in found.items()}


def available() -> list[str]:
    found: dict[str, kvxfer.Transport] = kvxfer.transports()
    return [name for name, transport in found.items() if transport.available]
