"""Short campaigns, and the controls that show that they would notice."""

from __future__ import annotations

import dataclasses
import functools
import os
from typing import Any

import pytest
from faults.campaign import gpu_faults, network
from faults.campaign.draw import draw_schedule
from faults.campaign.driver import run
from faults.campaign.fleet import Fleet
from faults.campaign.outcome import Finding, Outcome
from faults.campaign.proxy import Proxy
from faults.campaign.rails import queue_pairs
from faults.campaign.report import show, summary
from faults.campaign.rest import Rest
from faults.campaign.schedule import (
    CONTENT,
    GPU_LANES,
    HEADS,
    LAYERS,
    TRANSPORTS,
    AgentPlan,
    OfferPlan,
    Schedule,
    Step,
)
from faults.campaign.shrink import as_test, shrink
from faults.campaign.sweep import missed, sweep_schedule
from faults.campaign.table import BEGIN, END, insert, table
from faults.campaign.watch import HANDSHAKE, KINDS
from kvtest import fake_gpu, fake_verbs
from kvtest.agents import LONG, consumer, producer, until
from kvtest.caches import Geometry, Paged

import kvxfer
from kvxfer import AgentRef

_SIDE = Geometry(layers=LAYERS, content=CONTENT, heads=HEADS, num_blocks=64)
_FETCH = {"number": 0, "consumer": "decode", "skip": 0, "timeout": 60.0, "codec": "raw"}


def _simple(transport: str, *steps: Step) -> Schedule:
    """Two agents, an offer that is fetched, and more."""
    agents = (AgentPlan("prefill", "producer", _SIDE), AgentPlan("decode", "consumer", _SIDE))
    offers = (OfferPlan(("prefill",), 40, consumers=2), OfferPlan(("prefill",), 16))
    work = (Step(0.0, "offer", {"number": 0}), Step(0.0, "fetch", {**_FETCH, "id": 0}))
    return Schedule(1, transport, agents, offers, (*work, *steps))


_NEVER_OFFERED = Step(0.0, "fetch", {**_FETCH, "id": 9, "number": 1, "timeout": 0.1})


@pytest.mark.timeout(300)
@pytest.mark.parametrize("sabotage", [None, "wrong", "late", "leak", "grow"])
def test_what_goes_wrong_is_noticed(sabotage: str | None) -> None:
    """The controls: a flipped bit, a handle that lasts too long, descriptors or memory kept."""
    if sabotage == "grow" and "KVXFER_EXPECT_SANITIZE" in os.environ:
        pytest.skip("ASan's own memory is granted: each fetch would have to keep more")
    outcome = run(_simple("loopback", _NEVER_OFFERED), sabotage)
    found = {"grow": {"leak"}, None: set()}.get(sabotage, {sabotage})
    assert {finding.kind for finding in outcome.findings} == found
    assert outcome.fetches["OK"] >= 1


@pytest.mark.timeout(300)
def test_a_leak_is_noticed_beside_adapters() -> None:
    """One descriptor, though queue pairs have some that come and go with rails."""
    if (why := fake_verbs.missing()) is not None:
        pytest.skip(why)
    outcome = run(_simple("verbs", _NEVER_OFFERED), "leak")
    assert {finding.kind for finding in outcome.findings} == {"leak"}


def _on_gpus(transport: str, *steps: Step, knobs: tuple[tuple[str, Any], ...] = ()) -> Schedule:
    """The same between two GPUs, in one process or two."""
    schedule = _simple(transport, *steps)
    agents = tuple(
        dataclasses.replace(agent, device=device, streams=device == 1, knobs=knobs)
        for device, agent in enumerate(schedule.agents)
    )
    return dataclasses.replace(schedule, agents=agents, gpus="cuda")


needs_gpus = pytest.mark.skipif(fake_gpu.missing() is not None, reason=str(fake_gpu.missing()))


@needs_gpus
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("sabotage", "digest", "found"),
    [
        ("short", True, {"unexplained"}),
        ("short", False, {"wrong"}),
        ("event", True, {"leak"}),
    ],
)
def test_what_goes_wrong_on_gpus_is_noticed(sabotage: str, digest: bool, found: set[str]) -> None:
    """The controls: copies that leave bytes out, with and without digests, and events kept."""
    soon = Step(1.5, "cancel", {"id": 0})
    outcome = run(_on_gpus("loopback", soon, knobs=(("digest", digest),)), sabotage)
    assert {finding.kind for finding in outcome.findings} == found
    assert any("nothing was damaged" in finding.why for finding in outcome.findings) is (
        sabotage == "short" and digest
    )


@needs_gpus
@pytest.mark.timeout(300)
def test_gpus_of_two_processes() -> None:
    """Memory that they share goes bad, then one hangs: its process begins anew."""
    first = {"agent": "decode", "fault": "shared memory goes bad", "call": "", "nth": 0, "times": 9}
    other = {**first, "agent": "prefill", "fault": "hangs"}
    again = [Step(0.1, "fetch", {**_FETCH, "id": at, "timeout": 20.0}) for at in (1, 2)]
    steps = [
        *(Step(0.0, "gpus", {**first, "seconds": 0.1}), again[0]),
        *(Step(0.2, "gpus", {**other, "seconds": 3.5}), again[1]),
    ]
    schedule = _on_gpus("shm", *steps)
    prefill, decode = schedule.agents
    prefill = dataclasses.replace(prefill, knobs=(("gpu_timeout", 2.5),))
    outcome = run(dataclasses.replace(schedule, agents=(prefill, decode)))
    assert outcome.findings == []
    assert outcome.faults == {"GPU: shared memory goes bad": 1, "GPU: hangs": 1}
    assert outcome.rounds_by_kind == {"over shm": 1, "on GPUs": 1}
    assert outcome.paths["gpu-ipc"] >= 2


@pytest.mark.parametrize(
    ("status", "message", "happened", "why"),
    [
        ("NO_RESOURCES", "cuLaunchKernel failed: no", ["GPU: launches fail"], None),
        ("NO_RESOURCES", "cuLaunchKernel failed: no", ["GPU: copies fail"], "nobody let"),
        ("NO_RESOURCES", "cuIpcOpenMemHandle failed: no", ["GPU: sharing fails"], "nobody let"),
        ("OK", "'p': cuIpcOpenMemHandle failed: no", ["GPU: sharing fails"], None),
        ("NO_RESOURCES", "device 0 was given up", ["GPU: launches fail"], "no GPU hangs"),
        ("NO_RESOURCES", "device 0 was given up", ["GPU: hangs"], None),
        ("NO_RESOURCES", "cuMemAlloc failed: no", ["no more descriptors"], None),
        ("NO_RESOURCES", "too much", ["GPU: slow"], "nothing was missing"),
        ("CORRUPT", "a chunk", ["GPU: slow"], "nothing was damaged"),
        ("CORRUPT", "a chunk", ["link: corrupt"], None),
        ("TIMEOUT", "late", [], None),
    ],
)
def test_ends_need_reasons(status: str, message: str, happened: list[str], why: str | None) -> None:
    found = gpu_faults.unexplained(status, message, happened, "cuda")
    assert (found is None) is (why is None)
    assert found is None or why in found


def test_lost_queue_pairs_are_seen() -> None:
    with producer("verbs") as prefill, consumer("verbs") as decode, fake_verbs.no_faults_left():
        source, target = Paged(_SIDE, 1), Paged(_SIDE)
        prefill.register(source.cache)
        decode.register(target.cache)

        def queue_pairs_now() -> dict[str, int | None]:
            offer = prefill.offer(source.cache, [0], 16)
            fetch = decode.fetch(offer.ticket, target.cache, [0], timeout=LONG)
            fetch.wait()
            return queue_pairs(fetch.report)

        assert queue_pairs_now() == {"prefill": 4}
        fake_verbs.set_port("fake0", False)
        until(lambda: queue_pairs_now() == {"prefill": None})
        fake_verbs.set_port("fake0", True)
        until(lambda: queue_pairs_now() == {"prefill": 4})


def test_queue_pairs_that_stay_away_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    fleet = Fleet(_simple("verbs"))
    rest = Rest(fleet)
    monkeypatch.setattr(fleet, "serve_until", lambda _: None)
    monkeypatch.setattr(rest, "_probe", lambda: None)
    fleet.queue_pairs = {("decode", "prefill"): 4}
    rest._await_rails()
    assert fleet.outcome.findings == []
    fleet.queue_pairs["decode", "prefill"] = None
    rest._await_rails()
    assert [finding.kind for finding in fleet.outcome.findings] == ["late"]
    fleet.end()


@pytest.mark.timeout(300)
def test_a_strike_at_its_moment() -> None:
    """A producer dies when the second consumer's FETCH is on its way to it."""
    strike = {"agent": "prefill", "producer": "prefill", "how": "kill", "at": "FETCH"}
    again = Step(0.3, "fetch", {**_FETCH, "id": 1})
    outcome = run(_simple("tcp", Step(1.0, "strike", {**strike, "seconds": 0.1}), again))
    assert outcome.findings == []
    assert outcome.faults == {"kill at FETCH": 1}
    assert outcome.fetches["PEER_LOST"] == 1
    assert len(outcome.detection["killed"]) == 1


def test_what_passes_is_seen() -> None:
    """All steps of a fetch over TCP, in the order of their kinds."""
    seen: list[str] = []
    with producer("tcp") as prefill, consumer("tcp") as decode:
        proxy = Proxy()
        proxy.target = prefill.address
        for kind in KINDS:
            proxy.watch(kind, functools.partial(seen.append, kind))
        source, target = Paged(_SIDE, 1), Paged(_SIDE)
        prefill.register(source.cache)
        decode.register(target.cache)
        reference = AgentRef(name="prefill", address=proxy.address)
        ticket = kvxfer.issue_ticket("r", [reference], num_tokens=40)
        offer = prefill.offer(source.cache, [0, 1, 2], ticket=ticket)
        decode.fetch(ticket, target.cache, [2, 3, 4], timeout=LONG).wait()
        offer.wait(LONG)
        proxy.close()
    assert seen[:4] == ["hello", "reply", "proof", "choice"]
    assert set(seen) >= {*HANDSHAKE, "HELLO", "LAYOUT", "FETCH", "ACCEPT", "WRITE", "DONE"}


@pytest.mark.timeout(300)
def test_a_partition() -> None:
    """Packets to a producer are lost: the heartbeats tell, and all works once it is over."""
    if (why := network.missing()) is not None:
        pytest.skip(f"no network namespaces here: {why}")
    knobs = (("heartbeat_interval", 0.1), ("heartbeat_timeout", 0.5))
    cut = Step(1.0, "cut", {"agent": "prefill", "direction": "up", "seconds": 1.5})
    again = Step(0.0, "fetch", {**_FETCH, "id": 1})
    schedule = _simple("namespaces", cut, again)
    agents = tuple(dataclasses.replace(agent, knobs=knobs) for agent in schedule.agents)
    outcome = run(dataclasses.replace(schedule, agents=agents, secret="s"))
    assert outcome.findings == []
    assert outcome.fetches["PEER_LOST"] == 1
    assert len(outcome.detection["partitioned"]) == 1


@pytest.mark.timeout(300)
def test_a_sweep_says_what_it_missed() -> None:
    kinds = ("CREDIT", "CANCELLED", "ACCEPT")
    outcome = run(sweep_schedule("decode", "stop", 0.1, kinds[:2]))
    assert outcome.findings == []
    assert missed(outcome, "stop", kinds[:2]) == []
    assert len(missed(outcome, "stop", kinds)) == 1


@pytest.mark.timeout(300)
def test_adapters_that_fail() -> None:
    """All in one process, over adapters made up, under TLS."""
    if (why := fake_verbs.missing()) is not None:
        pytest.skip(why)
    broken = {"how": "completion queues", "device": "fake0", "seconds": 0.1}
    again = Step(0.3, "fetch", {**_FETCH, "id": 1})
    schedule = _simple("verbs", Step(0.1, "adapters", broken), again)
    outcome = run(dataclasses.replace(schedule, secret="s", tls=True))
    assert outcome.findings == []
    assert outcome.faults == {"adapters: completion queues": 1}
    assert outcome.rounds_by_kind == {"over verbs": 1, "under TLS": 1, "with a secret": 1}
    assert outcome.fetches["OK"] >= 1


@pytest.mark.parametrize("lane", [*TRANSPORTS, *GPU_LANES])
def test_a_schedule_comes_from_its_seed(lane: str) -> None:
    one, same, other = (draw_schedule(seed, lane, 100) for seed in (3, 3, 4))
    assert one == same != other
    assert bool(one.gpus) is lane.startswith("gpu-")
    assert Schedule.from_json(one.to_json()) == one
    assert {step.kind for step in one.steps} > {"offer", "fetch", "ready", "rest"}


def test_shrinking_finds_the_steps_that_do_it() -> None:
    schedule = draw_schedule(5, "tcp", 100)
    guilty = [17, 60]
    wanted = [schedule.steps[i] for i in guilty]
    kept = shrink(schedule, lambda part: all(step in part.steps for step in wanted))
    assert [schedule.steps[i] for i in kept] == wanted
    text = as_test(schedule, "draw_schedule(5, 'tcp', 100)", kept, [Finding("wrong", "two\nlines")])
    compile(text, "made", "exec")
    assert str(kept) in text


def test_the_summary_counts() -> None:
    total = Outcome()
    for _ in range(2):
        total.add(
            Outcome(
                rounds=1,
                findings=[Finding("late", "so late")],
                detection={"killed": [0.1, 0.3], "partitioned": [], "corrupted": []},
            )
        )
    result = summary(total, seed=1)
    assert result["rounds"] == 2
    assert result["findings"]["late"] == 2
    assert result["findings"]["wrong"] == 0
    assert result["seconds until noticed"] == {"killed": {"times": 4, "median": 0.2, "max": 0.3}}
    assert "so late" in show(result)
    text = table({**result, "seconds": 3.0})
    assert "| handles past their deadline | 2 |" in text
    assert "| wrong bytes | 0 |" in text
    assert "median 0.200 s, at most 0.300 s (4 fetches)" in text
    assert insert(f"a\n{BEGIN}old\n{END}b\n", text) == f"a\n{BEGIN}{text}{END}b\n"
