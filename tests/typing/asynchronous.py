"""Fetches and offers in an asyncio program."""

from __future__ import annotations

import asyncio

import kvxfer


async def fetch_all(
    agent: kvxfer.Agent, cache: kvxfer.Cache, tickets: dict[str, tuple[kvxfer.Ticket, list[int]]]
) -> dict[str, kvxfer.Report]:
    running: dict[str, kvxfer.Fetch] = {
        name: agent.fetch(ticket, cache, blocks) for name, (ticket, blocks) in tickets.items()
    }

    async def finish(fetch: kvxfer.Fetch) -> kvxfer.Report:
        await fetch
        return fetch.report

    reports = await asyncio.gather(*(finish(fetch) for fetch in running.values()))
    return dict(zip(running, reports, strict=True))


async def until_released(offer: kvxfer.Offer) -> bool:
    status: kvxfer.Status = await offer
    return status is kvxfer.Status.OK
