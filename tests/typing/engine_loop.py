"""An engine with a loop of its own: one descriptor, and callbacks in the loop's thread."""

from __future__ import annotations

import select

import kvxfer


class Loop:
    def __init__(self, agent: kvxfer.Agent) -> None:
        self.agent = agent
        self.poller = select.poll()
        self.poller.register(agent.fileno(), select.POLLIN)
        self.failed: list[kvxfer.TransferError] = []
        self.free: list[str] = []

    def start(self, ticket: kvxfer.Ticket, cache: kvxfer.Cache) -> kvxfer.Fetch:
        fetch = self.agent.fetch(ticket, cache, (1, 2, 3))
        fetch.add_done_callback(self.on_done)
        return fetch

    def share(self, cache: kvxfer.Cache) -> kvxfer.Offer:
        offer = self.agent.offer(cache, [1, 2, 3], 40)
        offer.add_released_callback(lambda ended: self.free.append(ended.id))
        return offer

    def on_done(self, fetch: kvxfer.Fetch) -> None:
        if fetch.error is not None:
            self.failed.append(fetch.error)

    def turn(self) -> int:
        if not self.poller.poll(100):
            return 0
        ended: list[kvxfer.Fetch | kvxfer.Offer] = self.agent.poll()
        done = sum(isinstance(handle, kvxfer.Fetch) and handle.done for handle in ended)
        return done + self.agent.stats.fetches


def descriptors(fetch: kvxfer.Fetch, offer: kvxfer.Offer) -> list[int]:
    return [fetch.fileno(), offer.fileno()]
