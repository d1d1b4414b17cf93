"""Agents over verbs, on adapters that fail on request."""

from __future__ import annotations

import errno
import re
import socket
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from kvtest import fake_verbs, wire
from kvtest.agents import LONG, consumer, pair, producer, until
from kvtest.caches import Geometry, Paged

import kvxfer
from kvxfer.handshake import (
    PROTOCOL,
    Deadline,
    Identity,
    Transcript,
    endpoint_frame,
    problem_frame,
    recv_endpoint,
    recv_frame,
    send_frame,
)

SIDE = Geometry(layers=tuple("abcd"), content=64, num_blocks=32)
TOKENS = 32 * 16
BUSY = {"arena_bytes": 32 << 10, "chunk_bytes": 8 << 10}

pytestmark = pytest.mark.skipif(
    fake_verbs.real_devices() is not None, reason="needs the fake adapters, and there are real ones"
)


@pytest.fixture(autouse=True)
def adapters() -> Iterator[None]:
    fake_verbs.use()
    with fake_verbs.no_faults_left():
        yield


@pytest.fixture
def two_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Producers believe that their consumers are on another host."""
    monkeypatch.setattr("kvxfer.listener.host_identity", lambda: "elsewhere")


def fetched(prefill: kvxfer.Agent, decode: kvxfer.Agent, **options: Any) -> kvxfer.Report:
    """Fetch once, compare, and return the report."""
    source, target = Paged(SIDE, seed=1), Paged(SIDE)
    prefill.register(source.cache)
    decode.register(target.cache)
    offer = prefill.offer(source.cache, range(32), TOKENS)
    fetch = decode.fetch(offer.ticket, target.cache, range(32), timeout=LONG, **options)
    fetch.wait(LONG)
    assert target.same_as(source)
    assert offer.wait(LONG) is kvxfer.Status.OK
    prefill.unregister(source.cache)
    decode.unregister(target.cache)
    return fetch.report


# What is taken, and why


def test_auto_takes_it_between_hosts(two_hosts: None) -> None:
    with producer("auto") as prefill, consumer("auto") as decode:
        report = fetched(prefill, decode)
    assert report.transport == "verbs"
    assert "different hosts" in report.why
    assert "RDMA" in report.why
    assert report.link.startswith("verbs, 2 rails, ")
    for device in fake_verbs.DEVICES:
        assert f"{device}:1 - {device}:1 (GID 1 RoCE v2 ::ffff:10.9." in report.link
    assert "2 queue pairs" in report.link
    assert re.search(r"[1-9]\d* completions, [1-9]\d* wake-ups", report.link)


def test_auto_takes_shm_on_one_host() -> None:
    with producer("auto") as prefill, consumer("auto") as decode:
        assert fetched(prefill, decode).transport == "shm"


@pytest.mark.parametrize("set_to", ["both", "consumer", "producer"])
def test_it_is_taken_where_it_was_set(set_to: str) -> None:
    ours, theirs = (
        "verbs" if side in (set_to, "both") or set_to == "both" else "auto"
        for side in ("consumer", "producer")
    )
    with producer(theirs) as prefill, consumer(ours) as decode:
        report = fetched(prefill, decode)
    assert report.transport == "verbs"
    assert "set to verbs" in report.why


def test_transports_names_the_ports() -> None:
    found = kvxfer.transports()["verbs"]
    assert found.available
    assert "fake0:1 (Ethernet, 400 Gbit/s), fake1:1" in found.why


@pytest.mark.parametrize(("devices", "rails"), [("fake1", 1), ("fake0:1, fake1", 2)])
def test_chosen_devices(devices: str, rails: int) -> None:
    with pair("verbs", verbs_devices=devices, verbs_queue_pairs=3, verbs_gid_index=1) as agents:
        link = fetched(*agents).link
    assert f"verbs, {rails} rail" in link
    assert link.count("3 queue pairs") == rails


def test_a_device_that_does_not_exist() -> None:
    with pytest.raises(kvxfer.ConfigError, match=r"'mlx5_7'; there is fake0, fake1"):
        kvxfer.Config(transport="verbs", verbs_devices="mlx5_7")


# Where it cannot be


@pytest.fixture
def no_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVXFER_VERBS_LIBRARY", "/nowhere/libibverbs.so.1")


def test_without_a_library(no_library: None, two_hosts: None) -> None:
    found = kvxfer.transports()["verbs"]
    assert not found.available
    assert "/nowhere/libibverbs.so.1" in found.why
    assert "install rdma-core" in found.why
    for knobs in ({"transport": "verbs"}, {"require": "rdma"}):
        with pytest.raises(kvxfer.ConfigError, match="cannot be had here: .*install rdma-core"):
            kvxfer.Config(**knobs)
    with producer("auto") as prefill, consumer("auto") as decode:
        report = fetched(prefill, decode)
    assert report.transport == "tcp"
    assert "no verbs for the consumer: " in report.why
    assert "for the producer: " in report.why


def test_without_an_active_port(two_hosts: None) -> None:
    for device in fake_verbs.DEVICES:
        fake_verbs.set_port(device, False)
    assert "fake0:1: not active" in kvxfer.transports()["verbs"].why
    with producer("auto") as prefill, consumer("auto") as decode:
        report = fetched(prefill, decode)
    assert report.transport == "tcp"
    assert "not active" in report.why


FAILURES = [
    # What fails, and after how many that went well: the consumer's come first.
    ("reg_mr", 0, "the consumer: cannot register"),
    ("create_qp", 0, "the consumer: .*queue pair"),
    ("modify_qp_init", 4, "the producer: .*initialise"),
    ("modify_qp_rtr", 0, "the producer: .*ready to receive"),
    ("modify_qp_rts", 4, "the consumer: .*ready to send"),
]


@pytest.mark.parametrize(("function", "skip", "problem"), FAILURES)
def test_what_fails_while_connecting_leads_to_tcp(
    two_hosts: None, function: str, skip: int, problem: str
) -> None:
    with producer("auto") as prefill, consumer("auto") as decode:
        fake_verbs.fail_calls(function, errno.ENOMEM, skip, times=2)
        report = fetched(prefill, decode)
        assert report.transport == "tcp"
        assert report.why.startswith("verbs cannot be: ")
        assert re.search(problem, report.why)
    assert fake_verbs.objects() == 0


@pytest.mark.parametrize(("function", "skip", "problem"), FAILURES)
@pytest.mark.parametrize("strict", ["consumer", "producer"])
def test_what_fails_while_connecting_ends_a_fetch_that_must_be_rdma(
    two_hosts: None, function: str, skip: int, problem: str, strict: str
) -> None:
    knobs = {"require": "rdma"}
    with (
        producer("auto", **(knobs if strict == "producer" else {})) as prefill,
        consumer("auto", **(knobs if strict == "consumer" else {})) as decode,
    ):
        fake_verbs.fail_calls(function, errno.ENOMEM, skip, times=2)
        with pytest.raises(kvxfer.TransferError, match=problem) as caught:
            fetched(prefill, decode)
        assert caught.value.status is kvxfer.Status.UNREACHABLE
        fake_verbs.library().fake_verbs_forget_faults()
        assert fetched(prefill, decode).transport == "verbs"
    assert fake_verbs.objects() == 0


# What a fetch requires


def test_a_fetch_that_requires_rdma_gets_a_connection_of_its_own() -> None:
    with producer("auto") as prefill, consumer("auto") as decode:
        assert fetched(prefill, decode).transport == "shm"
        assert fetched(prefill, decode, require="rdma").transport == "verbs"
        assert fetched(prefill, decode).transport == "shm"
        assert fetched(prefill, decode, require="rdma").transport == "verbs"
        assert prefill.stats.peers == 2


def test_one_connection_serves_both_where_it_is_rdma() -> None:
    with pair("verbs") as (prefill, decode):
        assert fetched(prefill, decode, require="rdma").transport == "verbs"
        assert fetched(prefill, decode).transport == "verbs"
        assert prefill.stats.peers == 1


def test_a_producer_that_does_not_allow_it() -> None:
    with producer("tcp") as prefill, consumer("auto") as decode:
        with pytest.raises(kvxfer.TransferError, match="no transport in common: .*verbs.* tcp"):
            fetched(prefill, decode, require="rdma")
        assert fetched(prefill, decode).transport == "tcp"


@pytest.mark.parametrize("transport", ["shm", "tcp", "loopback"])
def test_requirements_that_contradict_the_transport(transport: str) -> None:
    with pytest.raises(kvxfer.ConfigError, match=f"contradicts transport='{transport}'"):
        kvxfer.Config(transport=transport, require="rdma")
    with pair(transport) as agents, pytest.raises(kvxfer.ConfigError, match="contradicts"):
        fetched(*agents, require="rdma")


@pytest.mark.parametrize(
    ("require", "why"),
    [("gpudirect-rdma", "staged in host memory with path='staged'"), ("telepathy", "is not known")],
)
def test_requirements_that_cannot_be_met(require: str, why: str) -> None:
    with pytest.raises(kvxfer.ConfigError, match=why):
        kvxfer.Config(require=require)
    with pair("verbs") as agents, pytest.raises(kvxfer.ConfigError, match=why):
        fetched(*agents, require=require)


# Faults of rails


def half(fetch: kvxfer.Fetch) -> None:
    until(lambda: fetch.report.bytes > 0)


def take_down(device: str) -> None:
    fake_verbs.set_port(device, False)


FAULTS: dict[str, Callable[[str], None]] = {
    "port": take_down,
    "queue pairs": fake_verbs.break_queue_pairs,
    "completion queues": fake_verbs.overrun_completion_queues,
    "adapter": fake_verbs.fail_device,
}


def all_under_way(prefill: kvxfer.Agent, sent: int, fetch: kvxfer.Fetch) -> None:
    """Wait until every slot is written to, and so something is under way on each path."""
    slots = BUSY["arena_bytes"]
    until(lambda: prefill.stats.bytes_sent - sent - fetch.report.bytes >= slots)


@pytest.mark.parametrize("seed", range(len(FAULTS)), ids=[*FAULTS])
def test_a_rail_that_dies_in_the_middle(seed: int) -> None:
    fault = [*FAULTS.values()][seed]
    with pair("verbs", **BUSY) as (prefill, decode):
        source, target = Paged(SIDE, seed=seed + 1), Paged(SIDE)
        prefill.register(source.cache)
        decode.register(target.cache)
        sent = prefill.stats.bytes_sent
        offer = prefill.offer(source.cache, range(32), TOKENS, ready=False)
        fetch = decode.fetch(offer.ticket, target.cache, range(32), timeout=LONG)
        offer.mark_ready(0)
        half(fetch)
        fake_verbs.hold_sends(True)
        offer.mark_all_ready()
        all_under_way(prefill, sent, fetch)
        dead = fake_verbs.DEVICES[seed % 2]
        fault(dead)
        fake_verbs.hold_sends(False)
        fetch.wait(LONG)
        assert target.same_as(source)
        lost = rf"failover.* from {dead}:1 - {dead}:1: \w"
        assert re.search(lost, fetch.report.link)
        fake_verbs.set_port(dead, True)
        assert offer.wait(LONG) is kvxfer.Status.OK
        prefill.unregister(source.cache)
        decode.unregister(target.cache)
        reopened(prefill, decode, dead)


def reopened(prefill: kvxfer.Agent, decode: kvxfer.Agent, device: str) -> None:
    """Wait until a rail that was lost carries bytes again."""
    before = fake_verbs.bytes_sent(device)

    def carries() -> bool:
        fetched(prefill, decode)
        return fake_verbs.bytes_sent(device) > before

    until(carries)


@pytest.mark.parametrize("how", [*FAULTS, "memory"])
def test_all_rails_die(how: str) -> None:
    """The fetch ends with the reason; the next one connects anew, when there is something to."""
    with pair("verbs", **BUSY) as (prefill, decode):
        source, target = Paged(SIDE, seed=1), Paged(SIDE)
        prefill.register(source.cache)
        decode.register(target.cache)
        offer = prefill.offer(source.cache, range(32), TOKENS, ready=False)
        fetch = decode.fetch(offer.ticket, target.cache, range(32), timeout=LONG)
        offer.mark_ready(0)
        half(fetch)
        for device in fake_verbs.DEVICES:
            FAULTS.get(how, fake_verbs.revoke_remote_keys)(device)
        offer.mark_all_ready()
        with pytest.raises(kvxfer.TransferError, match="lost") as caught:
            fetch.wait(LONG)
        assert caught.value.status is kvxfer.Status.PEER_LOST
        until(lambda: decode.stats.free_slots == decode.stats.slots)
        until(lambda: prefill.stats.serving == 0)
        for device in fake_verbs.DEVICES:
            fake_verbs.set_port(device, True)
        again = decode.fetch(offer.ticket, target.cache, range(32), timeout=LONG)
        again.wait(LONG)
        assert target.same_as(source)


def test_a_cancel_while_writes_are_held_up() -> None:
    """The slots stay out of use until nothing can land in them any more."""
    with pair("verbs", **BUSY) as (prefill, decode):
        source, target = Paged(SIDE, seed=1), Paged(SIDE)
        prefill.register(source.cache)
        decode.register(target.cache)
        offer = prefill.offer(source.cache, range(32), TOKENS, consumers=2)
        decode.connect("prefill", prefill.address)
        fake_verbs.hold_sends(True)
        fetch = decode.fetch(offer.ticket, target.cache, range(32), timeout=LONG)
        until(lambda: prefill.stats.bytes_sent > 0)
        fetch.cancel()
        assert decode.stats.quarantined_slots > 0
        fake_verbs.hold_sends(False)
        until(lambda: decode.stats.free_slots == decode.stats.slots)
        assert target.poisoned
        decode.fetch(offer.ticket, target.cache, range(32), timeout=LONG).wait(LONG)
        assert target.same_as(source)


# Keys


def test_each_peer_has_keys_of_its_own_which_end_with_it() -> None:
    with producer("verbs") as staying, consumer("verbs") as decode:
        with producer("verbs", "going") as going:
            decode.connect("prefill", staying.address)
            first = fake_verbs.remote_keys()
            assert len(first) == 2  # rails
            decode.connect("going", going.address)
            both = fake_verbs.remote_keys()
            assert len(both) == 4
            assert first < both
        until(lambda: fake_verbs.remote_keys() == first)
        assert fetched(staying, decode).transport == "verbs"
    assert fake_verbs.remote_keys() == set()
    assert fake_verbs.objects() == 0


def test_no_key_leaves_before_the_producer_has_proved_itself() -> None:
    """What a consumer says to whom it does not know yet."""
    with wire.FakeProducer() as fake, consumer("verbs", secret="s") as decode:
        cache = Paged(SIDE)
        decode.register(cache.cache)
        ticket = kvxfer.issue_ticket("r", [fake.reference()], num_tokens=TOKENS, secret="s")
        fetch = decode.fetch(ticket, cache.cache, range(32), timeout=LONG)
        control = fake.next_socket()
        hello = recv_frame(control, Deadline(LONG))
        assert "endpoint" not in hello
        reply = {"kvxfer": PROTOCOL, **fake.identity.frame(), "nonce": "00"}
        proof = Transcript("guessed", hello, reply).proof("producer")
        send_frame(control, {**reply, "proof": proof}, Deadline(LONG))
        assert control.recv(1) == b""
        with pytest.raises(kvxfer.TransferError, match="secret"):
            fetch.wait(LONG)
        assert fake_verbs.remote_keys() == set()
        control.close()


# Peers that lie in the handshake


def proven(address: str) -> socket.socket:
    """Shake hands like a consumer that has verbs only, up to where the endpoints follow."""
    identity = Identity("stranger", 7)
    sock, deadline = wire.open_socket(address), Deadline(LONG)
    first = wire.greeting(identity, transports=["verbs"])
    send_frame(sock, first, deadline)
    transcript = Transcript(None, first, recv_frame(sock, deadline))
    send_frame(sock, {"proof": transcript.proof("consumer")}, deadline)
    assert recv_frame(sock, deadline)["transport"] == "verbs"
    return sock


JUNK = [
    {"endpoint": "not base64!"},
    {"endpoint": 7},
    {"endpoint": ""},
    {"neither": 1},
    endpoint_frame(b"KVV1"),
    endpoint_frame(bytes(range(256)) * 100),
    problem_frame("I do not want to"),
]


@pytest.mark.parametrize("frame", JUNK, ids=lambda frame: str(frame)[:40])
def test_a_consumer_that_sends_junk_for_an_endpoint(frame: dict[str, Any]) -> None:
    with producer("verbs") as prefill:
        with proven(prefill.address) as sock:
            send_frame(sock, frame, Deadline(LONG))
            while sock.recv(4096):  # it says what the problem is, or nothing, and closes
                pass
        with consumer("verbs") as decode:
            assert fetched(prefill, decode).transport == "verbs"
    assert fake_verbs.objects() == 0


def test_a_consumer_whose_endpoint_is_cut_or_changed() -> None:
    with consumer("verbs") as other, producer("verbs") as prefill:
        good = other._fabrics.endpoint("verbs", with_arena=True).address
        cuts = [good[:length] for length in range(0, len(good), 7)]
        flips = [bytes([*good[:at], good[at] ^ 0xFF, *good[at + 1 :]]) for at in range(28)]
        for address in [*cuts, *flips, good + b"\0"]:
            with proven(prefill.address) as sock:
                send_frame(sock, endpoint_frame(address), Deadline(LONG))
                _, problem = recv_endpoint(sock, Deadline(LONG))
                if problem is None:  # it makes sense, though it may be nowhere
                    send_frame(sock, problem_frame("changed my mind"), Deadline(LONG))
                assert sock.recv(1) == b""
        assert prefill.stats.peers == 0


def test_a_consumer_that_leaves_in_the_middle() -> None:
    with consumer("verbs") as other, producer("verbs") as prefill:
        address = other._fabrics.endpoint("verbs", with_arena=True).address
        for step in range(3):
            with proven(prefill.address) as sock:
                if step > 0:
                    send_frame(sock, endpoint_frame(address), Deadline(LONG))
                if step > 1:
                    assert recv_endpoint(sock, Deadline(LONG))[1] is None
        with consumer("verbs") as decode:
            assert fetched(prefill, decode).transport == "verbs"
        until(lambda: prefill.stats.peers == 0)


def test_a_producer_that_sends_junk_for_an_endpoint() -> None:
    for frame in JUNK:
        with wire.FakeProducer() as fake, consumer("verbs") as decode:
            cache = Paged(SIDE)
            decode.register(cache.cache)
            ticket = kvxfer.issue_ticket("r", [fake.reference()], num_tokens=TOKENS)
            fetch = decode.fetch(ticket, cache.cache, range(32), timeout=LONG)
            control, deadline = fake.next_socket(), Deadline(LONG)
            hello = recv_frame(control, deadline)
            assert hello["transports"] == ["verbs"]
            reply = {"kvxfer": PROTOCOL, **fake.identity.frame(), "nonce": "00"}
            transcript = Transcript(None, hello, reply)
            send_frame(control, {**reply, "proof": transcript.proof("producer")}, deadline)
            recv_frame(control, deadline)
            chosen = {"transport": "verbs", "why": "", "session": "s", "fallback": False}
            send_frame(control, chosen, deadline)
            assert recv_endpoint(control, deadline)[1] is None
            send_frame(control, frame, deadline)
            with pytest.raises(kvxfer.TransferError) as caught:
                fetch.wait(LONG)
            assert caught.value.status is kvxfer.Status.UNREACHABLE
            assert cache.poisoned
            control.close()
    until(lambda: fake_verbs.objects() == 0)  # when the thread that connected has ended
