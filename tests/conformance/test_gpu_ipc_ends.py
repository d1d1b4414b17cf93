"""What becomes of GPU memory that two processes share when one of them ends, or hangs."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from kvtest.agents import LONG, consumer, producer, until
from kvtest.caches import Paged
from kvtest.child import Child
from kvtest.fake_gpu import GpuPaged, Gpus
from kvtest.gpu_ipc import (
    BLOCKS,
    OTHER,
    OTHER_BLOCKS,
    SIDE,
    TOKENS,
    Prefill,
    all_given_back,
    all_slots_free,
    fetched,
    idle_prefill,
    launches,
    on_gpu,
)

import kvxfer
from kvxfer import Status


@pytest.fixture(scope="module")
def gpus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gpus]:
    with all_given_back(tmp_path_factory.mktemp("gpu")) as found:
        yield found


@pytest.fixture(scope="module")
def prefill(gpus: Gpus) -> Iterator[Prefill]:
    with idle_prefill() as found:
        yield found


def test_cancel_leaves_slots_alone_that_are_written(prefill: Prefill) -> None:
    with consumer("shm") as decode, on_gpu(decode) as target:
        ticket = prefill.offer()
        fetched(decode, prefill, target, ticket)
        launched = prefill.gpu("calls", "cuLaunchKernel")
        prefill.gpu("hold", True)
        fetch = decode.fetch(ticket, target.cache, OTHER_BLOCKS, timeout=LONG)
        until(partial(launches, prefill, launched))
        fetch.cancel()
        assert fetch.status is Status.CANCELLED
        assert decode.stats.quarantined_slots > 0
        prefill.gpu("hold", False)
        until(lambda: decode.stats.quarantined_slots == 0)
        assert fetched(decode, prefill, target).path == "gpu-ipc"
        until(lambda: all_slots_free(decode))


def test_slots_are_free_when_a_producer_closes_and_lives_on(gpus: Gpus) -> None:
    with consumer("shm") as decode, on_gpu(decode) as target, Child() as child:
        closing = Prefill(child)
        assert fetched(decode, closing, target).path == "gpu-ipc"
        # One that is given up before the producer is told of any memory.
        with consumer("shm", "other") as other, on_gpu(other, device=0) as second:
            with gpus.stalled("cuMemAlloc"):
                fetch = other.fetch(closing.offer(), second.cache, OTHER_BLOCKS, timeout=LONG)
                until(lambda: other.stats.peers == 1)
                fetch.cancel()
            child.call("close")
            until(lambda: decode.stats.peers + other.stats.peers == 0)
            assert all_slots_free(decode)


def test_a_producer_that_is_killed_while_it_packs(gpus: Gpus) -> None:
    with consumer("shm", heartbeat_timeout=1000.0) as decode, on_gpu(decode) as target:
        for _ in range(2):
            with Child() as child:
                doomed = Prefill(child)
                ticket = doomed.offer()
                fetched(decode, doomed, target, ticket)
                launched = doomed.gpu("calls", "cuLaunchKernel")
                doomed.gpu("hold", True)
                fetch = decode.fetch(ticket, target.cache, OTHER_BLOCKS, timeout=LONG)
                until(partial(launches, doomed, launched))
                child.kill()
                with pytest.raises(kvxfer.TransferError, match="lost 'prefill'"):
                    fetch.wait()
                until(lambda: decode.stats.peers == 0)
                assert all_slots_free(decode)


def test_slots_stay_taken_until_a_process_has_ended_that_dies(gpus: Gpus) -> None:
    """Its sockets end first, and with them its fetches."""
    patient = {"heartbeat_timeout": 1000.0}
    with consumer("shm", **patient) as decode, on_gpu(decode) as target, Child() as child:
        dying = Prefill(child, **patient)
        ticket = dying.offer()
        fetched(decode, dying, target, ticket)
        launched = dying.gpu("calls", "cuLaunchKernel")
        dying.gpu("hold", True)
        fetch = decode.fetch(ticket, target.cache, OTHER_BLOCKS, timeout=LONG)
        until(partial(launches, dying, launched))
        child.call("shut_links")
        with pytest.raises(kvxfer.TransferError, match="its process perhaps not yet"):
            fetch.wait()
        threading.Event().wait(0.2)
        taken = decode.stats
        assert (taken.peers, taken.free_slots < taken.slots) == (1, True)
        child.kill()
        until(lambda: decode.stats.peers == 0)
        assert all_slots_free(decode)


def test_slots_stay_taken_while_a_device_that_hangs_may_write_there(gpus: Gpus) -> None:
    with consumer("shm") as decode, on_gpu(decode) as target, Child() as child:
        hung = Prefill(child, gpu_timeout=0.3)
        ticket = hung.offer()
        fetched(decode, hung, target, ticket)
        hung.gpu("hold", True)
        fetch = decode.fetch(ticket, target.cache, OTHER_BLOCKS, timeout=LONG)
        with pytest.raises(kvxfer.TransferError, match="has not finished a chunk within 0.3"):
            fetch.wait()
        child.call("close")
        taken = decode.stats
        assert taken.free_slots < taken.slots
        assert taken.peers == 1  # whose end has not come
        child.kill()
        until(lambda: decode.stats.peers == 0)
        assert all_slots_free(decode)


def test_memory_that_nobody_was_told_of_is_freed_at_the_end(gpus: Gpus) -> None:
    """It is ready when the producer, which is stopped then, is to be told no more."""
    before = gpus.open_handles()
    with Child() as child:
        stopped = Prefill(child)
        target = GpuPaged(OTHER, 1)
        with consumer("shm") as decode:
            decode.register(target.cache)
            ticket = stopped.offer()
            with gpus.stalled("cuIpcGetMemHandle"):
                exports = gpus.calls("cuIpcGetMemHandle")
                fetch = decode.fetch(ticket, target.cache, OTHER_BLOCKS, timeout=LONG)
                until(lambda: gpus.calls("cuIpcGetMemHandle") > exports)
                child.stop()
                fetch.cancel()
        target.free()
        assert gpus.open_handles() == before
        child.resume()


def test_a_device_that_hangs_keeps_no_slots_that_it_was_not_told_of(gpus: Gpus) -> None:
    with (
        consumer("shm", chunk_bytes=4096) as decode,
        on_gpu(decode) as target,
        consumer("shm", "other") as other,
        on_gpu(other, device=0) as second,
        Child() as child,
    ):
        hung = Prefill(child, gpu_timeout=0.5)
        ticket = hung.offer()
        fetched(other, hung, second, ticket)
        fetched(decode, hung, target, ticket)
        launched = hung.gpu("calls", "cuLaunchKernel")
        hung.gpu("hold", True)
        fetch = decode.fetch(ticket, target.cache, OTHER_BLOCKS, timeout=LONG)
        until(partial(launches, hung, launched + 3))  # as many as there are lanes
        late = other.fetch(ticket, second.cache, OTHER_BLOCKS, timeout=LONG)
        with pytest.raises(kvxfer.TransferError, match="has not finished a chunk within 0.5"):
            fetch.wait()
        with pytest.raises(kvxfer.TransferError, match="was given up"):
            late.wait()
        assert late.report.path == "gpu-ipc"
        until(lambda: all_slots_free(other))
        assert not all_slots_free(decode)
        child.kill()
        until(lambda: all_slots_free(decode))


def test_close_waits_for_no_device_that_hangs(gpus: Gpus) -> None:
    """A consumer's memory is open there of which nothing is under way."""
    with (
        consumer("shm") as decode,
        on_gpu(decode) as target,
        consumer("shm", "other") as other,
        on_gpu(other, device=0) as second,
        Child() as child,
    ):
        hung = Prefill(child, gpu_timeout=0.3)
        ticket = hung.offer()
        fetched(other, hung, second, ticket)
        fetched(decode, hung, target, ticket)
        hung.gpu("hold", True)
        fetch = decode.fetch(ticket, target.cache, OTHER_BLOCKS, timeout=LONG)
        with pytest.raises(kvxfer.TransferError, match="has not finished a chunk within 0.3"):
            fetch.wait()
        child.call("close")
        assert hung.gpu("calls", "cuIpcCloseMemHandle") == 0
        threading.Event().wait(0.2)
        assert other.stats.peers == 1  # the memory is open yet
        child.kill()
        until(lambda: decode.stats.peers + other.stats.peers == 0)
        assert all_slots_free(decode)
        assert all_slots_free(other)


def closes(agent: kvxfer.Agent) -> bool:
    """Whether close() comes back, whatever hangs."""
    closing = threading.Thread(target=agent.close, daemon=True)
    closing.start()
    closing.join(15)
    return not closing.is_alive()


def test_close_does_not_wait_for_ever_until_it_can_free(
    prefill: Prefill, gpus: Gpus, caplog: pytest.LogCaptureFixture
) -> None:
    """What runs on the device is the engine's."""
    before = gpus.open_handles()
    target = GpuPaged(OTHER, 1)
    with consumer("shm", gpu_timeout=0.3) as decode, gpus.stream(1) as stream:
        decode.register(target.cache)
        assert fetched(decode, prefill, target).path == "gpu-ipc"
        with gpus.held(stream):
            target.upload(stream)
            assert closes(decode)
            assert "did not get done" in caplog.text
            assert gpus.open_handles() > before
        gpus.wait(1, stream)
    target.free()
    until(lambda: gpus.open_handles() == before)


def test_close_does_not_wait_for_ever_for_a_call(gpus: Gpus) -> None:
    with Child() as child:
        near = Prefill(child)
        target = GpuPaged(OTHER, 1)
        with consumer("shm", gpu_timeout=0.3) as decode:
            decode.register(target.cache)
            with gpus.stalled("cuIpcGetMemHandle"):
                exports = gpus.calls("cuIpcGetMemHandle")
                fetch = decode.fetch(near.offer(), target.cache, OTHER_BLOCKS, timeout=LONG)
                until(lambda: gpus.calls("cuIpcGetMemHandle") > exports)
                before = gpus.open_handles()
                assert closes(decode)
                assert fetch.status is Status.CLOSED
            # The device is given up: what it has stays until the process ends.
            gpus.given_up += before - sum(map(len, target.memory))
        target.free()


def test_close_does_not_wait_for_ever_for_a_stream(prefill: Prefill, gpus: Gpus) -> None:
    target = GpuPaged(OTHER, 1)
    with consumer("shm", gpu_timeout=0.3) as decode, gpus.stream(1) as stream:
        decode.register(target.cache)
        with gpus.held(stream):
            target.upload(stream)
            fetch = decode.fetch(
                prefill.offer(), target.cache, OTHER_BLOCKS, timeout=LONG, stream=stream
            )
            with gpus.stalled("cuEventQuery"):
                asked = gpus.calls("cuEventQuery")
                until(lambda: gpus.calls("cuEventQuery") > asked)
                assert closes(decode)
                assert fetch.status is Status.CLOSED
        gpus.wait(1, stream)
        until(lambda: not waits_for_gpus())
    target.free()


async def finish(handle: kvxfer.Offer) -> Status:
    return await handle


def waits_for_gpus() -> bool:
    for task in Path("/proc/self/task").glob("*/comm"):
        with contextlib.suppress(OSError):  # it has just ended
            if task.read_text().startswith(("kvx-gpu1", "kvx-gpu-gate")):
                return True
    return False


def test_a_fetch_ends_that_a_call_does_not_come_back_with(
    gpus: Gpus, caplog: pytest.LogCaptureFixture
) -> None:
    target = GpuPaged(OTHER, 1)
    own = gpus.open_handles()
    with Child() as child, consumer("shm", gpu_timeout=0.3) as decode:
        near = Prefill(child)
        decode.register(target.cache)
        fetched(decode, near, target)
        with gpus.stalled("cuLaunchKernel"):
            launched = gpus.calls("cuLaunchKernel")
            # That takes several launches.
            fetch = decode.fetch(
                near.offer(), target.cache, OTHER_BLOCKS, codec="int8", timeout=LONG
            )
            until(lambda: gpus.calls("cuLaunchKernel") > launched)
            assert closes(decode)
            assert "1 of its GPUs had been given up" in caplog.text
            assert fetch.done
            with pytest.raises(kvxfer.TransferError, match="may still write into the blocks"):
                fetch.wait(LONG)
            assert fetch.status is Status.CLOSED
            fetch.cancel()
            gpus.given_up += gpus.open_handles() - own  # what it has stays until the process ends
            launched = gpus.calls("cuLaunchKernel")
        until(lambda: not waits_for_gpus())
        assert gpus.calls("cuLaunchKernel") == launched
    target.free()


def test_an_offer_ends_that_a_call_does_not_come_back_with(gpus: Gpus) -> None:
    source, target = GpuPaged(SIDE, 0, seed=3), Paged(OTHER)
    own = gpus.open_handles()
    with producer("shm", gpu_timeout=0.3) as prefill, consumer("shm") as decode:
        prefill.register(source.cache)
        decode.register(target.cache)
        offer = prefill.offer(source.cache, BLOCKS, TOKENS)
        with gpus.stalled("cuLaunchKernel"):
            launched = gpus.calls("cuLaunchKernel")
            fetch = decode.fetch(offer.ticket, target.cache, OTHER_BLOCKS, timeout=LONG)
            until(lambda: gpus.calls("cuLaunchKernel") > launched)
            assert offer.status is None
            assert closes(prefill)
            with pytest.raises(kvxfer.TransferError, match="may still read the blocks"):
                offer.wait(LONG)
            with pytest.raises(kvxfer.TransferError, match="may still read the blocks"):
                asyncio.run(asyncio.wait_for(finish(offer), LONG))
            assert not offer.released
            assert offer.status is Status.CLOSED
            with pytest.raises(kvxfer.TransferError):
                fetch.wait()
            gpus.given_up += gpus.open_handles() - own
    source.free()


def test_a_device_that_hangs_in_the_trial_has_nothing_closed(gpus: Gpus) -> None:
    """To close what it may be writing into would wait for it."""
    with consumer("shm") as decode, on_gpu(decode) as target, Child() as child:
        hung = Prefill(child, gpu_timeout=0.3)
        ticket = hung.offer()
        hung.gpu("hold", True)
        fetch = decode.fetch(ticket, target.cache, OTHER_BLOCKS, timeout=LONG)
        with pytest.raises(kvxfer.TransferError, match="given up"):
            fetch.wait()
        assert fetch.status is Status.NO_RESOURCES
        child.call("close")
        assert hung.gpu("calls", "cuIpcOpenMemHandle") == 1
        assert hung.gpu("calls", "cuIpcCloseMemHandle") == 0


def test_both_sides_hang(gpus: Gpus) -> None:
    before = gpus.open_handles()
    target = GpuPaged(OTHER, 1)
    with consumer("shm", gpu_timeout=0.5) as decode, Child() as child:
        decode.register(target.cache)
        near = Prefill(child, gpu_timeout=0.5)
        ticket = near.offer()
        fetched(decode, near, target, ticket)
        near.gpu("hold", True)
        with gpus.held():
            fetch = decode.fetch(ticket, target.cache, OTHER_BLOCKS, timeout=LONG)
            with pytest.raises(kvxfer.TransferError, match="has not finished a chunk"):
                fetch.wait()
            assert closes(decode)
        child.call("close")
    target.free()
    until(lambda: gpus.open_handles() == before + 1)
    gpus.given_up += 1  # what the producer had open when close() was over


def test_a_call_that_does_not_return_holds_up_no_other_peer(prefill: Prefill, gpus: Gpus) -> None:
    closes = prefill.gpu("calls", "cuIpcCloseMemHandle")
    with consumer("shm", "first") as first, on_gpu(first) as target:
        assert fetched(first, prefill, target).path == "gpu-ipc"
        prefill.gpu("stall", "cuIpcCloseMemHandle")
    gpus.given_up += 1  # what `first` had to leave there
    until(lambda: prefill.gpu("calls", "cuIpcCloseMemHandle") > closes)
    with consumer("shm") as decode, on_gpu(decode, device=0) as target:
        assert fetched(decode, prefill, target).path == "gpu-ipc"
        prefill.gpu("stall", None)


def test_a_consumer_that_is_killed(gpus: Gpus) -> None:
    with producer("shm") as near, on_gpu(near, SIDE, 0) as source:
        before = gpus.open_handles()
        with Child() as child:
            child.call("start", "decode", "shm")
            child.call("gpu_cache", "cache", OTHER, 1, None, False)
            offer = near.offer(source.cache, BLOCKS, TOKENS, consumers=9)
            for name in ("warm", "late"):
                child.call("fetch", name, offer.ticket, "cache", OTHER_BLOCKS)
                if name == "warm":
                    assert child.call("wait_fetch", name)[0] == "OK"
                    assert gpus.open_handles() == before + 1
                    gpus.hold(True)
            until(lambda: child.call("progress", "late")[0] == "gpu-ipc")
            child.kill()
        gpus.hold(False)
        until(lambda: near.stats.peers == 0 and gpus.open_handles() == before)
        offer.release()
        assert offer.wait(LONG) is Status.CANCELLED
        with Child() as child:
            child.call("start", "decode", "shm")
            child.call("gpu_cache", "cache", OTHER, 1, None, False)
            offer = near.offer(source.cache, BLOCKS, TOKENS, id="again")
            child.call("fetch", "f", offer.ticket, "cache", OTHER_BLOCKS)
            until(lambda: child.call("progress", "f")[0] == "gpu-ipc")
            assert child.call("wait_fetch", "f")[0] == "OK"


def test_memory_stays_while_a_producer_that_is_stopped_has_it_open(gpus: Gpus) -> None:
    before = gpus.open_handles()
    with Child() as child:
        stopped = Prefill(child)
        target = GpuPaged(OTHER, 1)
        with consumer("shm") as decode:
            decode.register(target.cache)
            assert fetched(decode, stopped, target).path == "gpu-ipc"
            child.stop()
        target.free()
        assert gpus.open_handles() == before + 1
        child.resume()
    assert gpus.early_frees() == 0
    gpus.given_up += 1
