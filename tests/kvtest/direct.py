"""What the tests of the direct path share."""

from __future__ import annotations

from typing import Any

import pytest

import kvxfer
from kvtest import fake_verbs
from kvtest.agents import LONG, registered
from kvtest.caches import Geometry, Paged
from kvxfer import Status

SIDE = Geometry(layers=tuple("abcd"), content=64, num_blocks=32)
TOKENS = 32 * 16
BYTES = TOKENS * 4 * 4 * 2 * 64 * 2  # tokens, heads, layers, planes, content, of two bytes
# Many chunks through few slots.
BUSY: dict[str, Any] = {"arena_bytes": 32 << 10, "chunk_bytes": 8 << 10}
DIRECT: dict[str, Any] = {"path": "direct"}

needs_fake_adapters = pytest.mark.skipif(
    fake_verbs.real_devices() is not None, reason="needs the fake adapters, and there are real ones"
)


def fetched(
    prefill: kvxfer.Agent, decode: kvxfer.Agent, side: Geometry = SIDE, **options: Any
) -> kvxfer.Report:
    """Fetch once, compare, and return the report."""
    source, target = Paged(side, seed=1), Paged(side)
    with registered(prefill, source.cache), registered(decode, target.cache):
        blocks = range(side.num_blocks)
        offer = prefill.offer(source.cache, blocks, side.num_blocks * side.block_size)
        fetch = decode.fetch(offer.ticket, target.cache, blocks, timeout=LONG, **options)
        fetch.wait(LONG)
        assert target.same_as(source)
        assert offer.wait(LONG) is Status.OK
    return fetch.report


def ends(link: str) -> set[tuple[str, str]]:
    """Return the adapters at our and at the peer's end of the paths of a link."""
    paths = [path.split(" - ") for path in link.split(";")[1:] if " - " in path]
    return {(ours.strip().split(":")[0], theirs.split(":")[0]) for ours, theirs, *_ in paths}
