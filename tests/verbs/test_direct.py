"""The direct path: blocks to blocks, where both sides allow it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from kvtest import fake_verbs
from kvtest.agents import LONG, consumer, pair, producer, registered, until
from kvtest.caches import Geometry, Paged
from kvtest.direct import BUSY, BYTES, DIRECT, SIDE, TOKENS, fetched, needs_fake_adapters
from kvtest.strategies import Case, cases, examples

import kvxfer
from kvxfer import Status

pytestmark = needs_fake_adapters


@pytest.fixture(autouse=True)
def adapters() -> Iterator[None]:
    fake_verbs.use()
    with fake_verbs.no_faults_left():
        yield


@pytest.fixture(scope="module")
def agents() -> Iterator[tuple[kvxfer.Agent, kvxfer.Agent]]:
    fake_verbs.use()
    with pair("verbs", **DIRECT) as both:
        yield both


@settings(max_examples=examples(60), deadline=None)
@given(case=cases())
def test_any_geometry(agents: tuple[kvxfer.Agent, kvxfer.Agent], case: Case) -> None:
    """Every byte where it belongs, and no other byte touched, whatever the two sides look like."""
    prefill, decode = agents
    source, target, expected = (
        Paged(case.producer, case.seed),
        Paged(case.consumer),
        Paged(case.consumer),
    )
    expected.deliver(
        [source],
        case.producer_blocks,
        case.consumer_blocks,
        case.wanted,
        offered_from=case.offered[0],
        first_slot=case.slot,
    )
    with registered(prefill, source.cache), registered(decode, target.cache):
        offer = prefill.offer(
            source.cache,
            case.producer_blocks,
            case.offered[1] - case.offered[0],
            first_token=case.offered[0],
        )
        fetch = decode.fetch(
            offer.ticket,
            target.cache,
            case.consumer_blocks,
            tokens=slice(*case.wanted),
            first_slot=case.first_slot,
            timeout=LONG,
        )
        fetch.wait(LONG)
        assert offer.wait(LONG) is Status.OK
        report = fetch.report
    assert target.same_as(expected)
    if report.path == "direct":
        assert report.path_why == "as set"
    else:
        assert "runs of less than 16 bytes" in report.path_why
    row = case.consumer.content * source.arrays[0][0].itemsize
    if row >= 16:
        assert report.path == "direct"


def test_nothing_goes_through_the_arena() -> None:
    with pair("verbs", **DIRECT) as (prefill, decode):
        before = sum(map(fake_verbs.bytes_sent, fake_verbs.DEVICES))
        report = fetched(prefill, decode)
        assert (report.path, report.path_why) == ("direct", "as set")
        assert sum(map(fake_verbs.bytes_sent, fake_verbs.DEVICES)) - before >= report.bytes


def test_layers_that_become_ready_one_by_one() -> None:
    with pair("verbs", **DIRECT, **BUSY) as (prefill, decode):
        source, target = Paged(SIDE, seed=1), Paged(SIDE)
        prefill.register(source.cache)
        decode.register(target.cache)
        offer = prefill.offer(source.cache, range(32), TOKENS, ready=False)
        fetch = decode.fetch(offer.ticket, target.cache, range(32), timeout=LONG)
        for layer in (2, 0, 3, 1):
            source.arrays[layer][0][...] = layer + 5
            offer.mark_ready(layer)
        fetch.wait(LONG)
        assert fetch.report.path == "direct"
        assert target.same_as(source)


# Which path, and why


@pytest.mark.parametrize("ours", ["staged", "auto", "direct"])
@pytest.mark.parametrize("theirs", ["staged", "auto", "direct"])
def test_both_sides_have_their_say(ours: str, theirs: str) -> None:
    with producer("verbs", path=theirs) as prefill, consumer("verbs", path=ours) as decode:
        report = fetched(prefill, decode)
    direct = ours == "direct" and theirs != "staged"  # the runs are short
    assert report.path == ("direct" if direct else "staged")
    if ours == "staged":
        assert report.path_why == "path is set to staged"
    elif theirs == "staged":
        assert "'prefill' has path set to staged" in report.path_why
    elif ours == "auto":
        assert "runs of less than 310 KiB" in report.path_why


@pytest.mark.parametrize(("blocks", "path"), [(5, "direct"), (4, "staged")])
def test_auto_goes_by_the_length_of_runs(blocks: int, path: str) -> None:
    """A plane of a layer is one run, of 320 KiB or 256."""
    side = Geometry(layers=("a", "b"), content=128, num_blocks=blocks, block_size=64)
    knobs = {"path": "auto", "chunk_bytes": 4 << 20, "arena_bytes": 16 << 20}
    with pair("verbs", **knobs) as (prefill, decode):
        report = fetched(prefill, decode, side)
    assert report.path == path
    assert "310 KiB on average" in report.path_why


def test_codecs_are_staged() -> None:
    with pair("verbs", **DIRECT) as (prefill, decode):
        assert "codec fp8_e4m3 needs staging" in staged_with(prefill, decode, codec="fp8_e4m3")


def test_other_elements_are_staged() -> None:
    with pair("verbs", **DIRECT) as (prefill, decode):
        assert "chunks are coded" in staged_with(prefill, decode, dtype="float32")


def plain() -> Paged:
    """What any codec carries, and any type of element holds."""
    source = Paged(SIDE)
    for arrays in source.arrays:
        for array in arrays:
            array[...] = 0x3F80
    return source


def staged_with(
    prefill: kvxfer.Agent, decode: kvxfer.Agent, *, codec: str = "raw", dtype: str = "bfloat16"
) -> str:
    source, target = plain(), Paged(dataclasses.replace(SIDE, dtype=dtype))
    prefill.register(source.cache)
    decode.register(target.cache)
    offer = prefill.offer(source.cache, range(32), TOKENS)
    fetch = decode.fetch(offer.ticket, target.cache, range(32), codec=codec, timeout=LONG)
    fetch.wait(LONG)
    assert fetch.report.path == "staged"
    return fetch.report.path_why


@pytest.mark.parametrize("transport", ["tcp", "shm", "loopback", "ucx-tcp"])
def test_other_transports_have_none(transport: str) -> None:
    with pair(transport, **DIRECT) as (prefill, decode):
        report = fetched(prefill, decode)
    name = transport.removesuffix("-tcp")
    assert (report.path, report.path_why) == ("staged", f"{name} has no direct path")


def test_an_unknown_path() -> None:
    with pytest.raises(kvxfer.ConfigError, match="'scenic' is not known"):
        kvxfer.Config(path="scenic")


def test_a_fetch_of_two_producers_of_which_one_wants_staging() -> None:
    with (
        producer("verbs", "rank-0", **DIRECT) as open_one,
        producer("verbs", "rank-1", path="staged") as closed_one,
        consumer("verbs", **DIRECT) as decode,
    ):
        source, target = Paged(SIDE, seed=1), Paged(SIDE)
        decode.register(target.cache)
        agents = [(open_one, ["a", "b"]), (closed_one, ["c", "d"])]
        ticket = kvxfer.issue_ticket(
            "request",
            [agent.reference(layers=layers) for agent, layers in agents],
            num_tokens=TOKENS,
        )
        offers = []
        for agent, layers in agents:
            part = Paged(dataclasses.replace(SIDE, layers=tuple(layers)))
            part.deliver([source], range(32), range(32), (0, TOKENS))
            agent.register(part.cache)
            offers.append(agent.offer(part.cache, range(32), TOKENS, ticket=ticket))
        fetch = decode.fetch(ticket, target.cache, range(32), timeout=LONG)
        fetch.wait(LONG)
        assert target.same_as(source)
        assert sorted(fetch.report.path.split(", ")) == ["direct", "staged"]
        assert "as set" in fetch.report.path_why
        assert "'rank-1' has path set to staged" in fetch.report.path_why
        assert all(offer.wait(LONG) is Status.OK for offer in offers)


def test_direct_writes_do_not_wait_for_staging_memory() -> None:
    """Both from one peer, and all that the peer may have is taken."""
    knobs = {"chunk_bytes": 8 << 10, "arena_bytes": 8 << 20, "window": 400}
    with pair("verbs", **DIRECT, **knobs) as (prefill, decode):
        sources = [plain(), Paged(SIDE, seed=2)]
        wide = dataclasses.replace(SIDE, dtype="float32")
        staged, direct = Paged(wide), Paged(SIDE)
        for paged in sources:
            prefill.register(paged.cache)
        for paged in (staged, direct):
            decode.register(paged.cache)
        offers = [prefill.offer(paged.cache, range(32), TOKENS, consumers=2) for paged in sources]
        warm = decode.fetch(offers[1].ticket, direct.cache, range(32), timeout=LONG)
        warm.wait(LONG)
        assert warm.report.path == "direct"
        direct.poison()
        fake_verbs.hold_sends(True)
        sent = prefill.stats.bytes_sent
        first = decode.fetch(offers[0].ticket, staged.cache, range(32), timeout=LONG)
        until(lambda: prefill.stats.bytes_sent > sent)
        second = decode.fetch(offers[1].ticket, direct.cache, range(32), timeout=LONG)
        until(lambda: prefill.stats.bytes_sent - sent >= BYTES)
        fake_verbs.hold_sends(False)
        for fetch, path in ((first, "staged"), (second, "direct")):
            fetch.wait(LONG)
            assert fetch.report.path == path
        assert direct.same_as(sources[1])
