"""Handshakes under TLS: what they keep from others, and whom they keep out."""

from __future__ import annotations

import os
import re
import socket
import ssl
import time
from pathlib import Path
from typing import Any

import pytest
from faults.test_secret import SECRET, Recorder, fetch_from
from kvtest import wire
from kvtest.agents import LONG, consumer, producer, until
from kvtest.caches import Geometry, Paged

import kvxfer
from kvxfer.handshake import Deadline, Identity, recv_frame, send_frame

FILES = Path(__file__).parents[1] / "data" / "tls"
SIDE = Geometry(layers=("a",), content=8, num_blocks=4)


def certificate(name: str = "agent", authority: str = "ca", key: str | None = None) -> dict:
    return {
        "tls_cert": str(FILES / f"{name}.pem"),
        "tls_key": str(FILES / f"{key or name}.key"),
        "tls_ca": str(FILES / f"{authority}.pem"),
    }


@pytest.mark.parametrize("streams", [1, 3])
def test_over_every_transport(transport: str, streams: int) -> None:
    knobs: dict[str, Any] = {**certificate(), "secret": SECRET, "tcp_streams": streams}
    with producer(transport, **knobs) as prefill, consumer(transport, **knobs) as decode:
        for _ in range(3):
            fetch_from(prefill, decode)
        until(lambda: prefill.stats.serving == 0)


def test_what_the_core_says_first_is_not_lost() -> None:
    """Its words may come with the last ones under TLS: again and again, from new connections."""
    with producer("tcp", **certificate()) as prefill:
        for number in range(30):
            with consumer("tcp", f"decode-{number}", tcp_streams=2, **certificate()) as decode:
                fetch_from(prefill, decode)


def test_the_handshake_cannot_be_read() -> None:
    """Neither nonces nor proofs nor tokens pass in clear; without TLS they do."""
    words = (b"nonce", b"proof", b"session", b"token", b"transports")
    for knobs in ({}, certificate()):
        with (
            producer("tcp", secret=SECRET, **knobs) as prefill,
            consumer("tcp", secret=SECRET, **knobs) as decode,
        ):
            recorder = Recorder(prefill.address)
            decode.connect("prefill", recorder.address)
            until(lambda prefill=prefill: prefill.stats.peers == 1)
        recorder.close()
        passed = b"".join(map(bytes, recorder.said)) + bytes(recorder.heard)
        assert all((word in passed) is not bool(knobs) for word in words)


def refusal(prefill: kvxfer.Agent, **knobs: Any) -> str:
    with consumer("tcp", handshake_timeout=10.0, **knobs) as decode:
        with pytest.raises(kvxfer.HandshakeError) as refused:
            decode.connect("prefill", prefill.address)
        assert prefill.stats.peers == 0
        return str(refused.value)


@pytest.mark.parametrize(
    ("ours", "theirs", "words"),
    [
        (certificate(), certificate("stranger", "other-ca"), "unable to get local issuer|signed"),
        (certificate(), certificate("stranger"), "unknown.ca|reset|closed|Broken pipe"),
        (certificate(), certificate("agent", "other-ca"), "unable to get local issuer|signed"),
        (certificate(), certificate("expired"), "expired|reset|closed|Broken pipe"),
        (certificate("expired"), certificate(), "certificate has expired"),
        (certificate("elsewhere"), certificate(), "not valid for '127.0.0.1'"),
        (certificate(), {}, "speaks TLS, this one does not"),
        ({}, certificate(), "no TLS with"),
    ],
    ids=[
        "another authority",
        "a stranger's certificate",
        "trusts another authority",
        "expired consumer",
        "expired producer",
        "another host's certificate",
        "no TLS to TLS",
        "TLS to no TLS",
    ],
)
def test_who_is_kept_out(ours: dict, theirs: dict, words: str) -> None:
    with producer("tcp", **ours) as prefill:
        text = refusal(prefill, **theirs)
        assert re.search(words, text, re.IGNORECASE), text
        if ours == certificate():  # others are served
            with consumer("tcp", **certificate()) as decode:
                fetch_from(prefill, decode)


def speak(address: str, context: ssl.SSLContext) -> None:
    """Begin a handshake with a producer."""
    with context.wrap_socket(wire.open_socket(address), server_hostname="127.0.0.1") as sock:
        send_frame(sock, wire.greeting(Identity("decode", 7)), Deadline(LONG))
        recv_frame(sock, Deadline(LONG))


def test_older_versions_are_refused() -> None:
    context = ssl.create_default_context(cafile=str(FILES / "ca.pem"))
    context.load_cert_chain(FILES / "agent.pem", FILES / "agent.key")
    with producer("tcp", **certificate()) as prefill:
        speak(prefill.address, context)
        context.maximum_version = ssl.TLSVersion.TLSv1_2
        with pytest.raises(OSError, match="(?i)version|reset|closed"):
            speak(prefill.address, context)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(FILES / "agent.pem", FILES / "agent.key")
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    with (
        socket.create_server(("127.0.0.1", 0)) as old,
        context.wrap_socket(old, server_side=True) as listening,
        consumer("tcp", **certificate()) as decode,
    ):
        reference = kvxfer.AgentRef(name="p", address=f"127.0.0.1:{listening.getsockname()[1]}")
        ticket = kvxfer.issue_ticket("r", [reference], num_tokens=16)
        target = Paged(SIDE)
        decode.register(target.cache)
        fetch = decode.fetch(ticket, target.cache, [0], timeout=LONG)
        with pytest.raises(OSError):  # noqa: PT011 - of whatever kind
            listening.accept()
        with pytest.raises(kvxfer.TransferError, match="no TLS with"):
            fetch.wait()


def test_no_certificate_is_not_enough() -> None:
    """A peer that trusts us and shows nothing."""
    with producer("tcp", **certificate()) as prefill:
        anonymous = ssl.create_default_context(cafile=str(FILES / "ca.pem"))
        with pytest.raises((OSError, kvxfer.HandshakeError)):
            speak(prefill.address, anonymous)


@pytest.mark.parametrize(
    ("knobs", "words"),
    [
        ({"tls_cert": certificate()["tls_cert"]}, "both tls_cert.*and tls_ca"),
        ({"tls_ca": certificate()["tls_ca"]}, "both tls_cert.*and tls_ca"),
        ({**certificate(), "tls_cert": "/nowhere.pem"}, "tls_cert '/nowhere.pem'.*No such file"),
        ({**certificate(), "tls_ca": "/nowhere.pem"}, "tls_ca '/nowhere.pem'.*No such file"),
        ({**certificate(), "tls_key": None}, "tls_cert.*cannot be used"),
        (certificate(key="stranger"), "tls_cert.*cannot be used"),
        (certificate(key="encrypted"), "tls_key.*is encrypted"),
    ],
)
def test_files_that_cannot_be_used(knobs: dict, words: str) -> None:
    with pytest.raises(kvxfer.ConfigError, match=words):
        kvxfer.Config(**knobs)


def test_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in certificate().items():
        monkeypatch.setenv(f"KVXFER_{name.upper()}", value)
    with producer("tcp") as prefill:
        assert "speaks TLS" in refusal(prefill, tls_cert=None, tls_key=None, tls_ca=None)
        with consumer("tcp") as decode:
            fetch_from(prefill, decode)


def test_a_renewed_certificate_needs_no_restart(tmp_path: Path) -> None:
    def put(name: str) -> dict:
        for kind in ("pem", "key"):
            (tmp_path / f"mine.{kind}").write_bytes((FILES / f"{name}.{kind}").read_bytes())
        files = {"tls_cert": str(tmp_path / "mine.pem"), "tls_key": str(tmp_path / "mine.key")}
        return {**certificate(), **files}

    with producer("tcp", **put("expired")) as prefill:
        assert "expired" in refusal(prefill, **certificate())
        put("agent")
        with consumer("tcp", **certificate()) as decode:
            fetch_from(prefill, decode)


def test_a_renewal_that_went_wrong_is_said_and_the_old_files_stay(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def put(kind: str, name: str = "agent") -> None:
        (tmp_path / f"mine.{kind}").write_bytes((FILES / f"{name}.{kind}").read_bytes())

    put("pem")
    put("key")
    files = {"tls_cert": str(tmp_path / "mine.pem"), "tls_key": str(tmp_path / "mine.key")}
    with producer("tcp", **{**certificate(), **files}) as prefill:

        def served() -> list[str]:
            caplog.clear()
            for number in range(2):
                with consumer("tcp", f"decode-{number}", **certificate()) as decode:
                    fetch_from(prefill, decode)
            return [record.getMessage() for record in caplog.records]

        assert served() == []
        put("pem", "stranger")  # whose key is another
        (said,) = served()
        assert re.search(r"tls_cert '.*mine.pem'.*cannot be used.*stay in use", said)
        (tmp_path / "mine.key").unlink()
        (said,) = served()
        assert "No such file" in said
        put("pem")
        put("key")
        assert served() == []
        put("pem", "expired")  # a pair, and so it is used
        put("key", "expired")
        assert "expired" in refusal(prefill, **certificate())


def test_a_frame_is_sent_within_the_deadline_of_all() -> None:
    """By a peer that takes a little at a time, as TLS does record by record."""

    class Slow:
        def settimeout(self, seconds: float) -> None:
            assert seconds > 0

        def send(self, data: memoryview) -> int:
            time.sleep(0.01)
            return min(len(data), 10)

        def sendall(self, data: bytes) -> None:
            while data:
                data = data[self.send(memoryview(data)) :]

    with pytest.raises(TimeoutError):
        send_frame(Slow(), {"endpoint": "x" * 2000}, Deadline(0.1))  # type: ignore[arg-type]


def test_the_key_never_shows() -> None:
    key = (FILES / "agent.key").read_text().splitlines()[1]
    with producer("tcp", **certificate()) as prefill:
        shown = [repr(prefill.config), kvxfer.Config.describe(), repr(prefill)]
        shown += [refusal(prefill, **certificate("stranger", "other-ca"))]
    with pytest.raises(kvxfer.ConfigError) as wrong:
        kvxfer.Config(**{**certificate(), "tls_ca": str(FILES / "agent.key")})
    shown.append(str(wrong.value))
    assert not any(key in text for text in shown)


def test_strangers_who_say_nothing_are_dropped_in_time() -> None:
    with producer("tcp", handshake_timeout=0.3, **certificate()) as prefill:
        descriptors = len(os.listdir("/proc/self/fd"))
        silent = [wire.open_socket(prefill.address) for _ in range(20)]
        for sock in silent:
            sock.sendall(b"\x16\x03\x01")  # so begins TLS
        for sock in silent:
            while sock.recv(64):
                pass
            sock.close()
        until(lambda: len(os.listdir("/proc/self/fd")) <= descriptors)
