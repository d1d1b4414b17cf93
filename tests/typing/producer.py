"""A prefill engine that offers layer by layer."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping

import numpy as np

import kvxfer


def make_cache(layers: int) -> kvxfer.Cache:
    shape = (64, 8, 16, 128)
    tensors = {
        f"layer.{i}": (np.zeros(shape, np.float16), np.zeros(shape, np.float16))
        for i in range(layers)
    }
    return kvxfer.Cache(tensors, axes="BHNC", model="llama")


def serve(config: kvxfer.Config, layers: int) -> Iterator[str]:
    with kvxfer.Agent("prefill-0", listen="127.0.0.1:0", config=config) as agent:
        cache: kvxfer.Cache = agent.register(make_cache(layers))
        offer: kvxfer.Offer = agent.offer(
            cache, blocks=[3, 9, 12], num_tokens=40, lease=30.0, consumers=2, ready=False
        )
        ticket: kvxfer.Ticket = offer.ticket
        yield json.dumps(ticket)
        for i in range(layers):
            offer.mark_ready(f"layer.{i}")
        offer.mark_ready(0)
        offer.mark_all_ready()
        try:
            status: kvxfer.Status = offer.wait(timeout=60.0)
        except TimeoutError:
            offer.release()
            status = offer.wait()
        assert status is kvxfer.Status.OK, offer.message
        released: bool = offer.released
        assert released
        agent.unregister(cache)


def offer_as_context(agent: kvxfer.Agent, cache: kvxfer.Cache, blocks: np.ndarray) -> str:
    with agent.offer(cache, blocks, num_tokens=16, id="request-1") as offer:
        return offer.id


def settings() -> Mapping[str, object]:
    config = kvxfer.Config(transport="tcp", secret="s3cret", arena_bytes=64 << 20)
    with kvxfer.Agent("prefill-1", config=config, tcp_streams=4) as agent:
        used: kvxfer.Config = agent.config
        name: str = agent.name
        incarnation: int = agent.incarnation
        return {"threads": used.threads, "name": name, "incarnation": incarnation}
