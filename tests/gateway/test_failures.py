"""Engines that fail at each step: no request is lost that could be saved, and none is repeated."""

from __future__ import annotations

import asyncio
import copy

import aiohttp
import pytest
from gateway.fake import FakeEngine
from gateway.rig import LONG, SHORT, in_loop, rig

from kvxfer.integrations.gateway.settings import Flow

PREFILL_FAULTS = {
    "status": {"statuses": [500] * 9},
    "busy": {"statuses": [503] * 9},
    "drop": {"drop": True},
    "hang": {"hang": True},
    "garbage": {"garbage": b"{"},
    "no object": {"garbage": b"[]"},
    "odd params": {"garbage": b'{"kv_transfer_params": [1]}'},
    "no params": {"no_params": True},
}


def patience(faults: dict[str, object]) -> float:
    """Return a deadline: short where it is what is tested, else out of a slow machine's way."""
    return 1.0 if faults.get("hang") else 30.0


def break_it(engine: FakeEngine, faults: dict[str, object]) -> None:
    for name, value in faults.items():
        setattr(engine.faults, name, copy.copy(value))


@pytest.mark.parametrize("flow", Flow)
@pytest.mark.parametrize("faults", PREFILL_FAULTS.values(), ids=PREFILL_FAULTS)
@in_loop
async def test_a_failing_prefill_engine_is_replaced_by_another(flow, faults) -> None:
    async with rig(prefill=2, flow=flow, prefill_timeout=patience(faults)) as it:
        for number in range(4):  # both have answered, so that the concurrent flow can run
            await it.ask([number, *LONG])
        break_it(it.prefill[0], faults)
        for number in range(10, 14):
            place, _ = await it.ask([number, *LONG])
            assert place == "remote"
        assert await it.counted("fallbacks_total") == 0
        assert await it.counted("retries_total", role="prefill") >= 1
        it.prefill[0].faults.hang = False
        await it.settle()


@pytest.mark.parametrize("flow", Flow)
@pytest.mark.parametrize("faults", PREFILL_FAULTS.values(), ids=PREFILL_FAULTS)
@in_loop
async def test_without_another_the_decode_engine_prefills(flow, faults) -> None:
    async with rig(flow=flow, prefill_timeout=patience(faults)) as it:
        await it.ask(LONG)
        break_it(it.prefill[0], faults)
        for number in range(3):
            await it.ask([number, *LONG], stream=True)
        assert await it.counted("fallbacks_total") >= 1
        assert await it.counted("engine_failures_total", engine=it.prefill[0].name) >= 1
        it.prefill[0].faults.hang = False
        await it.settle()


@pytest.mark.parametrize("flow", Flow)
@in_loop
async def test_a_prefill_engine_that_is_killed_comes_back(flow) -> None:
    async with rig(flow=flow) as it:
        await it.ask(LONG)
        engine = it.engine(it.prefill[0])
        await it.prefill[0].stop()
        for number in range(5):
            await it.ask([number, *LONG])
        await it.until(lambda: not engine.healthy)
        assert await it.ask([77, *LONG]) == ("local", "no_prefill")
        await it.prefill[0].restart()
        await it.until(lambda: engine.usable(asyncio.get_running_loop().time() + 1e6, "m"))
        await it.until(lambda: engine.breaker.ready(it.gateway.pool._now()))
        assert await it.ask([78, *LONG]) == ("remote", "long")
        await it.settle()


@in_loop
async def test_what_a_restarted_engine_had_cached_is_forgotten() -> None:
    async with rig() as it:
        await it.ask(LONG)
        assert await it.ask(LONG) == ("local", "full_hit")
        engine = it.engine(it.decode[0])
        await it.until(lambda: it.gateway.monitor._counts[engine.url][0] > 0)
        await it.decode[0].restart()
        await it.until(lambda: engine.boots == 1)
        assert len(engine.index) == 0
        assert await it.ask(LONG) == ("remote", "long")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "faults",
    [{"statuses": [500] * 9}, {"drop": True}, {"hang": True}, {"statuses": [503] * 9}],
    ids=["status", "drop", "hang", "busy"],
)
@in_loop
async def test_a_failing_decode_engine_is_replaced_before_the_first_byte(faults, stream) -> None:
    async with rig(decode=2, first_byte_timeout=patience(faults)) as it:
        break_it(it.decode[0], faults)
        for number in range(6):
            await it.ask([number, *SHORT], stream=stream)
            await it.ask([number, *LONG], stream=stream)
        assert await it.counted("retries_total", role="decode") >= 1
        it.decode[0].faults.hang = False
        for prefill in it.prefill:
            prefill.held.clear()  # what a dead decode engine was to fetch is held until the lease
        await it.settle()


@in_loop
async def test_kv_of_an_unreachable_decode_engine_goes_to_another() -> None:
    async with rig(decode=2, watch_interval=60) as it:
        await it.decode[0].stop()
        await it.ask(LONG)
        assert len(it.prefill[0].bodies("prefill")) == 1
        assert len(it.decode[1].bodies("fetch")) == 1
        assert await it.counted("fallbacks_total") == 0
        await it.settle()


@in_loop
async def test_kv_goes_to_no_engine_that_it_does_not_reach() -> None:
    async with rig(decode=2, watch_interval=60) as it:
        it.gateway.pool.set_pair(it.engine(it.prefill[0]), it.engine(it.decode[1]), False)
        await it.decode[0].stop()
        await it.ask(LONG)
        assert len(it.prefill[0].bodies("prefill")) == 1
        assert len(it.decode[1].bodies("fetch")) == 0
        assert await it.counted("fallbacks_total", reason="decode_unreachable") == 1


@in_loop
async def test_a_load_that_fails_is_repeated_without_it() -> None:
    async with rig() as it:
        it.decode[0].faults.statuses = [500]
        await it.ask(LONG)
        assert len(it.decode[0].bodies("fetch")) == 1
        assert len(it.decode[0].bodies("all")) == 1
        assert await it.counted("fallbacks_total", reason="decode_error") == 1
        it.decode[0].faults.stream_error = True
        body = {"model": "m", "prompt": [1, *LONG], "stream": True}
        status, answer, _ = await it.post(body)  # the second try fails as well: it is passed on
        assert status == 500
        assert b"made up" in (answer if isinstance(answer, bytes) else b"made up")


@pytest.mark.parametrize("fault", ["cut_after", "hang_after"])
@in_loop
async def test_nothing_is_repeated_after_the_first_byte(fault) -> None:
    async with rig(decode=2, idle_timeout=patience({"hang": fault == "hang_after"})) as it:
        for decode in it.decode:
            setattr(decode.faults, fault, 2)
        body = {"model": "m", "prompt": SHORT, "stream": True, "max_tokens": 6}
        pieces: list[bytes] = []

        async def read() -> None:
            async with it.client.post("/v1/completions", json=body) as answer:
                assert answer.status == 200
                async for piece in answer.content.iter_any():
                    pieces.append(piece)

        with pytest.raises(aiohttp.ClientError):
            await read()
        assert b"".join(pieces).count(b"\n\n") == 2
        assert b"[DONE]" not in b"".join(pieces)
        assert len(it.decode[0].requests) + len(it.decode[1].requests) == 1
        assert await it.counted("engine_failures_total", kind="stream_lost") == 1
        await it.settle()


@pytest.mark.parametrize("status", [400, 404, 422, 401])
@in_loop
async def test_clients_mistakes_are_passed_on_and_trip_nothing(status) -> None:
    async with rig(breaker_failures=2) as it:
        for engine in (it.prefill[0], it.decode[0]):
            engine.faults.statuses = [status] * 40
            engine.faults.body = b'{"error": {"message": "too long", "code": %d}}' % status
        for number in range(10):
            found, answer, _ = await it.post({"model": "m", "prompt": [number, *LONG]})
            assert (found, answer["error"]["message"]) == (status, "too long")
        for fake in (it.prefill[0], it.decode[0]):
            assert not it.engine(fake).breaker.open
        await it.settle()


@in_loop
async def test_a_mistake_that_an_engine_calls_its_own_trips_nothing() -> None:
    async with rig(breaker_failures=2) as it:
        it.decode[0].faults.statuses = [500] * 40
        it.decode[0].faults.body = b'{"error": {"type": "BadRequestError", "code": 400}}'
        for number in range(6):
            status, _, _ = await it.post({"model": "m", "prompt": [number, *SHORT]})
            assert status == 500
        assert len(it.decode[0].requests) == 6  # and none is tried twice
        assert not it.engine(it.decode[0]).breaker.open


@in_loop
async def test_a_broken_engine_is_left_alone_and_tried_again() -> None:
    async with rig(prefill=2, breaker_failures=2, breaker_cooldown=30) as it:
        it.prefill[0].faults.statuses = [500] * 99
        for number in range(12):
            await it.ask([number, *LONG])
        assert len(it.prefill[0].requests) == 2
        assert await it.counted("engine_tripped", engine=it.prefill[0].name) == 1
        it.prefill[0].faults.statuses = []
        it.engine(it.prefill[0]).breaker._until = 0.0  # the cool-down is over
        it.engine(it.prefill[1]).inflight_tokens = 2e3  # so that the other would get all of them
        await asyncio.gather(*(it.ask([number, *LONG]) for number in range(50, 54)))
        assert 3 <= len(it.prefill[0].requests) <= 6
        assert not it.engine(it.prefill[0]).breaker.open
        it.engine(it.prefill[1]).inflight_tokens = 0.0


@in_loop
async def test_all_decode_engines_fail() -> None:
    async with rig(decode=2) as it:
        for decode in it.decode:
            decode.faults.statuses = [500] * 9
        status, answer, _ = await it.post({"model": "m", "prompt": SHORT})
        assert (status, answer["error"]["message"]) == (500, "made up")
        assert sum(len(decode.requests) for decode in it.decode) == 2
        await it.settle()


@in_loop
async def test_many_requests_while_engines_come_and_go() -> None:
    async with rig(prefill=2, decode=2, prefill_timeout=30, first_byte_timeout=30) as it:

        async def trouble() -> None:
            for engine in (it.prefill[0], it.prefill[1], it.decode[0]):
                engine.faults.statuses = [500, 200, 500]
                await asyncio.sleep(0.05)
                engine.faults.drop = True
                await asyncio.sleep(0.05)
                engine.faults.drop = False
                await asyncio.sleep(0.1)
            await it.prefill[0].restart()

        async def client(number: int) -> None:
            for turn in range(4):
                prompt = [number, turn, *(LONG if turn % 2 else SHORT)]
                await it.ask(prompt, stream=bool(number % 2))

        await asyncio.gather(trouble(), *(client(number) for number in range(20)))
        for prefill in it.prefill:
            prefill.held.clear()
        await it.settle()


@in_loop
async def test_what_nobody_expects_leaves_no_breaker_on_trial() -> None:
    async with rig(breaker_failures=1) as it:
        engine = it.engine(it.decode[0])
        engine.breaker.failed(0.0)  # long ago, so one request may try
        it.gateway.legs._first, kept = _unexpected, it.gateway.legs._first
        assert (await it.post({"model": "m", "prompt": SHORT}))[0] == 500
        it.gateway.legs._first = kept
        assert await it.ask(SHORT) == ("local", "short")
        assert await it.counted("requests_total", status="500") == 1


async def _unexpected(*_: object) -> None:
    raise RuntimeError("made up")
