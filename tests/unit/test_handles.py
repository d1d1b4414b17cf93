"""Fetches and offers as their owners hold them: waits, descriptors, callbacks, reports."""

from __future__ import annotations

import gc
import select
import threading

import pytest
from kvtest.agents import LONG, pair
from kvtest.caches import Geometry, Paged

import kvxfer

SIDE = Geometry(layers=("a", "b"), num_blocks=4)


@pytest.fixture
def sides():
    with pair("loopback") as (prefill, decode):
        source, target = Paged(SIDE, 1), Paged(SIDE)
        prefill.register(source.cache)
        decode.register(target.cache)
        yield prefill, decode, source, target


def readable(source: object, timeout: float) -> bool:
    return bool(select.select([source], [], [], timeout)[0])


def test_report_and_stats(sides) -> None:
    prefill, decode, source, target = sides
    offer = prefill.offer(source.cache, range(4), 64)
    assert prefill.stats.offers == 1
    fetch = decode.fetch(offer.ticket, target.cache, range(4))
    fetch.wait(LONG)
    report = fetch.report
    assert report.bytes == 2 * 2 * 64 * 4 * SIDE.content * 2
    assert 0 < report.seconds < LONG
    assert report.gbps == pytest.approx(report.bytes / report.seconds / 1e9)
    assert (report.path, report.transport, report.peers) == ("staged", "loopback", ("prefill",))
    assert sorted(report.wire_order) == sorted("LPTHN")
    assert report.chunks >= 1
    assert report.why
    assert report.link
    # It does not change after the end.
    assert fetch.report == report
    assert offer.wait(LONG) is kvxfer.Status.OK
    assert decode.stats.bytes_received == prefill.stats.bytes_sent == report.bytes
    for stats in (prefill.stats, decode.stats):
        assert (stats.offers, stats.serving, stats.fetches, stats.peers) == (0, 0, 0, 1)
        assert (stats.digest_errors, stats.quarantined_slots) == (0, 0)
    assert decode.stats.slots == decode.stats.free_slots == decode.config.arena_bytes >> 16


def test_states_of_a_fetch(sides) -> None:
    prefill, decode, source, target = sides
    offer = prefill.offer(source.cache, range(4), 64, ready=False)
    fetch = decode.fetch(offer.ticket, target.cache, range(4))
    assert (fetch.done, fetch.status, fetch.error) == (False, None, None)
    assert repr(fetch) == "<kvxfer.Fetch running>"
    with pytest.raises(TimeoutError, match="it goes on"):
        fetch.wait(0.01)
    offer.mark_all_ready()
    fetch.wait()
    assert (fetch.done, fetch.status, fetch.error) == (True, kvxfer.Status.OK, None)
    assert repr(fetch) == "<kvxfer.Fetch OK>"
    fetch.cancel()  # too late, and no harm
    fetch.wait()


def test_states_of_an_offer(sides) -> None:
    prefill, _, source, _ = sides
    offer = prefill.offer(source.cache, range(4), 64, id="request-7")
    assert (offer.id, offer.released, offer.status) == ("request-7", False, None)
    assert repr(offer) == "<kvxfer.Offer 'request-7' open>"
    with pytest.raises(TimeoutError, match="'request-7'"):
        offer.wait(0.01)
    offer.release()
    offer.release()
    assert offer.wait() is kvxfer.Status.CANCELLED
    assert "released by its owner" in offer.message
    assert repr(offer) == "<kvxfer.Offer 'request-7' CANCELLED>"


def test_an_offer_as_context_manager_ends_with_its_block(sides) -> None:
    prefill, decode, source, target = sides
    with prefill.offer(source.cache, range(4), 64, ready=False) as offer:
        fetch = decode.fetch(offer.ticket, target.cache, range(4))
        fetch._wait(0.05)
    assert offer.released
    with pytest.raises(kvxfer.TransferError, match="released by its owner") as caught:
        fetch.wait(LONG)
    assert caught.value.status is kvxfer.Status.CANCELLED
    assert target.poisoned


def test_descriptors_become_readable_at_the_end(sides) -> None:
    prefill, decode, source, target = sides
    offer = prefill.offer(source.cache, range(4), 64, ready=False)
    fetch = decode.fetch(offer.ticket, target.cache, range(4))
    assert fetch.fileno() == fetch.fileno()
    assert not readable(fetch, 0)
    assert not readable(offer, 0)
    offer.mark_all_ready()
    assert readable(fetch, LONG)
    assert readable(offer, LONG)
    assert fetch.done
    assert offer.released
    # Also when it is asked for after the end.
    late = decode.fetch(offer.ticket, target.cache, range(4))
    with pytest.raises(kvxfer.TransferError):
        late.wait(LONG)
    assert readable(late, 0)


def test_poll_and_callbacks(sides) -> None:
    prefill, decode, source, target = sides
    called: list[object] = []
    decode.fileno()
    prefill.fileno()
    assert decode.poll() == []
    offer = prefill.offer(source.cache, range(4), 64)
    offer.add_released_callback(called.append)
    fetch = decode.fetch(offer.ticket, target.cache, range(4))
    fetch.add_done_callback(called.append)
    assert readable(decode, LONG)
    assert called == []  # only poll calls back
    assert decode.poll() == [fetch]
    assert called == [fetch]
    assert readable(prefill, LONG)
    assert prefill.poll() == [offer]
    assert called == [fetch, offer]
    assert decode.poll() == prefill.poll() == []
    assert not readable(decode, 0)
    assert called == [fetch, offer]


def test_poll_finds_a_fetch_that_ends_before_its_handle_is_there(sides) -> None:
    prefill, decode, source, target = sides
    polled: list[object] = []
    poller = threading.Thread(target=lambda: polled.extend(decode.poll()))

    class Core:
        """The core, on which fetches have ended, and been polled for, when they have begun."""

        def __getattr__(self, name: str) -> object:
            return getattr(core, name)

        def fetch(self, **spec: object) -> object:
            started = core.fetch(**spec)
            started.wait(LONG)
            poller.start()
            poller.join(0.2)
            return started

    decode.fileno()
    core, decode._core = decode._core, Core()
    try:
        with prefill.offer(source.cache, range(4), 64) as offer:
            fetch = decode.fetch(offer.ticket, target.cache, range(4))
    finally:
        decode._core = core
    poller.join(LONG)
    assert polled == [fetch]


def test_a_callback_needs_neither_fileno_nor_a_reference(sides) -> None:
    """The engine keeps nothing but the callback, and asks for the descriptor late."""
    prefill, decode, source, target = sides
    called: list[str] = []
    offer = prefill.offer(source.cache, range(4), 64)
    decode.fetch(offer.ticket, target.cache, range(4)).add_done_callback(
        lambda fetch: called.append(fetch.status.value)
    )
    gc.collect()
    assert offer.wait(LONG) is kvxfer.Status.OK
    assert readable(decode, LONG)
    decode.poll()
    assert called == ["OK"]


def test_a_callback_that_comes_after_the_end_is_called_too(sides) -> None:
    prefill, decode, source, target = sides
    called: list[object] = []
    offer = prefill.offer(source.cache, range(4), 64)
    fetch = decode.fetch(offer.ticket, target.cache, range(4))
    fetch.wait(LONG)
    decode.poll()
    fetch.add_done_callback(called.append)
    assert readable(decode, LONG)
    decode.poll()
    assert called == [fetch]
    assert offer.wait(LONG) is kvxfer.Status.OK
    prefill.poll()
    offer.add_released_callback(called.append)
    prefill.poll()
    assert called == [fetch, offer]


def test_a_callback_that_raises_loses_no_other(sides) -> None:
    prefill, decode, source, target = sides
    called: list[int] = []

    def fail(_: kvxfer.Fetch) -> None:
        raise RuntimeError("from the callback")

    for number in range(2):
        offer = prefill.offer(source.cache, range(4), 64)
        fetch = decode.fetch(offer.ticket, target.cache, range(4))
        fetch.add_done_callback(fail)
        fetch.add_done_callback(lambda _, number=number: called.append(number))
        fetch.wait(LONG)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="from the callback"):
            decode.poll()
    decode.poll()
    assert sorted(called) == [0, 1]


def test_handles_outlive_their_agent(sides) -> None:
    prefill, decode, source, target = sides
    offer = prefill.offer(source.cache, range(4), 64, ready=False)
    fetch = decode.fetch(offer.ticket, target.cache, range(4))
    decode.close()
    prefill.close()
    assert fetch.status is offer.status is kvxfer.Status.CLOSED
    assert "'decode' was closed" in str(fetch.error)
    assert "'prefill' was closed" in offer.message
    fetch.cancel()
    offer.release()
    offer.mark_all_ready()
    assert fetch.report.bytes == 0
    assert readable(fetch, 0)
    assert target.poisoned


def test_dropped_handles_end_by_themselves(sides) -> None:
    prefill, decode, source, target = sides
    ticket = prefill.offer(source.cache, range(4), 64).ticket
    decode.fetch(ticket, target.cache, range(4))
    gc.collect()
    late = prefill.offer(source.cache, range(4), 64)
    decode.fetch(late.ticket, target.cache, range(4)).wait(LONG)
    assert late.wait(LONG) is kvxfer.Status.OK
    assert target.same_as(source)


def test_mark_ready_refuses_layers_that_are_not_there(sides) -> None:
    prefill, _, source, _ = sides
    offer = prefill.offer(source.cache, range(4), 64, id="request", ready=False)
    with pytest.raises(kvxfer.InvalidError, match=r"'request'.*no layer 'c'.*first is 'a'"):
        offer.mark_ready("c")
    with pytest.raises(kvxfer.InvalidError, match=r"'request'.*no layer 2, the cache has 2"):
        offer.mark_ready(2)
    with pytest.raises(kvxfer.InvalidError, match=r"'request'.*no layer -1"):
        offer.mark_ready(-1)
    offer.mark_ready("a")
