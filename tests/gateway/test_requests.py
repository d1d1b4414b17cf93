"""Requests that go well: where they go, what reaches the engines, what comes back."""

from __future__ import annotations

import asyncio
import json

import pytest
from gateway.fake import event
from gateway.rig import LONG, SHORT, in_loop, rig

from kvxfer.integrations.gateway.settings import Flow
from kvxfer.serving import Policy


@pytest.mark.parametrize("flow", Flow)
@pytest.mark.parametrize("stream", [False, True])
@in_loop
async def test_long_prompts_are_prefilled_elsewhere_and_short_ones_are_not(flow, stream) -> None:
    async with rig(flow=flow) as it:
        for number in range(3):
            prompt = [number + 5, *LONG]
            assert await it.ask(prompt, stream=stream) == ("remote", "long")
        assert await it.ask(SHORT, stream=stream) == ("local", "short")
        assert len(it.prefill[0].bodies("prefill")) == 3
        assert len(it.decode[0].bodies("fetch")) == 3
        assert len(it.decode[0].bodies("all")) == 1
        assert it.decode[0].counts["loads"] == 3
        await it.settle()


@in_loop
async def test_both_legs_have_the_same_id_and_key() -> None:
    async with rig() as it:
        headers = {"X-Request-Id": "abc-1", "Authorization": "Bearer k", "X-Evil": "1"}
        body = {"model": "m", "prompt": LONG, "stream": True, "stream_options": {}, "n": 2}
        body |= {"max_tokens": 9, "max_completion_tokens": 9, "min_tokens": 3, "seed": 4}
        status, _, answered = await it.post(body, headers=headers)
        assert status == 200
        assert answered["X-Request-Id"] == "abc-1"
        (_, to_prefill, first), (_, to_decode, second) = (
            it.prefill[0].requests[-1],
            it.decode[0].requests[-1],
        )
        for one in (to_prefill, to_decode):
            assert one["X-Request-Id"] == "abc-1"
            assert one["Authorization"] == "Bearer k"
            assert "X-Evil" not in one
        assert (first["max_tokens"], first["max_completion_tokens"], first["n"]) == (1, 1, 1)
        assert first["stream"] is False
        assert "stream_options" not in first
        assert "min_tokens" not in first
        params = second.pop("kv_transfer_params")
        assert second == body
        assert params["remote_engine_id"] == it.prefill[0].id


@pytest.mark.parametrize("given", ["", "a b", "x" * 200, "a\tb"])
@in_loop
async def test_an_odd_request_id_is_replaced(given) -> None:
    async with rig() as it:
        _, _, headers = await it.post({"prompt": SHORT}, headers={"X-Request-Id": given})
        assert len(headers["X-Request-Id"]) == 32


@in_loop
async def test_one_id_at_a_time() -> None:
    async with rig() as it:
        it.decode[0].faults.delay = 0.2
        answers = await asyncio.gather(
            *(it.post({"prompt": SHORT}, headers={"X-Request-Id": "same"}) for _ in range(2))
        )
        names = [headers["X-Request-Id"] for _, _, headers in answers]
        assert len(set(names)) == 2
        assert all(name.startswith("same") for name in names)


@pytest.mark.parametrize(
    "body",
    [
        {"kv_transfer_params": {"do_remote_prefill": True, "remote_host": "10.0.0.1"}},
        {"kv_transfer_params": {}},
        {"vllm_xargs": {"kv_transfer_params": {"remote_host": "10.0.0.1"}}},
        {"extra_body": {"kv_transfer_params": {}}},
    ],
)
@in_loop
async def test_clients_name_no_addresses(body) -> None:
    async with rig() as it:
        status, answer, _ = await it.post({"prompt": LONG, **body})
        assert status == 400
        assert "kv_transfer_params" in answer["error"]["message"]
        assert not it.prefill[0].requests
        assert not it.decode[0].requests


@in_loop
async def test_the_last_of_two_equal_keys_is_what_is_checked_and_sent() -> None:
    async with rig() as it:
        text = b'{"kv_transfer_params": {"remote_host": "x"}, "prompt": [1, 2], '
        text += b'"kv_transfer_params": null}'
        async with it.client.post("/v1/completions", data=text) as answer:
            assert answer.status == 200
        assert "x" not in json.dumps(it.decode[0].requests[-1][2])


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b"3", b"[" * 100_000])
@in_loop
async def test_a_body_that_is_none(text) -> None:
    async with rig() as it:
        async with it.client.post("/v1/completions", data=text) as answer:
            assert answer.status == 400
        assert not it.decode[0].requests


@in_loop
async def test_a_body_that_is_too_large() -> None:
    async with rig(max_body=1000) as it:
        answer = await it.client.post("/v1/completions", data=b"x" * 2000)
        assert answer.status == 413


@in_loop
async def test_streams_are_passed_on_piece_by_piece() -> None:
    async with rig() as it:
        it.decode[0].faults.gap = 0.05
        body = {"model": "m", "prompt": SHORT, "max_tokens": 4, "stream": True}
        async with it.client.post("/v1/completions", json=body) as answer:
            assert answer.headers["Content-Type"] == "text/event-stream"
            pieces = [piece async for piece in answer.content.iter_any()]
        assert len(pieces) >= 4  # not collected first
        assert b"".join(pieces).startswith(event(" ")[:20])


@in_loop
async def test_chats_share_what_they_begin_with() -> None:
    async with rig() as it:
        system = {"role": "system", "content": "You are a helpful assistant. " * 60}
        messages = [system, {"role": "user", "content": "Hello there, how are you? " * 10}]
        for expected in (("remote", "long"), ("local", "full_hit")):
            status, _, headers = await it.post(
                {"model": "m", "messages": messages}, "/v1/chat/completions"
            )
            assert status == 200
            assert (headers["X-Kvxfer-Place"], headers["X-Kvxfer-Reason"]) == expected
        messages += [{"role": "assistant", "content": "Fine."}, {"role": "user", "content": "Ok?"}]
        _, _, headers = await it.post({"model": "m", "messages": messages}, "/v1/chat/completions")
        assert headers["X-Kvxfer-Place"] == "local"
        other = [{"role": "system", "content": "Another. " * 400}]
        _, _, headers = await it.post({"model": "m", "messages": other}, "/v1/chat/completions")
        assert headers["X-Kvxfer-Place"] == "remote"


@in_loop
async def test_what_the_prompt_itself_is_asked_for_stays_local() -> None:
    async with rig() as it:
        for more in ({"echo": True}, {"prompt_logprobs": 1}, {"truncate_prompt_tokens": 5}):
            assert await it.ask(LONG, **more) == ("local", "needs_prompt")
        status, _, headers = await it.post({"model": "m", "prompt": [LONG, LONG]})
        assert (headers["X-Kvxfer-Place"], headers["X-Kvxfer-Reason"]) == (
            "local",
            "several_prompts",
        )
        assert not it.prefill[0].requests


@in_loop
async def test_unknown_models_and_engines_of_another_model() -> None:
    async with rig(prefill=1, decode=1) as it:
        status, answer, _ = await it.post({"model": "nobody", "prompt": SHORT})
        assert status == 404
        assert "'nobody'" in answer["error"]["message"]
    async with rig() as it:
        it.prefill[0].model = "another"
        await it.prefill[0].restart()
        await it.until(lambda: it.engine(it.prefill[0]).models == {"another"})
        assert await it.ask(LONG) == ("local", "no_prefill")


@in_loop
async def test_models_health_and_metrics() -> None:
    async with rig() as it:
        async with it.client.get("/v1/models") as answer:
            assert (await answer.json())["data"] == [{"id": "m"}]
        async with it.client.get("/health") as answer:
            assert answer.status == 200
            assert await answer.json() == {"prefill": 1, "decode": 1}
        await it.ask(LONG, stream=True)
        found = await it.metrics()
        assert found.total("kvxfer_gateway_decisions_total", place="remote", reason="long") == 1
        assert found.total("kvxfer_gateway_requests_total", status="200") == 1
        assert found.total("kvxfer_gateway_ttft_seconds_count", place="remote") == 1
        assert found.total("kvxfer_gateway_output_tokens_total") == 6
        assert found.total("kvxfer_gateway_slo_total", met="yes") == 1
        assert found.total("kvxfer_gateway_engine_up") == 2
        for engine in (*it.prefill, *it.decode):
            await engine.stop()
        await it.until(lambda: not it.engine(it.decode[0]).healthy)
        async with it.client.get("/health") as answer:
            assert answer.status == 503
        status, answer, headers = await it.post({"prompt": SHORT})
        assert status == 503
        assert int(headers["Retry-After"]) >= 1


@in_loop
async def test_keys_are_checked_and_replaced() -> None:
    async with rig(api_keys=frozenset({"one", "two"}), engine_key="inside") as it:
        for headers in ({}, {"Authorization": "Bearer three"}):
            status, _, _ = await it.post({"prompt": SHORT}, headers=headers)
            assert status == 401
        assert not it.decode[0].requests
        status, _, _ = await it.post({"prompt": SHORT}, headers={"Authorization": "Bearer two"})
        assert status == 200
        assert it.decode[0].requests[-1][1]["Authorization"] == "Bearer inside"
    async with rig(api_keys=frozenset({"one"})) as it:
        await it.post({"prompt": SHORT}, headers={"Authorization": "Bearer one"})
        assert "Authorization" not in it.decode[0].requests[-1][1]


@in_loop
async def test_requests_spread_and_return_to_what_is_cached() -> None:
    async with rig(prefill=2, decode=2, policy=Policy(threshold=128, floor=32)) as it:
        for decode in it.decode:
            decode.faults.delay = 0.1
        prompts = [[number, *LONG] for number in range(4)]
        await asyncio.gather(*(it.ask(prompt) for prompt in prompts))
        assert [len(one.requests) for one in it.decode] == [2, 2]
        assert [len(one.requests) for one in it.prefill] == [2, 2]
        for decode in it.decode:
            decode.faults.delay = 0.0
        for prompt in prompts:
            assert await it.ask(prompt) == ("local", "full_hit")
        assert [len(one.requests) for one in it.decode] == [4, 4]
        for decode in it.decode:
            asked = [tuple(body["prompt"]) for body in decode.bodies("fetch")]
            again = [tuple(body["prompt"]) for body in decode.bodies("all")]
            assert sorted(asked) == sorted(again)


@in_loop
async def test_tokens_from_an_engine() -> None:
    async with rig(tokenize=True) as it:
        text = "a" * 200  # 200 tokens there, 50 by the estimate
        assert await it.ask(text) == ("remote", "long")
    async with rig(tokenize=False) as it:
        place, reason = await it.ask(text)
        assert reason != "long"


async def raw(it, head: bytes, body: bytes = b'{"model": "m", "prompt": [1, 2, 3]}') -> bytes:
    """Send what a client library would not, and return the first line of the answer."""
    reader, writer = await asyncio.open_connection("127.0.0.1", it.port)
    lines = [b"Host: x", b"Content-Length: %d" % len(body), b"Connection: close"]
    writer.write(b"\r\n".join([head, *lines, b"", body]))
    answer = await reader.read()
    writer.close()
    return answer.split(b"\r\n", 1)[0]


@pytest.mark.parametrize("name", [b"Authorization", b"traceparent"])
@in_loop
async def test_headers_that_are_no_text_speak_against_no_engine(name) -> None:
    async with rig() as it:
        head = b"POST /v1/completions HTTP/1.1\r\n" + name + b": Bearer \xff\xfe"
        for _ in range(4):
            assert b" 200 " in await raw(it, head)
        assert await it.counted("engine_failures_total") == 0
        assert name.decode() not in it.decode[0].requests[-1][1]
        assert await it.ask(SHORT) == ("local", "short")


@in_loop
async def test_keys_that_are_no_text_are_wrong_keys() -> None:
    async with rig(api_keys=frozenset({"k"})) as it:
        key = b"\r\nAuthorization: Bearer \xff"
        assert b" 401 " in await raw(it, b"POST /v1/completions HTTP/1.1" + key)
        assert b" 401 " in await raw(it, b"POST /admin/engines HTTP/1.1" + key)


@in_loop
async def test_answers_are_counted_by_their_status() -> None:
    async with rig(max_body=1000) as it:
        answer = await it.client.post("/v1/completions", data=b"x" * 2000)
        assert answer.status == 413
        await it.ask(SHORT)
        for status, count in (("413", 1), ("200", 1), ("499", 0)):
            assert await it.counted("requests_total", status=status) == count
