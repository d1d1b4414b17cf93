"""How many connections two agents have, and that what is not needed goes."""

from __future__ import annotations

import dataclasses
import threading

import pytest
from kvtest.agents import LONG, consumer, producer, until
from kvtest.caches import Geometry, Paged

import kvxfer

SIDE = Geometry(layers=("a",), num_blocks=4)


def fetch(decode: kvxfer.Agent, ticket: kvxfer.Ticket) -> tuple[kvxfer.Fetch, Paged]:
    target = Paged(SIDE)
    decode.register(target.cache)
    return decode.fetch(ticket, target.cache, [0, 1], timeout=LONG), target


@pytest.mark.parametrize("transport", ["loopback", "shm", "tcp"])
def test_two_dials_at_once_leave_one_connection(
    transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tickets with and without an incarnation, for which nobody is connected yet."""
    with (
        producer(transport, heartbeat_interval=0.02) as prefill,
        consumer(transport, heartbeat_interval=0.02) as decode,
    ):
        # Neither has connected before the other has begun to.
        together = threading.Barrier(2, timeout=LONG)
        connect = decode._peers._connect  # noqa: SLF001

        def connect_together(*args: object) -> None:
            together.wait()
            connect(*args)

        monkeypatch.setattr(decode._peers, "_connect", connect_together)  # noqa: SLF001
        known = prefill.reference()
        source = Paged(SIDE, seed=1)
        prefill.register(source.cache)
        running = []
        for index, reference in enumerate([known, dataclasses.replace(known, incarnation=None)]):
            ticket = kvxfer.issue_ticket(f"r{index}", [reference], num_tokens=32)
            prefill.offer(source.cache, [2, 3], ticket=ticket)
            running.append(fetch(decode, ticket))
        for one, _ in running:
            one.wait()
        until(lambda: decode.stats.peers == 1 and prefill.stats.peers == 1)
        # The one that is left works.
        again, _ = fetch(decode, prefill.offer(source.cache, [2, 3], 32).ticket)
        again.wait()
        assert (decode.stats.peers, prefill.stats.peers) == (1, 1)


def test_renewing_connects_to_nobody() -> None:
    with producer("tcp") as prefill, consumer("tcp") as decode:
        source = Paged(SIDE, seed=1)
        prefill.register(source.cache)
        offer = prefill.offer(source.cache, [2, 3], 32)
        threads = threading.active_count()
        decode.renew(offer.ticket)
        assert threading.active_count() == threads
        assert (decode.stats.peers, prefill.stats.peers) == (0, 0)


def test_busy_says_when_to_try_again() -> None:
    """More open fetches than a consumer may have: refused, and it works when there is room."""
    with producer("tcp", peer_bytes=1 << 16) as prefill, consumer("tcp") as decode:
        source = Paged(SIDE, seed=1)
        prefill.register(source.cache)
        later = kvxfer.issue_ticket("later", [prefill.reference()], num_tokens=32)
        target = Paged(SIDE)
        decode.register(target.cache)
        waiting = [decode.fetch(later, target.cache, [0, 1], timeout=LONG) for _ in range(300)]
        until(lambda: any(one.done for one in waiting))
        refused = next(one for one in waiting if one.done)
        with pytest.raises(kvxfer.TransferError, match="BUSY.*peer_bytes.*try again in") as caught:
            refused.wait()
        assert caught.value.status is kvxfer.Status.BUSY
        assert caught.value.retry_after is not None
        assert caught.value.retry_after > 0
        assert refused.report.retry_after == caught.value.retry_after
        assert prefill.stats.held_bytes <= 1 << 16
        for one in waiting:
            one.cancel()
        until(lambda: prefill.stats.serving == 0)
        again, target = fetch(decode, prefill.offer(source.cache, [0, 1], 32).ticket)
        again.wait()
        assert (target.view("a", "k")[:2] == source.view("a", "k")[:2]).all()
