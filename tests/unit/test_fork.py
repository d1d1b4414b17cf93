"""What a forked child may do with its parent's agents: nothing, and it is told so."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import traceback
from collections.abc import Callable

import pytest
from kvtest import wire
from kvtest.agents import LONG, consumer, pair, producer, until
from kvtest.caches import Geometry, Paged
from kvtest.child import Child

import kvxfer
from kvxfer.handshake import Deadline, Identity, recv_frame, send_frame

SIDE = Geometry(layers=("a", "b"), num_blocks=4)

# Python 3.12 and later warn of fork() with threads, which is what is tested here.
pytestmark = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")


def in_child(work: Callable[[], None]) -> None:
    """Run `work` in a forked child and demand that it does not raise or hang."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            signal.alarm(int(LONG))
            work()
            code = 0
        except BaseException:  # noqa: BLE001 - the parent reads the exit status
            traceback.print_exc()
        finally:
            os._exit(code)
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 0


def refused(call: Callable[[], object]) -> None:
    with pytest.raises(kvxfer.ClosedError, match=r"(fork\(\)|closed)"):
        call()


@pytest.mark.parametrize("transport", ["loopback", "shm", "tcp"])
def test_every_use_in_the_child_is_refused(transport: str) -> None:
    with pair(transport) as (prefill, decode):
        source, target = Paged(SIDE, 1), Paged(SIDE)
        prefill.register(source.cache)
        decode.register(target.cache)
        decode.connect("prefill", prefill.address)
        offer = prefill.offer(source.cache, range(4), 64, ready=False)
        fetch = decode.fetch(offer.ticket, target.cache, range(4))
        ticket = offer.ticket

        def child() -> None:
            for call in [
                lambda: prefill.offer(source.cache, range(4), 64),
                lambda: decode.fetch(ticket, target.cache, range(4)),
                lambda: decode.register(Paged(SIDE).cache),
                lambda: decode.unregister(target.cache),
                lambda: decode.connect("prefill", prefill.address),
                lambda: decode.renew(ticket),
                lambda: decode.stats,
                decode.fileno,
                decode.poll,
                lambda: fetch.done,
                lambda: fetch.status,
                lambda: fetch.report,
                lambda: fetch.wait(1),
                fetch.cancel,
                fetch.fileno,
                lambda: offer.released,
                lambda: offer.mark_ready("a"),
                lambda: offer.wait(1),
                offer.release,
            ]:
                refused(call)
            assert "prefill" in repr(prefill)
            prefill.close()
            decode.close()
            # A new agent is nothing special.
            with pair(transport) as (ours, theirs):
                mine, copy = Paged(SIDE, 2), Paged(SIDE)
                ours.register(mine.cache)
                theirs.register(copy.cache)
                new = ours.offer(mine.cache, range(4), 64)
                theirs.fetch(new.ticket, copy.cache, range(4)).wait(LONG)
                assert copy.same_as(mine)

        in_child(child)
        # The parent goes on as if nothing had been.
        offer.mark_all_ready()
        fetch.wait(LONG)
        assert target.same_as(source)
        assert offer.wait(LONG) is kvxfer.Status.OK


@pytest.mark.parametrize("transport", ["loopback", "shm", "tcp"])
def test_forks_in_the_middle_of_transfers(transport: str) -> None:
    with pair(transport) as (prefill, decode):
        source, target = Paged(SIDE, 1), Paged(SIDE)
        prefill.register(source.cache)
        decode.register(target.cache)
        for _ in range(10):
            target.poison()
            offer = prefill.offer(source.cache, range(4), 64)
            fetch = decode.fetch(offer.ticket, target.cache, range(4))
            in_child(lambda: None)
            fetch.wait(LONG)
            assert target.same_as(source)
            assert offer.wait(LONG) is kvxfer.Status.OK


def test_a_child_that_exits_in_good_order() -> None:
    """With all of Python's finalisation, which meets the parent's agents: no crash, no hang."""
    code = textwrap.dedent("""
        import os, sys, kvxfer
        from kvtest.agents import pair
        from kvtest.caches import Geometry, Paged
        with pair(sys.argv[1]) as (prefill, decode):
            source, target = Paged(Geometry(), 1), Paged(Geometry())
            prefill.register(source.cache)
            decode.register(target.cache)
            offer = prefill.offer(source.cache, [0], 16)
            decode.fetch(offer.ticket, target.cache, [1]).wait(60)
            pid = os.fork()
            if pid == 0:
                sys.exit(7)
            _, status = os.waitpid(pid, 0)
            assert os.waitstatus_to_exitcode(status) == 7, status
            offer = prefill.offer(source.cache, [0], 16)
            decode.fetch(offer.ticket, target.cache, [1]).wait(60)
        print("done")
    """)
    path = os.pathsep.join(entry for entry in sys.path if entry)
    for transport in ("loopback", "shm", "tcp"):
        run = subprocess.run(
            [sys.executable, "-W", "ignore::DeprecationWarning", "-c", code, transport],
            env={**os.environ, "PYTHONPATH": path},
            capture_output=True,
            text=True,
            timeout=LONG,
            check=False,
        )
        assert (run.returncode, run.stdout, run.stderr) == (0, "done\n", "")


def sockets() -> set[str]:
    found = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except OSError:
            continue
        if target.startswith(("socket:", "/memfd:kvxfer")):
            found.add(target)
    return found


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_the_child_holds_nothing_of_the_parents_open(transport: str) -> None:
    before, others = sockets(), set(threading.enumerate())
    with pair(transport) as (prefill, decode):
        decode.connect("prefill", prefill.address)
        decode.fileno()
        # What a handshake holds for a moment is another test's.
        names = ("kvxfer-handshake", "kvxfer-connect")
        until(lambda: not any(t.name in names for t in set(threading.enumerate()) - others))

        def child() -> None:
            assert sockets() - before == set()

        in_child(child)


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_forked_child_does_not_hide_its_parents_death(transport: str) -> None:
    """An engine that forked workers dies; they live on. The consumer notices at once."""
    with consumer(transport) as decode, Child() as child:
        child.call("start", "prefill", transport, listen="")
        child.call("cache", "cache", SIDE, 1)
        ticket = child.call("offer", "cache", range(4), 64, ready=False)
        target = Paged(SIDE)
        decode.register(target.cache)
        address = ticket["agents"][0]["address"]
        decode.connect("prefill", address)
        fetch = decode.fetch(ticket, target.cache, range(4), timeout=LONG)
        while child.call("stats")["serving"] == 0:
            pass
        with wire.open_socket(address) as handshaking:
            send_frame(handshaking, wire.greeting(Identity("slow", 1)), Deadline(LONG))
            recv_frame(handshaking, Deadline(LONG))
            grandchild = child.call("fork_and_sleep")
            child.kill()
            # Heartbeats would tell too, much later and in other words.
            handshaking.settimeout(LONG)
            assert handshaking.recv(1) == b""
        try:
            with pytest.raises(kvxfer.TransferError, match="'prefill'") as caught:
                fetch.wait(LONG)
            assert caught.value.status is kvxfer.Status.PEER_LOST
            assert "not a word" not in str(caught.value)
        finally:
            os.kill(grandchild, signal.SIGKILL)
        # And the port is free for the next start.
        with kvxfer.Agent("prefill", listen=address, transport=transport) as prefill:
            source = Paged(SIDE, 2)
            prefill.register(source.cache)
            offer = prefill.offer(source.cache, range(4), 64)
            decode.fetch(offer.ticket, target.cache, range(4)).wait(LONG)
            assert target.same_as(source)


def test_multiprocessing_by_fork() -> None:
    import multiprocessing

    with producer("loopback") as prefill:
        source = Paged(SIDE, 1)
        prefill.register(source.cache)
        process = multiprocessing.get_context("fork").Process(target=lambda: None)
        process.start()
        process.join(LONG)
        assert process.exitcode == 0
        with consumer("loopback") as decode:
            target = Paged(SIDE)
            decode.register(target.cache)
            offer = prefill.offer(source.cache, range(4), 64)
            decode.fetch(offer.ticket, target.cache, range(4)).wait(LONG)
