"""Prefixes in decode engines' caches ahead of need."""

from __future__ import annotations

import asyncio
import json

import pytest
from gateway.rig import ADMIN, LONG, in_loop, rig

from kvxfer.integrations.gateway import prewarm_command

SYSTEM = {"role": "system", "content": "Be brief, and answer in French. " * 40}


@in_loop
async def test_prefixes_are_placed_on_each_decode_engine() -> None:
    async with rig(prefill=1, decode=2, how={"details": True}) as it:
        prefixes = [{"prompt": LONG, "model": "m"}, {"messages": [SYSTEM], "model": "m"}]
        status, answer, _ = await it.post({"prefixes": prefixes}, "/admin/prewarm", headers=ADMIN)
        assert status == 200
        names = {decode.name for decode in it.decode}
        for prefix in answer["prefixes"]:
            assert prefix["engines"].keys() == names
            assert {one["state"] for one in prefix["engines"].values()} == {"placed"}
        # Each was prefilled once: what the prefill engine has cached it does not compute again.
        assert [len(decode.bodies("fetch")) for decode in it.decode] == [2, 2]
        assert all(body["max_tokens"] == 1 for body in it.decode[0].bodies("fetch"))
        assert await it.counted("prewarmed_prefixes") == 4
        # What begins with a prefix goes to the decode engine, which lacks only the rest.
        assert await it.ask([*LONG, *range(10)]) == ("local", "short")
        messages = [SYSTEM, {"role": "user", "content": "Hello?"}]
        _, _, headers = await it.post({"messages": messages, "model": "m"}, "/v1/chat/completions")
        assert headers["X-Kvxfer-Place"] == "local"
        async with it.client.get("/admin/prewarm", headers=ADMIN) as report:
            assert await report.json() == answer
        await it.settle()


@in_loop
async def test_prefixes_are_kept_and_placed_again_after_a_restart() -> None:
    async with rig() as it:
        body = {
            "prefixes": [{"prompt": LONG, "model": "m"}],
            "keep_seconds": 60,
            "every_seconds": 0.1,
        }
        await it.post(body, "/admin/prewarm", headers=ADMIN)
        prefix = it.gateway.prewarmer.prefixes[0]
        name = it.decode[0].name
        await it.until(lambda: prefix.fates[name].value == "kept")
        assert len(it.decode[0].bodies("fetch")) == 1
        engine = it.engine(it.decode[0])
        await it.until(lambda: it.gateway.monitor._counts[engine.url][0] > 0)
        await it.decode[0].restart()
        await it.until(lambda: engine.boots >= 1)
        await it.until(lambda: prefix.fates[name].value == "placed")
        await it.until(lambda: prefix.fates[name].value == "kept")


@in_loop
async def test_without_prefill_engines_the_decode_engine_computes() -> None:
    async with rig(prefill=0) as it:
        body = {"prefixes": [{"prompt": LONG, "model": "m"}]}
        _, answer, _ = await it.post(body, "/admin/prewarm", headers=ADMIN)
        (found,) = answer["prefixes"][0]["engines"].values()
        assert found["state"] == "computed"
        it.decode[0].faults.statuses = [500, 500]
        body = {"prefixes": [{"prompt": [1, *LONG], "model": "m"}]}
        _, answer, _ = await it.post(body, "/admin/prewarm", headers=ADMIN)
        (found,) = answer["prefixes"][0]["engines"].values()
        assert found["state"] == "failed"
        assert "500" in found["error"]
        assert await it.counted("prewarmed_prefixes") == 0


@in_loop
async def test_what_was_computed_after_all_is_not_called_placed() -> None:
    async with rig(how={"details": True}) as it:
        it.prefill[0].faults.statuses = [500]
        body = {"prefixes": [{"prompt": LONG, "model": "m"}]}
        _, answer, _ = await it.post(body, "/admin/prewarm", headers=ADMIN)
        (found,) = answer["prefixes"][0]["engines"].values()
        assert found["state"] == "computed"


@in_loop
async def test_only_the_last_who_asked_is_kept() -> None:
    async with rig() as it:
        body = {"prefixes": [{"prompt": LONG}], "keep_seconds": 60, "every_seconds": 0.1}
        it.decode[0].faults.delay = 0.1
        await asyncio.gather(*(it.post(body, "/admin/prewarm", headers=ADMIN) for _ in range(2)))
        names = [task.get_coro().__qualname__ for task in asyncio.all_tasks()]
        assert names.count("Prewarmer._keep") == 1


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"prefixes": 3},
        {"prefixes": [3]},
        {"prefixes": [{}]},
        {"prefixes": [{"prompt": "a", "messages": []}]},
        {"prefixes": [], "keep_seconds": "x"},
        {"prefixes": [], "every_seconds": 0},
        {"prefixes": [], "every_seconds": float("nan"), "keep_seconds": 1},
        {"prefixes": [], "keep_seconds": float("inf")},
        {"prefixes": [], "keep_seconds": -1},
        {"prefixes": [{"prompt": "a", "kv_transfer_params": {}}]},
    ],
)
@in_loop
async def test_requests_that_are_none(body) -> None:
    async with rig() as it:
        status, _, _ = await it.post(body, "/admin/prewarm", headers=ADMIN)
        assert status == 400
        assert not it.decode[0].requests


@pytest.fixture
def lines(tmp_path) -> str:
    path = tmp_path / "prefixes.jsonl"
    path.write_text(json.dumps({"prompt": LONG}) + "\n\n" + json.dumps({"messages": [SYSTEM]}))
    return str(path)


@pytest.mark.parametrize("by", ["gateway", "engines"])
def test_the_command(by, lines, capsys, monkeypatch) -> None:
    monkeypatch.setenv("KVXFER_ADMIN_KEY", "admin")

    async def run() -> int:
        async with rig(decode=2) as it:
            arguments = [lines, "--model", "m", "--json"]
            if by == "gateway":
                arguments += ["--gateway", f"http://127.0.0.1:{it.port}"]
            else:
                arguments += ["--prefill", it.prefill[0].url, "--keep", "0.3", "--every", "0.1"]
                for decode in it.decode:
                    arguments += ["--decode", decode.url]
            status = await asyncio.to_thread(prewarm_command.main, arguments)
            assert [len(decode.bodies("fetch")) for decode in it.decode] == [2, 2]
            assert len(it.decode[0].bodies("all")) >= (by == "engines")
            assert it.decode[0].requests[0][2]["model"] == "m"
            return status

    assert asyncio.run(run()) == 0
    report = json.loads(capsys.readouterr().out)
    states = {one["state"] for prefix in report for one in prefix["engines"].values()}
    assert states == ({"placed"} if by == "gateway" else {"kept"})
    assert "tokens" in prewarm_command.report_text(report)


@pytest.mark.parametrize(
    ("arguments", "text", "what"),
    [
        ([], "{}", "either"),
        (["--gateway", "http://127.0.0.1:9", "--decode", "http://a:1"], "{}", "either"),
        (["--gateway", "http://127.0.0.1:9"], "", "no prefixes"),
        (["--gateway", "http://127.0.0.1:9"], "{", "line 1"),
        (["--gateway", "http://127.0.0.1:9"], "{}", "line 1"),
        (["--gateway", "http://127.0.0.1:9"], '{"prompt": "a"}', "127.0.0.1:9"),
        (["--gateway", "http://127.0.0.1:9", "--every", "0"], '{"prompt": "a"}', "--every"),
        (["--decode", "http://127.0.0.1:9"], '{"prompt": "a"}', "no decode engine"),
    ],
)
def test_the_command_says_what_is_wrong(arguments, text, what, tmp_path, capsys) -> None:
    path = tmp_path / "prefixes.jsonl"
    path.write_text(text)
    assert prewarm_command.main([str(path), *arguments]) == 1
    assert what in capsys.readouterr().err
