"""Whether adapters reach GPU memory is tried before it is relied on."""

from __future__ import annotations

import os

import pytest
from kvtest import fake_verbs
from kvtest.agents import LONG, pair, until
from kvtest.caches import Geometry, Paged
from kvtest.direct import DIRECT, needs_fake_adapters
from kvtest.fake_gpu import HOST, GpuPaged, Gpus, look, made
from kvtest.gpu_direct import BLOCKS, EXPORT, SIDE, TOKENS, moved, peer_memory

import kvxfer
from kvxfer import _core

pytestmark = needs_fake_adapters

IN_PAGE = os.sysconf("SC_PAGESIZE") - 1  # the bits of an offset that lead on within a page


def test_a_registration_that_leads_nowhere_is_not_used(gpus: Gpus) -> None:
    """Known from then on for that device; others are tried for themselves."""
    with pair("verbs", **DIRECT, gpudirect="dmabuf") as both:
        fake_verbs.lose_gpu_writes(True)
        report = moved(*both, HOST, 1)
        fake_verbs.lose_gpu_writes(False)
        assert report.path == "staged"
        assert "wrote into scratch memory is not there, or elsewhere" in report.path_why
        assert "GPUDirect is off for this device" in report.path_why
        allocated = gpus.calls("cuMemHostAlloc")
        again = moved(*both, HOST, 1)
        assert (again.path, again.path_why) == ("staged", report.path_why)
        assert gpus.calls("cuMemHostAlloc") == allocated
        assert moved(*both, HOST, 0).path == "direct"
        assert moved(*both, 1, HOST).path == "direct"  # to read is another matter


def test_where_one_way_leads_nowhere_the_other_is_taken(gpus: Gpus) -> None:
    """And for a while the first one is not tried again: that may take seconds."""
    with peer_memory(gpus):
        with pair("verbs", **DIRECT) as both:
            gpus.fail(EXPORT)  # of the scratch memory
            assert "by peer memory" in moved(*both, HOST, 1).path_why
            exported = gpus.calls(EXPORT)
            assert "by peer memory" in moved(*both, HOST, 1).path_why
            assert gpus.calls(EXPORT) == exported
        with pair("verbs", **DIRECT) as both:
            assert "by dma-buf" in moved(*both, HOST, 1).path_why


@pytest.mark.parametrize("heeded", [0, IN_PAGE, ~IN_PAGE])
@pytest.mark.parametrize(
    ("here", "there", "why"),
    [(HOST, 1, "is not there, or elsewhere"), (1, HOST, "read other bytes of scratch memory")],
)
def test_a_dmabuf_that_begins_elsewhere_is_not_used(
    gpus: Gpus, here: int, there: int, why: str, heeded: int
) -> None:
    """Peer memory is, where there is a module for it."""
    with pair("verbs", **DIRECT) as both:
        moved(*both, HOST, HOST)
        fake_verbs.mask_offsets(heeded)
        report = moved(*both, here, there)
        assert report.path == "staged"
        assert why in report.path_why
    with peer_memory(gpus), pair("verbs", **DIRECT) as both:
        moved(*both, HOST, HOST)
        report = moved(*both, here, there)
        assert report.path == "direct"
        assert "by peer memory" in report.path_why


def test_a_failure_is_forgotten_after_a_while(gpus: Gpus, monkeypatch: pytest.MonkeyPatch) -> None:
    core_options = kvxfer.Config.core_options

    def impatient(self: kvxfer.Config, name: str, incarnation: int) -> _core.AgentOptions:
        options = core_options(self, name, incarnation)
        options.gpudirect_retry = 0.2
        return options

    monkeypatch.setattr(kvxfer.Config, "core_options", impatient)
    with pair("verbs", **DIRECT, gpudirect="dmabuf") as both:
        moved(*both, HOST, HOST)
        gpus.fail(EXPORT)
        assert moved(*both, HOST, 1).path == "staged"
        until(lambda: moved(*both, HOST, 1).path == "direct")


@pytest.mark.parametrize(
    ("here", "there", "whose"),
    [(HOST, 1, "reach this GPU's memory"), (1, HOST, "the memory of the producer's GPU")],
)
def test_under_auto_nobody_waits_for_the_trial(
    gpus: Gpus, here: int, there: int, whose: str
) -> None:
    side = Geometry(layers=("a",), content=64, num_blocks=80, heads=(0, 2))  # runs of 320 KiB
    blocks, tokens = range(80), 80 * 16
    with (
        pair("verbs", path="auto") as (prefill, decode),
        made(side, here, seed=1) as source,
        made(side, HOST, seed=2) as other,
        made(side, there) as target,
    ):
        for cache in (source.cache, other.cache):
            prefill.register(cache)
        decode.register(target.cache)

        def fetched(paged: Paged = source) -> kvxfer.Report:
            with prefill.offer(paged.cache, blocks, tokens) as offer:
                fetch = decode.fetch(offer.ticket, target.cache, blocks, timeout=LONG)
                fetch.wait(LONG)
            assert look(target).same_as(look(paged))
            return fetch.report

        if there == HOST:
            assert fetched(other).path == "direct"  # the consumer's is registered from here on
        else:
            decode.connect("prefill", prefill.address)
        with fake_verbs.held_registrations():
            for _ in range(2):
                report = fetched()
                assert report.path == "staged"
                assert whose in report.path_why
                assert "is being tried" in report.path_why
        until(lambda: fetched().path == "direct")


def test_what_must_be_direct_waits_for_the_trial(gpus: Gpus) -> None:
    with pair("verbs", path="auto") as both:
        assert moved(*both, 1, 0, require="gpudirect-rdma").path == "direct"


def test_all_adapters_must_pass(gpus: Gpus) -> None:
    with pair("verbs", **DIRECT) as both:
        moved(*both, HOST, HOST)
        fake_verbs.set_port(fake_verbs.DEVICES[0], False)
        report = moved(*both, HOST, 1)
        assert report.path == "staged"
        assert f"'{fake_verbs.DEVICES[0]}' has no active port" in report.path_why


def test_an_adapter_that_damages_what_it_writes_is_found(gpus: Gpus) -> None:
    with pair("verbs", **DIRECT, gpudirect="dmabuf") as both:
        moved(*both, HOST, HOST)
        fake_verbs.flip_writes(1)
        report = moved(*both, HOST, 1)
    assert report.path == "staged"
    assert "is wrong: GPUDirect is off" in report.path_why


def test_a_device_that_hangs_in_the_trial_costs_nobody_else_the_direct_path(gpus: Gpus) -> None:
    tiny = Geometry(layers=("a",), content=64, num_blocks=2, heads=(0, 1))
    with (
        peer_memory(gpus),  # another way, which is not tried then
        pair("verbs", **DIRECT, gpu_timeout=1.0) as (prefill, decode),
        made(tiny, HOST, seed=1) as source,
        made(tiny, 1) as target,
    ):
        moved(prefill, decode, HOST, 0, side=tiny)
        prefill.register(source.cache)
        decode.register(target.cache)
        offer = prefill.offer(source.cache, range(2), 32)
        with gpus.held_device(1):
            # Which waits for the device's default stream, too.
            fetch = decode.fetch(offer.ticket, target.cache, range(2), timeout=LONG)
            assert moved(prefill, decode, HOST, 0, side=tiny).path == "direct"
            until(lambda: "has not finished a chunk within 1 s" in fetch.report.path_why)
        fetch.wait(LONG)
        assert fetch.report.path == "staged"
        assert look(target).same_as(source)
    # What the trial had: a stream, an event and four pieces of memory.
    gpus.given_up += 6


def test_a_trial_does_not_wait_for_what_runs_on_the_device(gpus: Gpus) -> None:
    """As it would if it freed its memory, which keeps others from being registered meanwhile."""
    with (
        pair("verbs", **DIRECT) as (prefill, decode),
        made(SIDE, HOST, seed=1) as source,
        made(SIDE, 1) as target,
        made(SIDE, 1) as other,
        gpus.stream(1) as stream,
    ):
        assert isinstance(other, GpuPaged)
        prefill.register(source.cache)
        decode.register(target.cache)
        with gpus.held(stream):
            other.upload(stream)
            with prefill.offer(source.cache, BLOCKS, TOKENS) as offer:
                fetch = decode.fetch(offer.ticket, target.cache, BLOCKS, timeout=LONG)
                fetch.wait(LONG)
            assert fetch.report.path == "direct"
            decode.unregister(target.cache)
            assert look(target).same_as(source)
