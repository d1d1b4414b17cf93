"""A client that leaves frees both sides, whenever it leaves."""

from __future__ import annotations

import asyncio
import json

import pytest
from gateway.rig import LONG, SHORT, in_loop, rig

from kvxfer.integrations.gateway.settings import Flow


async def leave(it, body, seconds: float) -> None:
    """Send a request and close the connection after a while."""
    with pytest.raises(asyncio.TimeoutError):
        await asyncio.wait_for(it.post(body), seconds)


@pytest.mark.parametrize("flow", Flow)
@pytest.mark.parametrize("side", ["prefill", "decode"])
@pytest.mark.parametrize("stream", [False, True])
@in_loop
async def test_while_an_engine_works(flow, side, stream) -> None:
    async with rig(flow=flow) as it:
        await it.ask(LONG)
        engine = getattr(it, side)[0]
        engine.faults.delay = 20.0
        body = {"model": "m", "prompt": [7, *LONG], "stream": stream}
        await leave(it, body, 0.3)
        await it.until(lambda: engine.aborted)
        await it.settle()
        assert await it.counted("clients_left_total", stage="waiting") == 1


@in_loop
async def test_while_an_answer_is_streamed() -> None:
    async with rig() as it:
        it.decode[0].faults.gap = 0.1
        body = {"model": "m", "prompt": LONG, "stream": True, "max_tokens": 500}
        async with it.client.post("/v1/completions", json=body) as answer:
            await answer.content.readany()
            answer.close()
        await it.until(lambda: it.decode[0].aborted)
        await it.settle()
        assert await it.counted("clients_left_total", stage="streaming") == 1
        assert await it.counted("clients_left_total", stage="waiting") == 0


@pytest.mark.parametrize("flow", Flow)
@in_loop
async def test_before_the_decode_engine_knows_of_it(flow) -> None:
    """An engine that sees no more than a closed connection can't give the blocks back."""
    async with rig(flow=flow, abort_grace=0.6) as it:
        await it.ask(LONG)
        it.decode[0].faults.admit_delay = 0.3
        it.decode[0].faults.delay = 20.0
        it.prefill[0].faults.delay = 0.1 if flow is Flow.SERIAL else 0.0
        body = {"model": "m", "prompt": [7, *LONG]}
        await leave(it, body, 0.2)
        await it.until(lambda: it.decode[0].aborted)
        await it.settle()
        assert it.decode[0].counts["declined"] == 1


@in_loop
async def test_one_who_waits_in_the_queue() -> None:
    async with rig(max_inflight=1) as it:
        it.decode[0].faults.delay = 0.5
        first = asyncio.create_task(it.ask(SHORT))
        await it.until(lambda: it.decode[0].active)
        await leave(it, {"model": "m", "prompt": SHORT}, 0.1)
        await it.until(lambda: it.gateway.admission.waiting == 0)
        await first
        assert len(it.decode[0].requests) == 1
        await it.settle()


@in_loop
async def test_many_at_any_moment() -> None:
    async with rig(prefill=2, decode=2) as it:
        for engine in (*it.prefill, *it.decode):
            engine.faults.delay = 0.05
            engine.faults.gap = 0.01
            # It ends what is offered in an answer that crosses with its client's leaving.
            engine.faults.lease = 5.0

        async def client(number: int) -> None:
            body = {"model": "m", "prompt": [number, *LONG], "stream": True, "max_tokens": 9}
            try:
                await asyncio.wait_for(it.post(body), 0.004 * number)
            except asyncio.TimeoutError:
                pass

        await asyncio.gather(*(client(number) for number in range(60)))
        await it.settle()


@in_loop
async def test_one_who_reads_no_more() -> None:
    """The place is free after the deadline, and the engine is not blamed."""
    async with rig(idle_timeout=0.5, breaker_failures=1) as it:
        reader, writer = await asyncio.open_connection("127.0.0.1", it.port, limit=1024)
        body = json.dumps({"model": "m", "prompt": SHORT, "stream": True, "max_tokens": 400_000})
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        writer.write((head + body).encode())
        await it.until(lambda: it.gateway.admission.inside == 1)
        await it.until(lambda: it.gateway.admission.inside == 0)
        await it.until(lambda: it.decode[0].aborted)
        await it.settle()
        assert await it.counted("engine_failures_total") == 0
        assert await it.counted("clients_left_total", stage="streaming") == 1
        assert await it.ask([1, *SHORT]) == ("local", "short")
        writer.close()
