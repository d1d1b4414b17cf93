"""The agent itself: names, life and death, limits of the system, peers that come and go."""

from __future__ import annotations

import dataclasses
import gc
import os
import socket
import threading
import time
from collections.abc import Callable

import numpy as np
import pytest
from kvtest import wire
from kvtest.agents import LONG, SMALL, consumer, pair, producer, until
from kvtest.caches import Geometry, Paged
from kvtest.child import Child, ChildError

import kvxfer
from kvxfer import _core

SIDE = Geometry(layers=("a",), num_blocks=4)
SANITIZED = "address" in _core.build_info()["sanitize"]


def fds() -> int:
    return len(os.listdir("/proc/self/fd"))


def threads() -> int:
    return len(os.listdir("/proc/self/task"))


def test_a_readme_shaped_life() -> None:
    """Everything by its defaults."""
    k = np.arange(16 * 8 * 16 * 64, dtype=np.float32).reshape(16, 8, 16, 64)
    tensors = {"layer.0": (k, k + 1)}
    copies = {
        "layer.0": (np.zeros((32, 8, 8, 64), np.float32), np.zeros((32, 8, 8, 64), np.float32))
    }
    with (
        kvxfer.Agent("prefill-0", listen="127.0.0.1:0") as prefill,
        kvxfer.Agent("decode-0") as decode,
    ):
        cache = prefill.register(kvxfer.Cache(tensors, axes="BHNC"))
        offer = prefill.offer(cache, blocks=[3, 9, 12], num_tokens=40, lease=30.0)
        mine = decode.register(kvxfer.Cache(copies, axes="BNHC"))
        fetch = decode.fetch(offer.ticket, mine, blocks=[7, 1, 4, 30, 2], timeout=10.0)
        fetch.wait()
        assert offer.wait(LONG) is kvxfer.Status.OK
    for plane in range(2):
        want = tensors["layer.0"][plane][[3, 9, 12]].transpose(0, 2, 1, 3).reshape(-1, 8, 64)[:40]
        got = copies["layer.0"][plane][[7, 1, 4, 30, 2]].reshape(-1, 8, 64)
        assert (got == want).all()


def test_names_and_incarnations() -> None:
    with kvxfer.Agent("a") as first, kvxfer.Agent("a") as second:
        assert first.name == second.name == "a"
        assert first.incarnation != second.incarnation
    for name in ("", "x" * 1025, "ü" * 513):
        with pytest.raises(kvxfer.InvalidError, match="name"):
            kvxfer.Agent(name)
    with kvxfer.Agent("ü" * 512):
        pass


def test_an_agent_that_does_not_listen_cannot_offer() -> None:
    with kvxfer.Agent("decode") as decode:
        paged = Paged(SIDE)
        decode.register(paged.cache)
        with pytest.raises(
            kvxfer.InvalidError, match="'decode' does not listen.*listen='127.0.0.1:0'"
        ):
            decode.offer(paged.cache, [0], 16)
        with pytest.raises(kvxfer.InvalidError, match="does not listen"):
            decode.reference()


def test_references_name_the_slice() -> None:
    with producer("loopback", "rank-1") as agent:
        reference = agent.reference(layers=["a", "b"], heads=(4, 8))
        assert reference == kvxfer.AgentRef(
            name="rank-1",
            address=agent.address,
            incarnation=agent.incarnation,
            layers=("a", "b"),
            heads=(4, 8),
        )


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_one_connection_serves_all_fetches(transport: str) -> None:
    with pair(transport) as (prefill, decode):
        source, target = Paged(SIDE, 1), Paged(SIDE)
        prefill.register(source.cache)
        decode.register(target.cache)
        fetches = []
        for _ in range(8):
            offer = prefill.offer(source.cache, range(4), 64)
            fetches.append(decode.fetch(offer.ticket, target.cache, range(4)))
        for fetch in fetches:
            fetch.wait(LONG)
        assert decode.stats.peers == prefill.stats.peers == 1


@pytest.mark.parametrize("transport", ["loopback", "shm", "tcp"])
def test_connecting_ahead(transport: str) -> None:
    with pair(transport) as (prefill, decode):
        decode.connect("prefill", prefill.address)
        decode.connect("prefill", prefill.address)
        assert decode.stats.peers == 1
        with pytest.raises(kvxfer.HandshakeError):
            decode.connect("somebody", prefill.address)


def while_time_passes(seconds: float, act: Callable[[], None] = lambda: None) -> bool:
    """Call `act` every now and then; answer whether this process ran smoothly all the time.

    Where the whole machine stands still for longer than a lease, the lease ends, and rightly so.
    """
    rest = threading.Event()
    end = time.monotonic() + seconds
    while (begun := time.monotonic()) < end:
        act()
        rest.wait(0.05)
        if time.monotonic() - begun > 0.4:
            return False
    return True


@pytest.mark.parametrize("how", ["by hand", "by a running fetch"])
def test_a_lease_is_renewed_beyond_its_end(how: str) -> None:
    knobs = {"heartbeat_interval": 0.05, "heartbeat_timeout": 100.0}
    with pair("loopback", **knobs) as (prefill, decode):
        source, target = Paged(SIDE, 1), Paged(SIDE)
        prefill.register(source.cache)
        decode.register(target.cache)
        decode.connect("prefill", prefill.address)
        for _ in range(20):
            target.poison()
            offer = prefill.offer(source.cache, range(4), 64, lease=1.0, ready=False)
            if how == "by hand":
                smooth = while_time_passes(2.0, lambda: decode.renew(offer.ticket))  # noqa: B023
                fetch = decode.fetch(offer.ticket, target.cache, range(4))
            else:
                fetch = decode.fetch(offer.ticket, target.cache, range(4))
                smooth = while_time_passes(2.0)
            if smooth:
                break
            fetch.cancel()
        else:
            pytest.skip("this machine stands still for half a second again and again")
        assert not offer.released, offer.message
        offer.mark_all_ready()
        fetch.wait(LONG)
        assert target.same_as(source)


def test_a_lease_that_nobody_renews_ends() -> None:
    with producer("loopback") as prefill:
        source = Paged(SIDE, 1)
        prefill.register(source.cache)
        offer = prefill.offer(source.cache, range(4), 64, lease=0.05)
        assert offer.wait(LONG) is kvxfer.Status.EXPIRED
        assert "'" + offer.id + "'" in offer.message


@pytest.mark.parametrize("transport", ["loopback", "shm", "tcp"])
@pytest.mark.parametrize("closing", ["prefill", "decode"])
def test_the_end_of_one_side_is_told_to_the_other(transport: str, closing: str) -> None:
    with pair(transport) as (prefill, decode):
        source, target = Paged(SIDE, 1), Paged(SIDE)
        prefill.register(source.cache)
        decode.register(target.cache)
        offer = prefill.offer(source.cache, range(4), 64, ready=False)
        fetch = decode.fetch(offer.ticket, target.cache, range(4))
        until(lambda: prefill.stats.serving == 1)
        (prefill if closing == "prefill" else decode).close()
        with pytest.raises(kvxfer.TransferError) as caught:
            fetch.wait(LONG)
        if closing == "prefill":
            assert caught.value.status in (kvxfer.Status.PEER_LOST, kvxfer.Status.CLOSED)
            assert "'prefill'" in str(caught.value)
            assert offer.status is kvxfer.Status.CLOSED
        else:
            assert caught.value.status is kvxfer.Status.CLOSED
            assert not offer.released  # somebody else may come for it
        assert target.poisoned


@pytest.mark.parametrize("transport", ["loopback", "shm", "tcp"])
def test_closed_agents_leave_nothing_behind(transport: str) -> None:
    def cycle() -> None:
        with pair(transport) as (prefill, decode):
            source, target = Paged(SIDE, 1), Paged(SIDE)
            prefill.register(source.cache)
            decode.register(target.cache)
            offer = prefill.offer(source.cache, range(4), 64)
            decode.fetch(offer.ticket, target.cache, range(4)).wait(LONG)
            decode.fileno()

    cycle()
    gc.collect()
    before = fds(), threads()
    for _ in range(5):
        cycle()
    # Threads of handshakes end by themselves a moment later.
    rest = threading.Event()
    for _ in range(600):
        gc.collect()
        if (fds(), threads()) == before:
            break
        rest.wait(0.05)
    assert (fds(), threads()) == before


def test_an_agent_that_was_forgotten_is_closed() -> None:
    before = threads()
    agents = [kvxfer.Agent("forgotten", listen="127.0.0.1:0")]
    with pytest.warns(ResourceWarning, match="'forgotten' was not closed"):
        agents.clear()
    until(lambda: threads() == before)  # the kernel lists a joined thread a moment longer


# Limits of the system


def test_an_arena_beyond_the_address_space() -> None:
    with producer("tcp") as prefill, Child() as child:
        source = Paged(SIDE, 1)
        prefill.register(source.cache)
        ticket = prefill.offer(source.cache, range(4), 64).ticket
        child.call("start", "decode", "tcp", arena_bytes=1 << 40)
        child.call("cache", "cache", SIDE)
        child.call("limit_address_space", 1 << 30)
        with pytest.raises(ChildError, match="arena of 1048576 MiB.*lower arena_bytes") as caught:
            child.call("fetch", "f", ticket, "cache", range(4))
        assert caught.value.kind == "ResourceError"
        # Nothing is lost: with less it works, in the same process.
        child.call("close")
        child.call("start", "decode", "tcp")
        child.call("cache", "cache", SIDE)
        child.call("fetch", "f", ticket, "cache", range(4))
        assert child.call("wait_fetch", "f") == ("OK", "")


@pytest.mark.skipif(SANITIZED, reason="the address sanitizer makes mlock() do nothing")
def test_an_arena_that_may_not_be_locked() -> None:
    with producer("tcp") as prefill, Child() as child:
        source = Paged(SIDE, 1)
        prefill.register(source.cache)
        ticket = prefill.offer(source.cache, range(4), 64).ticket
        if os.geteuid() == 0:  # the limit does not hold for privileged processes
            child.call("drop_privileges")
        child.call("limit", "RLIMIT_MEMLOCK", 64 << 10)
        child.call("start", "decode", "tcp", lock_arena=True)
        child.call("cache", "cache", SIDE)
        with pytest.raises(
            ChildError, match=r"mlock.*limit of locked memory is 64 KiB: raise it \(ulimit -l"
        ) as caught:
            child.call("fetch", "f", ticket, "cache", range(4))
        assert caught.value.kind == "ResourceError"
        child.call("close")
        child.call("start", "decode", "tcp", lock_arena=False)
        child.call("cache", "cache", SIDE)
        child.call("fetch", "f", ticket, "cache", range(4))
        assert child.call("wait_fetch", "f") == ("OK", "")


def test_an_arena_that_may_be_locked() -> None:
    with (
        producer("loopback") as prefill,
        consumer("loopback", lock_arena=True, arena_bytes=64 << 10) as decode,
    ):
        source, target = Paged(SIDE, 1), Paged(SIDE)
        prefill.register(source.cache)
        decode.register(target.cache)
        offer = prefill.offer(source.cache, range(4), 64)
        try:
            decode.fetch(offer.ticket, target.cache, range(4)).wait(LONG)
        except kvxfer.ResourceError as error:
            pytest.skip(f"this process may not lock 64 KiB: {error}")
        assert target.same_as(source)


@pytest.mark.skipif(SANITIZED, reason="the address sanitizer itself needs descriptors")
def test_no_more_descriptors() -> None:
    """Connecting fails with a reason, and works when there are some again."""
    with producer("tcp") as prefill, Child() as child:
        source = Paged(SIDE, 1)
        prefill.register(source.cache)
        ticket = prefill.offer(source.cache, range(4), 64).ticket
        child.call("start", "decode", "tcp")
        child.call("cache", "cache", SIDE)
        child.call("use_up_descriptors")
        with pytest.raises(ChildError, match="open files") as caught:
            child.call("fetch", "f", ticket, "cache", range(4))
        assert caught.value.kind == "ResourceError"
        child.call("wait_for_dials")
        child.call("free_descriptors")
        child.call("fetch", "f", ticket, "cache", range(4))
        assert child.call("wait_fetch", "f") == ("OK", "")
        # With an arena it is the connection that fails.
        other = kvxfer.AgentRef(name="prefill", address=prefill.address)
        late = kvxfer.issue_ticket("late", [other], num_tokens=64)
        child.call("close")
        child.call("start", "decode", "tcp")
        child.call("cache", "cache", SIDE)
        child.call("fetch", "f", nobody(), "cache", range(4), timeout=0.2)
        assert child.call("wait_fetch", "f")[0] == "UNREACHABLE"
        child.call("use_up_descriptors")
        child.call("fetch", "f", late, "cache", range(4))
        status, message = child.call("wait_fetch", "f")
        assert (status, "open files" in message) == ("UNREACHABLE", True), message
        child.call("free_descriptors")
        late_offer = prefill.offer(source.cache, range(4), ticket=late)
        child.call("fetch", "f", late, "cache", range(4))
        assert child.call("wait_fetch", "f") == ("OK", "")
        assert late_offer.wait(LONG) is kvxfer.Status.OK


def test_no_more_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fetch that would connect says so, and the next one connects."""
    start = threading.Thread.start

    def fail(thread: threading.Thread) -> None:
        if thread.name == "kvxfer-connect":
            raise RuntimeError("can't start new thread")
        start(thread)

    with pair("tcp") as (prefill, decode):
        source, target = Paged(SIDE, 1), Paged(SIDE)
        prefill.register(source.cache)
        decode.register(target.cache)
        offer = prefill.offer(source.cache, range(4), 64)
        monkeypatch.setattr(threading.Thread, "start", fail)
        with pytest.raises(kvxfer.ResourceError, match="'prefill'.*new thread.*limit on threads"):
            decode.fetch(offer.ticket, target.cache, range(4))
        assert decode.stats.peers == 0
        monkeypatch.setattr(threading.Thread, "start", start)
        decode.fetch(offer.ticket, target.cache, range(4)).wait(LONG)
        assert target.same_as(source)


def nobody() -> kvxfer.Ticket:
    """A ticket of an agent that is not there."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        address = f"127.0.0.1:{listening.getsockname()[1]}"
    return kvxfer.issue_ticket("r", [kvxfer.AgentRef(name="x", address=address)], num_tokens=64)


# What others must be able to read


@pytest.mark.parametrize("what", ["model", "layers", "planes"])
def test_names_longer_than_the_wire_carries(what: str) -> None:
    name = "x" * 1025
    changes = {"model": name} if what == "model" else {what: (name,)}
    paged = Paged(dataclasses.replace(SIDE, **changes))
    with pair("loopback") as (prefill, decode), pytest.raises(kvxfer.InvalidError, match="1024"):
        decode.register(paged.cache)


def test_the_fake_peer_speaks_the_protocol() -> None:
    """What the tests of hostile peers rest on: a fetch by hand is answered as it should be."""
    with producer("tcp") as prefill:
        side = dataclasses.replace(SIDE, layers=("layer.0",), num_blocks=24)
        source = Paged(side, seed=1)
        prefill.register(source.cache)
        offer = prefill.offer(source.cache, [5], 16)
        with wire.consumer(prefill.address) as fake:
            fake.say(wire.layout(), wire.fetch(offer.ticket))
            accepted = fake.hear_a(wire.ACCEPT)
            assert int.from_bytes(accepted[15:19], "little") == 1  # chunks
            size = 2 * 16 * 4 * side.content * 2
            raw = fake.data[0].recv(24 + 21 + 16 + size, 256)  # MSG_WAITALL
            assert raw[:4] == b"KVXW"
            fake.say(wire.of_fetch(wire.DONE, 1))
            assert offer.wait(LONG) is kvxfer.Status.OK


def test_settings_of_the_tests_are_small() -> None:
    assert SMALL["arena_bytes"] < kvxfer.Config().arena_bytes
