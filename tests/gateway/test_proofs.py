"""Whether KV really moved: canaries by each pair, and counts on both sides."""

from __future__ import annotations

import asyncio

import pytest
from gateway.rig import LONG, in_loop, rig

from kvxfer.integrations.gateway.canary import Outcome, cached_tokens


@pytest.mark.parametrize("how", [{"kvxfer": True}, {"kvxfer": False, "details": True}])
@in_loop
async def test_a_canary_by_each_pair_at_the_start(how) -> None:
    async with rig(prefill=2, decode=2, how=how, canary_interval=60) as it:
        moved = it.gateway.metrics.canaries
        await it.until(lambda: moved.get("moved") == 4)
        assert await it.counted("pair_moves_kv") == 4
        assert await it.counted("decode_reprefill_total") == 0
        assert await it.ask(LONG) == ("remote", "long")
        await it.settle()


@pytest.mark.parametrize("how", [{"kvxfer": True}, {"kvxfer": False, "details": True}])
@in_loop
async def test_a_pair_that_moves_nothing_is_not_used(how, monkeypatch) -> None:
    monkeypatch.setattr("kvxfer.integrations.gateway.canary.PATIENCE", 0.3)
    async with rig(how=how, canary_interval=0.4, prefill=1, decode=2) as it:
        it.decode[0].faults.loads_fail = True
        it.gateway.canaries._up(it.engine(it.decode[0]))
        prefill, decode = it.engine(it.prefill[0]), it.engine(it.decode[0])
        await it.until(lambda: not it.gateway.pool.pairs(prefill, decode))
        await it.until(lambda: it.gateway.metrics.reprefills.get(decode.name) >= 1)
        assert await it.counted("canaries_total", outcome="not_moved") >= 1
        it.engine(it.decode[1]).draining = True
        assert await it.ask(LONG) == ("local", "no_prefill")
        it.engine(it.decode[1]).draining = False
        it.decode[0].faults.loads_fail = False
        await it.until(lambda: it.gateway.pool.pairs(prefill, decode))


@in_loop
async def test_a_prefill_engine_that_offers_nothing_is_found_out() -> None:
    async with rig() as it:
        it.prefill[0].faults.no_params = True
        prefill, decode = it.engine(it.prefill[0]), it.engine(it.decode[0])
        assert await it.gateway.canaries.send(prefill, decode) is Outcome.NOT_MOVED
        assert await it.ask(LONG) == ("local", "no_prefill")


@in_loop
async def test_an_engine_that_says_nothing_is_believed() -> None:
    async with rig(how={"kvxfer": False}) as it:
        prefill, decode = it.engine(it.prefill[0]), it.engine(it.decode[0])
        assert await it.gateway.canaries.send(prefill, decode) is Outcome.UNKNOWN
        assert await it.ask(LONG) == ("remote", "long")


@in_loop
async def test_a_canary_of_a_failing_engine_says_nothing() -> None:
    async with rig() as it:
        it.prefill[0].faults.statuses = [500]
        prefill, decode = it.engine(it.prefill[0]), it.engine(it.decode[0])
        assert await it.gateway.canaries.send(prefill, decode) is Outcome.FAILED
        assert it.gateway.pool.pairs(prefill, decode)


@in_loop
async def test_prompts_that_are_prefilled_again_are_counted() -> None:
    async with rig() as it:
        watch = it.gateway.monitor._reprefills
        await it.until(lambda: it.decode[0].url in watch)
        for number in range(3):
            await it.ask([number, *LONG])
        it.decode[0].faults.loads_fail = True
        for number in range(10, 14):
            await it.ask([number, *LONG])
        await it.until(lambda: watch[it.decode[0].url].missing == 4)
        assert await it.counted("decode_reprefill_total", engine=it.decode[0].name) == 4
        it.decode[0].faults.loads_fail = False
        await it.ask([20, *LONG])
        await asyncio.sleep(0.3)
        assert await it.counted("decode_reprefill_total") == 4


@pytest.mark.parametrize(
    ("body", "cached"),
    [
        (b'{"usage": {"prompt_tokens_details": {"cached_tokens": 7}}}', 7),
        (b'{"usage": {"prompt_tokens_details": null}}', None),
        (b'{"usage": null}', None),
        (b"{", None),
        (b"[]", None),
    ],
)
def test_cached_tokens_as_an_engine_tells_them(body, cached) -> None:
    assert cached_tokens(body) == cached


@in_loop
async def test_a_canary_that_does_not_arrive_counts_once(monkeypatch) -> None:
    monkeypatch.setattr("kvxfer.integrations.gateway.canary.PATIENCE", 0.3)
    async with rig() as it:
        prefill, decode = it.engine(it.prefill[0]), it.engine(it.decode[0])
        watch = it.gateway.monitor._reprefills
        await it.until(lambda: decode.url in watch)
        assert await it.gateway.canaries.send(prefill, decode) is Outcome.MOVED
        it.decode[0].faults.loads_fail = True
        assert await it.gateway.canaries.send(prefill, decode) is Outcome.NOT_MOVED
        await asyncio.sleep(0.3)  # some looks
        assert await it.counted("decode_reprefill_total") == 1


@in_loop
async def test_clients_that_left_hide_no_reprefill() -> None:
    """Their KV was loaded, although nobody heard of an answer."""
    async with rig(abort_grace=0.0) as it:
        watch = it.gateway.monitor._reprefills
        await it.until(lambda: it.decode[0].url in watch)
        it.decode[0].faults.after_fetch = 20.0
        for number in range(3):
            body = {"model": "m", "prompt": [number, *LONG]}
            asked = asyncio.create_task(it.post(body))
            await it.until(lambda wanted=number + 1: it.decode[0].counts["loads"] == wanted)
            asked.cancel()
        await it.settle()
        it.decode[0].faults.after_fetch = 0.0
        await asyncio.sleep(0.3)
        it.decode[0].faults.loads_fail = True
        await it.ask([9, *LONG])
        await it.until(lambda: watch[it.decode[0].url].missing == 1)
