"""Nothing grows: neither memory nor descriptors nor threads, whatever ends and however."""

from __future__ import annotations

import ctypes
import gc
import itertools
import os
import platform
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from kvtest import wire
from kvtest.agents import LONG, consumer, pair, producer, transport_name, until
from kvtest.caches import Geometry, Paged

import kvxfer
from kvxfer import Status

SIDE = Geometry(layers=("a",), content=8, num_blocks=4)
NOISE = 2 << 20  # bytes that allocators may keep or give back as they like


def resident() -> int:
    """Bytes of memory that are this process's own: the arena's pages are counted when touched."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def held() -> tuple[int, int]:
    """Descriptors and threads."""
    gc.collect()
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


def grows(work: Callable[[], None], rounds: int, warm_up: int) -> int:
    """Return by how much memory grew over `rounds` of work; descriptors and threads must not."""
    for _ in range(warm_up):
        work()
    before, memory = held(), resident()
    for _ in range(rounds):
        work()
    until(lambda: held() <= before)
    return resident() - memory


def test_threads_need_little_memory_of_their_own() -> None:
    """The C library ends the process when it finds none for what is `thread_local`."""
    raw = Path(kvxfer._core.__file__).read_bytes()
    assert raw[:5] == b"\x7fELF\x02"
    (table,) = struct.unpack_from("<Q", raw, 32)
    size, count = struct.unpack_from("<2H", raw, 54)
    headers = [struct.unpack_from("<2I6Q", raw, table + size * number) for number in range(count)]
    of_threads = [header[6] for header in headers if header[0] == 7]
    assert of_threads
    assert sum(of_threads) <= 1024


THROW_LATE = Path(__file__).parents[2] / "build" / "release" / "libkvxfer_throw_late.so"


@pytest.mark.skipif(
    not THROW_LATE.exists(), reason=f"{THROW_LATE.name} is not built: no tests, or sanitizers"
)
@pytest.mark.parametrize("ours", [True, False])
def test_a_thread_can_throw_first_when_there_is_no_memory(ours: bool) -> None:
    """One that is not prepared, as a control, takes the process with it."""
    if "KVXFER_EXPECT_SANITIZE" in os.environ:
        pytest.skip("a process with ASan maps terabytes, and ends where it may not")
    if not ours and platform.machine() != "x86_64":
        pytest.skip("elsewhere libraries that are loaded late may have memory set aside for them")
    program = "import ctypes, os, sys; late = ctypes.CDLL(sys.argv[1]).kvxfer_throw_late\n"
    program += "os._exit(late(int(sys.argv[2])))"
    done = subprocess.run(
        [sys.executable, "-c", program, str(THROW_LATE), str(int(ours))],
        capture_output=True,
        text=True,
        timeout=LONG,
        check=False,
    )
    assert done.returncode == (0 if ours else 127), done.stderr


# Ended offers are remembered, the last 4096 of them: beyond that the memory of it is level.
FETCHES, WARM_UP = 10_000, 5_000


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["loopback", "shm", "tcp"])
def test_ten_thousand_fetches(transport: str) -> None:
    with pair(transport, arena_bytes=256 << 10) as (prefill, decode):
        source, target = Paged(SIDE, 1), Paged(SIDE)
        prefill.register(source.cache)
        decode.register(target.cache)
        blocks = [3, 0, 1]

        def work() -> None:
            offer = prefill.offer(source.cache, blocks, 40)
            decode.fetch(offer.ticket, target.cache, blocks, timeout=LONG).wait()
            offer.wait(LONG)

        assert grows(work, FETCHES, WARM_UP) < NOISE
        expected = Paged(SIDE)
        expected.deliver([source], blocks, blocks, (0, 40))
        assert target.same_as(expected)
        assert decode.stats.free_slots == decode.stats.slots


@pytest.mark.slow
def test_thousands_of_fetches_that_fail() -> None:
    """Refused, cancelled, timed out, withdrawn, without callbacks and with."""
    with pair("loopback", arena_bytes=256 << 10) as (prefill, decode):
        source, target, other = Paged(SIDE, 1), Paged(SIDE), Paged(Geometry(layers=("b",)))
        prefill.register(source.cache)
        decode.register(target.cache)
        decode.register(other.cache)
        decode.fileno()
        prefill.fileno()
        numbers = itertools.count()

        def work() -> None:
            kind = next(numbers) % 5
            offer = prefill.offer(source.cache, [0], 16, ready=kind == 0)
            cache = other.cache if kind == 0 else target.cache
            timeout = 0.002 if kind == 1 else LONG
            fetch = decode.fetch(offer.ticket, cache, [0], timeout=timeout)
            fetch.add_done_callback(lambda _: None)
            fetch.fileno()
            if kind == 2:
                fetch.cancel()
            elif kind == 3:
                offer.release()
            elif kind == 4:
                # Dropped while it waits, and its callback with it.
                offer.add_released_callback(lambda _: None)
                decode.fetch(offer.ticket, cache, [1], timeout=LONG)
                offer.release()
            with pytest.raises(kvxfer.TransferError):
                fetch.wait(LONG)
            assert fetch.status in (Status.MISMATCH, Status.TIMEOUT, Status.CANCELLED)
            offer.release()
            offer.wait(LONG)
            decode.poll()
            prefill.poll()

        assert grows(work, 4_000, 5_000) < NOISE
        until(lambda: decode.stats.fetches == prefill.stats.serving == 0)


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["loopback", "shm", "tcp"])
def test_hundreds_of_agents(transport: str) -> None:
    transport_name(transport)
    with producer(transport, arena_bytes=256 << 10) as prefill:
        source = Paged(SIDE, 1)
        prefill.register(source.cache)

        def work() -> None:
            with consumer(transport, arena_bytes=256 << 10) as decode:
                target = Paged(SIDE)
                decode.register(target.cache)
                offer = prefill.offer(source.cache, [0], 16)
                decode.fetch(offer.ticket, target.cache, [0], timeout=LONG).wait()
            until(lambda: prefill.stats.peers == 0)

        assert grows(work, 300, 100) < NOISE


@pytest.mark.slow
def test_hundreds_of_producers_that_come_and_go() -> None:
    """One consumer that outlives them all."""
    with consumer("tcp", arena_bytes=256 << 10) as decode:
        source, target = Paged(SIDE, 1), Paged(SIDE)
        decode.register(target.cache)

        def work() -> None:
            with producer("tcp", arena_bytes=256 << 10) as prefill:
                prefill.register(source.cache)
                offer = prefill.offer(source.cache, [0], 16)
                decode.fetch(offer.ticket, target.cache, [0], timeout=LONG).wait()
            until(lambda: decode.stats.peers == 0)

        assert grows(work, 200, 100) < NOISE
        # What it knows of producers that are gone is forgotten too.
        assert len(decode._peers._connected) <= 2


@pytest.mark.slow
def test_hundreds_of_connections_that_fail() -> None:
    with producer("tcp") as prefill, consumer("tcp") as decode:
        target = Paged(SIDE)
        decode.register(target.cache)
        wrong = kvxfer.AgentRef(name="somebody", address=prefill.address)
        ticket = kvxfer.issue_ticket("r", [wrong], num_tokens=16)

        def work() -> None:
            fetch = decode.fetch(ticket, target.cache, [0], timeout=LONG)
            with pytest.raises(kvxfer.TransferError):
                fetch.wait(LONG)
            with wire.open_socket(prefill.address) as sock:
                sock.sendall(b"\x05\0\0\0hello")
            with wire.consumer(prefill.address, "stranger") as fake:
                fake.say(b"\0")
            until(lambda: prefill.stats.peers == decode.stats.peers == 0)

        assert grows(work, 200, 100) < NOISE
