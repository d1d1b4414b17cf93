"""Engines that come and go: the file, registration, heartbeats, draining; and who may do that."""

from __future__ import annotations

import asyncio
import json

import pytest
from gateway.fake import FakeEngine
from gateway.rig import ADMIN, LONG, SHORT, in_loop, rig

from kvxfer.errors import InvalidError
from kvxfer.integrations.gateway.discovery import read_entries
from kvxfer.integrations.gateway.monitor import Monitor
from kvxfer.integrations.gateway.settings import Entry, Role, Settings


def engines_file(path, **engines: str) -> None:
    entries = [{"url": url, "role": role} for url, role in engines.items()]
    path.write_text(json.dumps({"engines": entries}))


@in_loop
async def test_a_file_is_read_again(tmp_path) -> None:
    path = tmp_path / "engines.json"
    extra = await FakeEngine().start()

    async def without_it() -> None:
        async with rig(engines=(), engines_file=str(path)):
            pass

    with pytest.raises(InvalidError, match="engines.json"):
        await without_it()
    path.write_text('{"engines": []}')
    async with rig(prefill=1, decode=1, engines=(), engines_file=str(path)) as it:
        assert (await it.post({"prompt": SHORT}))[0] == 503
        engines_file(path, **{it.prefill[0].url: "prefill", it.decode[0].url: "decode"})
        await it.until(lambda: len(it.gateway.pool.usable(Role.DECODE, None)) == 1)
        await it.until(lambda: len(it.gateway.pool.usable(Role.PREFILL, None)) == 1)
        assert await it.ask(LONG) == ("remote", "long")
        path.write_text('{"engines": [{"url"')  # half of a file changes nothing
        await asyncio.sleep(0.2)
        assert await it.ask([1, *LONG]) == ("remote", "long")
        engines_file(path, **{it.prefill[0].url: "prefill", extra.url: "decode"})
        await it.until(lambda: it.engine(it.decode[0]) is None)
        await it.until(lambda: len(it.gateway.pool.usable(Role.DECODE, None)) == 1)
        await it.ask([2, *LONG])
        assert len(extra.bodies("fetch")) == 1
    await extra.stop()


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("{", "can't read"),
        ("[]", "write"),
        ('{"engines": {}}', "write"),
        ('{"engines": [3]}', "no engine"),
        ('{"engines": [{"url": "http://a:1"}]}', "role"),
        ('{"engines": [{"url": "http://a:1", "role": "both"}]}', "role"),
        ('{"engines": [{"url": "http://a:1/x", "role": "decode"}]}', "HOST:PORT"),
        ('{"engines": [{"url": "ftp://a:1", "role": "decode"}]}', "HOST:PORT"),
        ('{"engines": [{"url": "http://u@a:1", "role": "decode"}]}', "HOST:PORT"),
        ('{"engines": [{"url": "http://:key@a:1", "role": "decode"}]}', "HOST:PORT"),
        ('{"engines": [{"url": "http://[a:1", "role": "decode"}]}', "HOST:PORT"),
        ('{"engines": [{"url": "http://a:1", "role": ["decode"]}]}', "role 'prefill'"),
        ('{"engines": [{"url": "http://a:99999", "role": "decode"}]}', "HOST:PORT"),
        ('{"engines": [{"url": "http://a:1", "role": "decode", "x": 1}]}', "x: not known"),
        (
            '{"engines": [{"url": "http://a:1", "role": "decode"},'
            ' {"url": "http://a:1/", "role": "decode"}]}',
            "twice",
        ),
        ('{"engines": [{"url": "http://a:1", "role": "decode", "kv_events": "a"}]}', "tcp://"),
    ],
)
def test_files_that_are_none(tmp_path, text, what) -> None:
    path = tmp_path / "engines.json"
    path.write_text(text)
    with pytest.raises(InvalidError, match=what):
        read_entries(path)


@in_loop
async def test_an_engine_registers_and_is_drained_without_a_heartbeat() -> None:
    async with rig(prefill=1, decode=0, register_ttl=0.6) as it:
        engine = await FakeEngine().start()
        it.decode.append(engine)
        entry = {"url": engine.url, "role": "decode"}
        status, answer, _ = await it.post(entry, "/admin/engines", headers=ADMIN)
        assert (status, answer["heartbeat_within"]) == (200, 0.6)
        await it.until(lambda: it.gateway.pool.usable(Role.DECODE, None))
        assert await it.ask(LONG) == ("remote", "long")
        for _ in range(4):
            await asyncio.sleep(0.2)
            await it.post(entry, "/admin/engines", headers=ADMIN)
        assert it.engine(engine) is not None
        assert await it.ask(LONG) == ("local", "full_hit")  # it is still the same engine
        await it.until(lambda: it.engine(engine) is None)
        assert (await it.post({"prompt": SHORT}))[0] == 503
        await engine.stop()


@pytest.mark.parametrize("headers", [{}, {"Authorization": "Bearer x"}])
@in_loop
async def test_only_who_has_the_key_names_engines(headers) -> None:
    async with rig() as it:
        entry = {"url": "http://127.0.0.1:9", "role": "decode"}
        status, _, _ = await it.post(entry, "/admin/engines", headers=headers)
        assert status == 401
    async with rig(admin_key=None) as it:
        status, _, _ = await it.post(entry, "/admin/engines", headers=ADMIN)
        assert status == 403
        assert it.gateway.pool.get(entry["url"]) is None


@pytest.mark.parametrize(
    "entry",
    [
        {},
        [],
        {"url": 3, "role": "decode"},
        {"url": "http://a:1", "role": "x"},
        {"url": "file:///etc/passwd", "role": "decode"},
    ],
)
@in_loop
async def test_registrations_that_are_none(entry) -> None:
    async with rig() as it:
        status, answer, _ = await it.post(entry, "/admin/engines", headers=ADMIN)
        assert status == 400
        assert answer["error"]["message"]


@in_loop
async def test_a_known_engine_does_not_change_its_role() -> None:
    async with rig() as it:
        for role in ("prefill", "decode"):  # another role; the same from another source
            entry = {"url": it.decode[0].url, "role": role}
            status, _, _ = await it.post(entry, "/admin/engines", headers=ADMIN)
            assert status == 400
        assert await it.ask(LONG) == ("remote", "long")


@in_loop
async def test_an_engine_is_drained_before_it_is_removed() -> None:
    async with rig(prefill=2, decode=2) as it:
        for decode in it.decode:
            decode.faults.gap = 0.1
        asked = [asyncio.create_task(it.ask([number, *LONG], stream=True)) for number in range(4)]
        await it.until(lambda: all(decode.active == 2 for decode in it.decode))
        leaving = it.decode[0]
        url = f"/admin/engines?url={leaving.url}"
        async with it.client.delete(url, headers=ADMIN) as answer:
            assert answer.status == 202
            assert (await answer.json())["state"] == "draining"
        more = [await it.ask([number, *SHORT]) for number in range(4)]
        assert len(more) == 4
        assert len(leaving.requests) == 2  # it got no new one
        async with it.client.delete(f"{url}&wait=20", headers=ADMIN) as answer:
            assert answer.status == 200
            assert (await answer.json())["idle"] is True
        assert leaving.active == 0
        await asyncio.gather(*asked)
        assert it.engine(leaving) is None
        assert await it.counted("engine_up", role="decode") == 1
        async with it.client.delete(url, headers=ADMIN) as answer:
            assert answer.status == 404


@in_loop
async def test_a_prefill_engine_is_drained_until_its_kv_is_fetched() -> None:
    async with rig() as it:
        it.decode[0].faults.admit_delay = 0.5
        asked = asyncio.create_task(it.ask(LONG))
        await it.until(lambda: it.prefill[0].held)
        drain = it.gateway.pool.drain(it.engine(it.prefill[0]))
        while it.prefill[0].held:
            assert not drain.done()
            await asyncio.sleep(0.01)
        await asked
        assert await drain is True


@in_loop
async def test_a_drain_has_an_end() -> None:
    async with rig(drain_timeout=0.2) as it:
        it.decode[0].faults.delay = 5.0
        asked = asyncio.create_task(it.post({"prompt": SHORT}))
        await it.until(lambda: it.decode[0].active)
        assert await it.gateway.pool.drain(it.engine(it.decode[0])) is False
        asked.cancel()


@in_loop
async def test_an_engine_that_registers_again_while_it_drains_is_taken_back() -> None:
    async with rig(prefill=1, decode=0) as it:
        engine = await FakeEngine().start()
        entry = Entry(engine.url, Role.DECODE)
        known = it.gateway.pool.register(entry)
        known.inflight += 1  # so that it can't leave at once
        known.expires = 0.0
        await it.until(lambda: known.draining)
        assert it.gateway.pool.register(entry) is known
        assert not known.draining
        await asyncio.sleep(0.2)
        known.inflight -= 1
        await asyncio.sleep(0.2)
        assert it.gateway.pool.get(engine.url) is known
        await engine.stop()


@in_loop
async def test_the_state_of_engines() -> None:
    async with rig() as it:
        await it.ask(LONG)
        async with it.client.get("/admin/engines", headers=ADMIN) as answer:
            found = (await answer.json())["engines"]
        assert [(one["role"], one["state"], one["models"]) for one in found] == [
            ("prefill", "up", ["m"]),
            ("decode", "up", ["m"]),
        ]
        assert found[1]["prefix_blocks"] == len(LONG) // 16


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_inflight": 0},
        {"queue_timeout": 0},
        {"prefill_rate": -1.0},
        {"idle_timeout": float("inf")},
        {"breaker_failures": 0},
    ],
)
def test_settings_that_make_no_sense(wrong) -> None:
    with pytest.raises(InvalidError, match=next(iter(wrong))):
        Settings(**wrong)


@in_loop
async def test_an_engine_that_comes_during_the_first_look_is_watched(monkeypatch) -> None:
    late = await FakeEngine().start()
    first = Monitor.look

    async def look(self: Monitor, engine) -> None:
        if len(list(self._pool)) == 1:
            self._pool.add(Entry(late.url, Role.DECODE), "file")
        await first(self, engine)

    monkeypatch.setattr(Monitor, "look", look)
    async with rig(prefill=0) as it:
        await it.until(lambda: it.engine(late).healthy)
        await it.settle()
    await late.stop()


@in_loop
async def test_a_heartbeat_does_not_undo_what_was_ordered() -> None:
    async with rig(prefill=0, decode=1) as it:
        engine = await FakeEngine().start()
        entry = {"url": engine.url, "role": "decode"}
        await it.post(entry, "/admin/engines", headers=ADMIN)
        known = it.engine(engine)
        known.inflight += 1
        async with it.client.delete(f"/admin/engines?url={engine.url}", headers=ADMIN) as answer:
            assert answer.status == 202
        status, answer, _ = await it.post(entry, "/admin/engines", headers=ADMIN)
        assert (status, answer["state"]) == (200, "draining")
        known.inflight -= 1
        await it.until(lambda: it.engine(engine) is None)
        # Whoever says so once it has gone is another, or the same started anew.
        await it.post(entry, "/admin/engines", headers=ADMIN)
        assert it.engine(engine) is not known
        await engine.stop()
