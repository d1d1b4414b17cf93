"""The gateway's parts by themselves."""

from __future__ import annotations

import asyncio
import json
import random

import pytest
from gateway.rig import in_loop
from hypothesis import given
from hypothesis import strategies as st

from kvxfer.integrations.gateway.admission import Admission, RefusedError
from kvxfer.integrations.gateway.breaker import MOST_COOLDOWN, Breaker
from kvxfer.integrations.gateway.legs import clients_fault
from kvxfer.integrations.gateway.monitor import Reprefills
from kvxfer.integrations.gateway.prefix_index import PrefixIndex, chain
from kvxfer.integrations.gateway.prompts import (
    CHAT,
    COMPLETIONS,
    BadRequestError,
    Measure,
    Whole,
    decode_body,
    prefill_body,
)
from kvxfer.integrations.gateway.rates import GapMeter, LinkMeter, RateMeter
from kvxfer.serving.prometheus import parse


def test_breaker_trips_and_lets_one_try() -> None:
    breaker = Breaker(failures=3, cooldown=5.0)
    now = 100.0
    for _ in range(2):
        breaker.begin()
        breaker.failed(now)
    breaker.begin()
    breaker.succeeded()  # in a row, or they don't count
    for _ in range(3):
        assert breaker.ready(now)
        breaker.begin()
        breaker.failed(now)
    assert breaker.open
    assert not breaker.ready(now + 4.9)
    assert breaker.ready(now + 5.0)
    breaker.begin()
    assert not breaker.ready(now + 5.0)  # one at a time
    breaker.abandoned()
    assert breaker.ready(now + 5.0)
    breaker.begin()
    breaker.failed(now + 5.0)
    assert not breaker.ready(now + 14.9)  # twice as long
    assert breaker.ready(now + 15.0)
    breaker.begin()
    breaker.succeeded()
    assert not breaker.open
    assert breaker.ready(now)


def test_breaker_cooldown_has_a_limit_and_stragglers_do_not_prolong_it() -> None:
    breaker = Breaker(failures=1, cooldown=5.0)
    now = 0.0
    for _ in range(20):
        breaker.begin()
        breaker.failed(now)
        until = breaker._until
        breaker.failed(now)  # one that was sent before
        assert breaker._until == until <= now + MOST_COOLDOWN
        now = until


@given(st.lists(st.integers(0, 60), max_size=200), st.integers(1, 40))
def test_index_keeps_what_was_used_last(used: list[int], most: int) -> None:
    index, recent = PrefixIndex(most), []
    for one in used:
        index.add([one])
        recent = [other for other in recent if other != one] + [one]
        recent = recent[-most:]
    assert len(index) == len(recent)
    for one in range(61):
        assert index.match([one]) == (one in recent)


def test_index_forgets_the_end_of_a_prefix_first() -> None:
    index = PrefixIndex(4)
    index.add([1, 2, 3, 4])
    index.add([9])
    assert index.match([1, 2, 3, 4]) == 3
    index.limit(2)
    assert index.match([9]) == 1
    assert index.match([1, 2]) == 1


@given(st.binary(max_size=300), st.binary(max_size=300), st.integers(1, 32))
def test_chains_are_equal_as_far_as_the_data(one: bytes, other: bytes, block: int) -> None:
    same = 0
    while same < min(len(one), len(other)) and one[same] == other[same]:
        same += 1
    first, second = chain("r", one, block), chain("r", other, block)
    assert len(first) == len(one) // block
    for at, (a, b) in enumerate(zip(first, second, strict=False)):
        assert (a == b) == ((at + 1) * block <= same)
    assert not set(first) & set(chain("s", one, block))


@given(
    st.lists(st.tuples(st.sampled_from(["user", "assistant"]), st.text(max_size=80)), max_size=6),
    st.text(max_size=80),
)
def test_a_longer_chat_continues_the_shorter(turns, more: str) -> None:
    measure = Measure(4)
    messages = [{"role": role, "content": content} for role, content in turns]
    short = measure.call(CHAT, {"messages": messages}, {})
    long = measure.call(CHAT, {"messages": [*messages, {"role": "user", "content": more}]}, {})
    assert long.hashes[: len(short.hashes)] == short.hashes
    assert long.tokens >= short.tokens


def test_images_count_without_their_bytes() -> None:
    measure = Measure(16)
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 500_000}}
    call = measure.call(CHAT, {"messages": [{"role": "user", "content": [image]}]}, {})
    assert call.tokens < 500
    other = {**image, "image_url": {"url": "data:image/png;base64," + "B" * 500_000}}
    again = measure.call(CHAT, {"messages": [{"role": "user", "content": [other]}]}, {})
    assert again.hashes != call.hashes


def test_prompts_of_other_models_and_salts_share_nothing() -> None:
    measure = Measure(4)
    bodies = [
        {"prompt": list(range(64)), "model": "a"},
        {"prompt": list(range(64)), "model": "b"},
        {"prompt": list(range(64)), "model": "a", "cache_salt": "s"},
        {"prompt": "x" * 256, "model": "a"},
    ]
    found = [set(measure.call(COMPLETIONS, body, {}).hashes) for body in bodies]
    for at, one in enumerate(found):
        assert len(one) == 16
        assert not any(one & other for other in found[at + 1 :])


@pytest.mark.parametrize(
    "prompt", [None, {}, 3, [], [[]], [True, "x"], ["a", 1], [2**40], [1.5], [None], [[1], "a"], ""]
)
def test_odd_prompts_are_left_to_the_engine(prompt) -> None:
    call = Measure(16).call(COMPLETIONS, {"prompt": prompt}, {})
    assert call.tokens >= 0


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.text(), st.lists, max_leaves=9))
def test_any_messages_are_left_to_the_engine(messages) -> None:
    body = {"messages": messages, "tools": messages, "model": "m"}
    assert Measure(16).call(CHAT, json.loads(json.dumps(body)), {}).tokens >= 0


def test_tokens_of_text_are_learnt() -> None:
    measure = Measure(16)
    body = {"prompt": "word " * 200}
    before = measure.call(COMPLETIONS, body, {})
    assert before.tokens == 250
    for _ in range(100):
        measure.learn(measure.call(COMPLETIONS, body, {}), 500)
    after = measure.call(COMPLETIONS, body, {})
    assert after.tokens == pytest.approx(500, rel=0.01)
    assert after.hashes == before.hashes  # what is cached stays known
    assert after.cached(len(after.hashes)) == pytest.approx(480, rel=0.02)
    measure.learn(measure.call(COMPLETIONS, {"prompt": "ab"}, {}), 10_000)  # too short to tell
    assert measure.call(COMPLETIONS, body, {}).tokens == after.tokens


def test_what_a_client_may_not_say() -> None:
    with pytest.raises(BadRequestError, match="kv_transfer_params"):
        Measure(16).call(COMPLETIONS, {"prompt": "a", "kv_transfer_params": []}, {})
    with pytest.raises(BadRequestError, match="model"):
        Measure(16).call(COMPLETIONS, {"prompt": "a", "model": 3}, {})
    assert Measure(16).call(COMPLETIONS, {"prompt": ["a", "b"]}, {}).whole is Whole.SEVERAL_PROMPTS


def test_a_rate_is_measured_while_the_engine_is_busy() -> None:
    meter = RateMeter()
    meter.begin(0.0)
    meter.end(50.0, 1000)  # the first is slow and says nothing
    assert meter.rate is None
    meter.begin(100.0)
    meter.begin(100.5)  # together with the first: one batch
    meter.end(101.0, 500)
    meter.end(101.0, 500)
    assert meter.rate == pytest.approx(1000.0)
    meter.begin(200.0)
    meter.end(300.0, 10)  # too little to tell
    meter.begin(400.0)
    meter.end(401.0, 0)  # failed
    assert meter.rate == pytest.approx(1000.0)
    meter.begin(500.0)
    meter.end(500.5, 1000)
    assert meter.rate == pytest.approx(1200.0)
    meter.reset()
    assert meter.rate is None


def test_gaps_tell_a_step_from_the_mean() -> None:
    meter = GapMeter()
    meter.recent.extend([0.01] * 30 + [0.5] * 2)
    meter.update()
    assert meter.step == 0.01
    assert meter.mean == pytest.approx(0.040625)
    meter.update()
    assert meter.mean is None  # nothing has come since: unknown, not zero


def test_a_link_is_measured_from_what_the_connector_counts() -> None:
    meter = LinkMeter()

    def look(sent: float, tokens: float, seconds: float) -> None:
        lines = f"vllm:kvxfer_wire_bytes_total {sent}\nvllm:kvxfer_loaded_tokens_total {tokens}\n"
        meter.read("e", parse(lines + f"vllm:kvxfer_load_seconds_sum {seconds}\n"))

    meter.read("e", parse("other 1\n"))
    assert meter.link is None
    look(1e6, 1000, 0.1)
    assert meter.link is not None
    assert meter.link.bytes_per_second == pytest.approx(1e7)
    assert meter.link.kv_bytes_per_token == pytest.approx(1e3)
    look(1e6, 1000, 0.1)  # nothing new
    look(2e6, 2000, 0.15)
    assert meter.link.bytes_per_second == pytest.approx(1.2e7)
    look(5.0, 5, 0.1)  # it has restarted
    assert meter.link.bytes_per_second == pytest.approx(1.2e7)


def test_reprefills_are_those_that_never_show() -> None:
    watch = Reprefills()

    def look(loads: int, declined: int = 0, inflight: int = 0) -> int:
        text = f"vllm:kvxfer_loads_total {loads}\nvllm:kvxfer_declined_total {declined}\n"
        return watch.look(parse(text), inflight)

    assert look(5) == 0  # what came before does not count
    watch.sent()
    assert look(5) == 0  # it may show at the next look
    assert look(6) == 0
    for _ in range(4):
        watch.sent()
    assert look(7) == 0
    assert look(8, 1) == 1
    assert look(8, 1) == 0  # and is counted once
    assert look(9, 3, inflight=3) == 0  # for those who still wait
    for _ in range(3):
        watch.sent()
    assert look(9, 3) == 0
    assert look(11, 3) == 0  # for clients that have left
    watch.sent()
    assert look(11, 3) == 0
    assert look(11, 3) == 1
    assert watch.look(parse("other 1\n"), 0) == 0
    assert look(0) == 0  # a new process
    watch.sent()
    assert look(0) == 0
    assert look(0) == 1


@pytest.mark.parametrize(
    ("body", "fault"),
    [
        (b'{"error": {"code": 400}}', True),
        (b'{"error": {"type": "BadRequestError"}}', True),
        (b'{"code": 422}', True),
        (b'{"error": {"code": 500}}', False),
        (b'{"error": "text"}', False),
        (b"[]", False),
        (b"<html>", False),
        (b"", False),
    ],
)
def test_whose_fault_an_error_is(body, fault) -> None:
    assert clients_fault(500, body) is fault


@in_loop
async def test_admission_is_first_come_first_served() -> None:
    limit = 2
    admission = Admission(lambda: limit, 3, 10.0)
    order: list[int] = []
    most = 0

    async def client(number: int) -> None:
        nonlocal most
        async with admission.slot():
            order.append(number)
            most = max(most, admission.inside)
            await asyncio.sleep(0.01)

    tasks = [asyncio.create_task(client(number)) for number in range(5)]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    with pytest.raises(RefusedError) as refused:
        async with admission.slot():
            pass
    assert refused.value.status == 429
    assert 1 <= refused.value.retry_after <= 30
    await asyncio.gather(*tasks)
    assert order == [0, 1, 2, 3, 4]
    assert most == 2
    assert admission.inside == admission.waiting == 0


@in_loop
async def test_admission_gives_up_in_time_and_takes_none_where_there_is_none() -> None:
    limit = 1
    admission = Admission(lambda: limit, 3, 0.05)
    async with admission.slot():
        with pytest.raises(RefusedError) as refused:
            async with admission.slot():
                pass
        assert (refused.value.status, refused.value.reason) == (503, "queue_timeout")
        limit = 0
        with pytest.raises(RefusedError) as refused:
            async with admission.slot():
                pass
        assert refused.value.reason == "no_engine"
    assert admission.inside == admission.waiting == 0


@in_loop
async def test_admission_lets_in_who_waits_when_engines_recover() -> None:
    """A breaker that may be tried again tells nobody, and those inside may all have left."""
    limit = 1
    admission = Admission(lambda: limit, 9, 30.0)

    async def client() -> None:
        async with admission.slot():
            pass

    async with admission.slot():
        waiting = [asyncio.create_task(client()) for _ in range(3)]
        await asyncio.sleep(0)
        limit = 0
    assert admission.inside == 0
    assert admission.waiting == 3
    limit = 1
    await asyncio.wait_for(asyncio.gather(*waiting), 5)
    assert admission.inside == admission.waiting == 0


@in_loop
async def test_admission_loses_no_place_to_those_who_leave() -> None:
    admission = Admission(lambda: 2, 100, 0.03)
    chance = random.Random(3)

    async def client() -> None:
        try:
            async with admission.slot():
                await asyncio.sleep(chance.uniform(0, 0.01))
        except RefusedError:
            pass

    tasks = []
    for _ in range(200):
        tasks.append(asyncio.create_task(client()))
        await asyncio.sleep(0.001)
        if chance.random() < 0.3:
            chance.choice(tasks).cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert admission.inside == admission.waiting == 0


RULED = ("stream", "n", "max_tokens", "max_completion_tokens", "min_tokens")


@given(
    st.dictionaries(st.text(max_size=8), st.integers() | st.text(max_size=9), max_size=4),
    st.dictionaries(st.sampled_from(RULED), st.integers(1, 9)),
)
def test_legs_say_what_the_client_said(body, own) -> None:
    others = ("model", "vllm_xargs", *RULED)
    body = {name: value for name, value in body.items() if name not in others}
    asked = {**body, **own}
    call = Measure(16).call(COMPLETIONS, asked, {})
    assert json.loads(decode_body(call, None)) == asked
    assert json.loads(decode_body(call, {"a": 1})) == {**asked, "kv_transfer_params": {"a": 1}}
    first = json.loads(prefill_body(call, {"b": 2}))
    assert first.pop("kv_transfer_params") == {"b": 2}
    assert first.pop("stream") is False
    assert first.pop("max_tokens") == 1
    for name in ("n", "max_completion_tokens"):
        assert first.pop(name, None) == (1 if name in own else None)
    assert first == body
