"""Fetches and offers in an event loop."""

from __future__ import annotations

import asyncio

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


def run(coroutine) -> object:
    return asyncio.run(asyncio.wait_for(coroutine, LONG))


def test_await_a_fetch_and_an_offer(sides) -> None:
    prefill, decode, source, target = sides

    async def move() -> kvxfer.Status:
        offer = prefill.offer(source.cache, range(4), 64)
        await decode.fetch(offer.ticket, target.cache, range(4))
        return await offer

    assert run(move()) is kvxfer.Status.OK
    assert target.same_as(source)


def test_the_loop_runs_meanwhile(sides) -> None:
    prefill, decode, source, target = sides

    async def move() -> None:
        offer = prefill.offer(source.cache, range(4), 64, ready=False)
        fetch = decode.fetch(offer.ticket, target.cache, range(4))

        async def make_ready() -> None:
            offer.mark_ready("a")
            await asyncio.sleep(0)
            offer.mark_ready("b")

        await asyncio.gather(fetch, make_ready())

    run(move())
    assert target.same_as(source)


def test_many_at_once(sides) -> None:
    prefill, decode, source, target = sides

    async def move() -> None:
        fetches = []
        for block in range(4):
            offer = prefill.offer(source.cache, [block], 16)
            fetches.append(decode.fetch(offer.ticket, target.cache, [block]))
        await asyncio.gather(*fetches)

    run(move())
    assert target.same_as(source)


def test_several_tasks_await_one_fetch(sides) -> None:
    prefill, decode, source, target = sides

    async def move() -> list[None]:
        offer = prefill.offer(source.cache, range(4), 64, ready=False)
        fetch = decode.fetch(offer.ticket, target.cache, range(4))

        async def wait() -> None:
            await fetch

        tasks = [asyncio.ensure_future(wait()) for _ in range(3)]
        await asyncio.sleep(0)
        offer.mark_all_ready()
        results = await asyncio.gather(*tasks)
        await fetch  # also after the end
        return results

    assert run(move()) == [None] * 3
    assert target.same_as(source)


def test_failure_is_raised_where_it_is_awaited(sides) -> None:
    prefill, decode, source, target = sides

    async def move() -> None:
        offer = prefill.offer(source.cache, range(4), 64, ready=False)
        fetch = decode.fetch(offer.ticket, target.cache, range(4))
        asyncio.get_running_loop().call_soon(offer.release)
        await fetch

    with pytest.raises(kvxfer.TransferError) as caught:
        run(move())
    assert caught.value.status is kvxfer.Status.CANCELLED


def test_a_cancelled_task_cancels_its_fetch(sides) -> None:
    prefill, decode, source, target = sides

    async def move() -> None:
        offer = prefill.offer(source.cache, range(4), 64, ready=False)
        fetch = decode.fetch(offer.ticket, target.cache, range(4))
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(fetch, 0.01)
        assert fetch.status is kvxfer.Status.CANCELLED
        offer.mark_all_ready()
        with pytest.raises(kvxfer.TransferError):
            fetch.wait()
        # The offer is there for another try.
        assert not offer.released
        again = decode.fetch(offer.ticket, target.cache, range(4))
        await again
        assert await offer is kvxfer.Status.OK

    run(move())
    assert target.same_as(source)


def test_the_agents_own_descriptor_in_a_loop(sides) -> None:
    prefill, decode, source, target = sides

    async def move() -> list[kvxfer.Fetch]:
        loop = asyncio.get_running_loop()
        ended: asyncio.Queue[kvxfer.Fetch] = asyncio.Queue()

        def drain() -> None:
            for handle in decode.poll():
                ended.put_nowait(handle)

        loop.add_reader(decode.fileno(), drain)
        fetches = []
        for block in range(4):
            offer = prefill.offer(source.cache, [block], 16)
            fetches.append(decode.fetch(offer.ticket, target.cache, [block]))
        found = [await ended.get() for _ in fetches]
        loop.remove_reader(decode.fileno())
        assert set(found) == set(fetches)
        return found

    assert all(fetch.status is kvxfer.Status.OK for fetch in run(move()))
    assert target.same_as(source)
