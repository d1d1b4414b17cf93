"""Which UCX is found, what agents take it for, and what they say about it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from kvtest import ucx as lanes
from kvtest import wire
from kvtest.agents import LONG, pair, producer
from kvtest.caches import Geometry, Paged

import kvxfer
from kvxfer import connector, ucx
from kvxfer.handshake import Deadline, Identity, Transcript, recv_frame, send_frame

_SAY = "import kvxfer; found = kvxfer.transports()['ucx']; print(found.available, found.why)"


@pytest.fixture
def use_ucx(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("UCX_TLS", "UCX_NET_DEVICES"):
        monkeypatch.setenv(name, "")
    lanes.use("ucx-tcp")


def says(code: str = _SAY, **environment: str) -> str:
    """Run a process of its own, for UCX stays loaded; return what it prints."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=LONG,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_path_that_leads_nowhere_is_not_passed_over(use_ucx: None, tmp_path: Path) -> None:
    said = says(KVXFER_UCX_PATH=str(tmp_path))
    assert said.startswith("False")
    assert f"KVXFER_UCX_PATH is '{tmp_path}'" in said


def test_a_copy_that_is_loaded_is_used(use_ucx: None, tmp_path: Path) -> None:
    path = ucx.info().path
    load = (
        "import ctypes\n"
        "from pathlib import Path\n"
        "for part in ('ucs', 'uct', 'ucp'):\n"
        f"    ctypes.CDLL(str(Path({path!r}).parent / f'lib{{part}}.so.0'))\n"
    )
    assert f"({path})" in says(load + _SAY, KVXFER_UCX_PATH=str(tmp_path))


def test_a_folder_is_named(use_ucx: None) -> None:
    folder = Path(ucx.info().path).parent
    assert f"({folder}/" in says(KVXFER_UCX_PATH=str(folder))


def test_a_library_that_is_none(use_ucx: None, tmp_path: Path) -> None:
    (tmp_path / "libucp.so.0").write_bytes(b"no library")
    assert "libucp.so.0" in says(KVXFER_UCX_PATH=str(tmp_path))


def test_signals_of_the_program_are_left_alone(use_ucx: None) -> None:
    said = says(
        "import kvxfer\n"
        "def caught():\n"
        "    lines = open('/proc/self/status').read().splitlines()\n"
        "    return [line for line in lines if line.startswith(('SigCgt', 'SigIgn'))]\n"
        "before = caught()\n"
        "assert kvxfer.transports()['ucx'].available\n"
        "print(before, caught(), sep='\\n')\n"
    )
    before, after = said.splitlines()
    assert before == after


# What is looked at before the first of UCX's own functions is called.
_STUB = """
void ucp_get_version(unsigned* major, unsigned* minor, unsigned* release) {
  *major = 1, *minor = MINOR, *release = 0;
}
struct attr { unsigned long mask; unsigned level; };
signed char ucp_lib_query(struct attr* attr) { return attr->level = LEVEL, 0; }
"""
_PART = "void uct_query_components(void) {}"


def stub(folder: Path, code: str, *options: str, name: str = "libucp.so.0") -> Path:
    """Build a library that is taken for UCX's."""
    compiler = shutil.which("cc") or pytest.skip("no C compiler here")
    folder.mkdir(exist_ok=True)
    (folder / "stub.c").write_text(code)
    library = folder / name
    subprocess.run(
        [compiler, "-shared", "-fPIC", "-o", library, folder / "stub.c", *options], check=True
    )
    return library


@pytest.mark.parametrize(
    ("minor", "level", "reason"),
    [
        (12, 2, "1.13 or a later 1.x is needed"),
        (13, 1, "without --enable-mt"),
        (13, 2, "has no function ucs_status"),
    ],
)
def test_what_it_is_built_for(
    use_ucx: None, tmp_path: Path, minor: int, level: int, reason: str
) -> None:
    stub(tmp_path, _STUB, f"-DMINOR={minor}", f"-DLEVEL={level}")
    assert reason in says(KVXFER_UCX_PATH=str(tmp_path))


def test_parts_of_two_copies_are_refused(use_ucx: None, tmp_path: Path) -> None:
    part = stub(tmp_path / "other", _PART, "-Wl,-soname,libuct.so.0", name="libuct.so.0")
    options = ("-DMINOR=13", "-DLEVEL=2", str(part), f"-Wl,-rpath,{part.parent}")
    stub(tmp_path / "ucx", _STUB, "-Wl,--no-as-needed", *options)
    said = says(KVXFER_UCX_PATH=str(tmp_path / "ucx"))
    assert f"it runs on '{part}': two copies of UCX are mixed" in said


def test_the_wheel_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "libucx" / "lib").mkdir(parents=True)
    (tmp_path / "libucx" / "__init__.py").write_text("raise AssertionError('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    assert ucx.libraries() == []
    library = tmp_path / "libucx" / "lib" / "libucp.so.0"
    library.touch()
    assert ucx.libraries() == [str(library)]


def test_what_it_is_said_to_reach(use_ucx: None) -> None:
    found = kvxfer.transports()["ucx"]
    assert found.available
    assert "tcp/lo" in found.why
    assert ucx.info().path in found.why


def test_rdma_that_is_not_there_is_refused(use_ucx: None) -> None:
    assert ucx.problem(rdma=False) is None
    with pytest.raises(kvxfer.ConfigError, match=r"require='rdma' cannot be had here"):
        kvxfer.Config(transport="ucx", require="rdma")


@pytest.mark.parametrize(("ours", "theirs"), [("ucx", "auto"), ("auto", "ucx"), ("ucx", "ucx")])
def test_what_is_taken_and_why(use_ucx: None, ours: str, theirs: str) -> None:
    source, target = Paged(Geometry(), seed=1), Paged(Geometry())
    with (
        kvxfer.Agent("prefill", listen="127.0.0.1:0", transport=theirs) as prefill,
        kvxfer.Agent("decode", transport=ours) as decode,
    ):
        prefill.register(source.cache)
        decode.register(target.cache)
        offer = prefill.offer(source.cache, [0], 16)
        fetch = decode.fetch(offer.ticket, target.cache, [1])
        if ours == "auto":  # it does not offer what would go by sockets
            with pytest.raises(kvxfer.TransferError, match="no transport in common"):
                fetch.wait(LONG)
            return
        fetch.wait(LONG)
        assert fetch.report.transport == "ucx"
        assert "set to ucx" in fetch.report.why
        assert fetch.report.link.startswith("ucx 1.")
        assert "over tcp/lo" in fetch.report.link


def test_a_consumer_that_needs_rdma_takes_nothing_less(
    use_ucx: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pair("ucx-tcp") as (prefill, decode):
        source, target = Paged(Geometry(), seed=1), Paged(Geometry())
        prefill.register(source.cache)
        decode.register(target.cache)
        offer = prefill.offer(source.cache, [0], 16)
        monkeypatch.setattr(ucx, "problem", lambda *, rdma: None)  # as if there were adapters
        fetch = decode.fetch(offer.ticket, target.cache, [1], require="rdma")
        with pytest.raises(
            kvxfer.TransferError,
            match=r"the consumer: UCX 1\..* has only tcp/lo here, and that is no RDMA",
        ):
            fetch.wait(LONG)
        decode.fetch(offer.ticket, target.cache, [1]).wait(LONG)


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_addresses_that_make_no_sense(
    use_ucx: None, monkeypatch: pytest.MonkeyPatch, side: str
) -> None:
    from kvxfer import connector, listener

    module = listener if side == "prefill" else connector
    monkeypatch.setattr(module, "endpoint_frame", lambda address: {"endpoint": "AAAA"})
    with (
        pair("ucx-tcp") as (prefill, decode),
        pytest.raises(kvxfer.HandshakeError, match="ends early"),
    ):
        decode.connect(prefill.name, prefill.address)


def report_of(prefill: kvxfer.Agent, decode: kvxfer.Agent) -> kvxfer.Report:
    """Fetch once, and return the report."""
    source, target = Paged(Geometry(), seed=1), Paged(Geometry())
    prefill.register(source.cache)
    decode.register(target.cache)
    fetch = decode.fetch(prefill.offer(source.cache, [0], 16).ticket, target.cache, [1])
    fetch.wait(LONG)
    return fetch.report


@pytest.fixture
def two_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Producers believe that their consumers are on another host."""
    monkeypatch.setattr("kvxfer.listener.host_identity", lambda: "elsewhere")


@pytest.mark.parametrize("rdma", [False, True, None])
def test_a_consumer_that_means_rdma_is_not_given_sockets(use_ucx: None, rdma: bool | None) -> None:
    if ucx.problem(rdma=True) is None:
        pytest.skip("UCX reaches an RDMA adapter here")
    says_so = {} if rdma is None else {"rdma": rdma}
    first = wire.greeting(Identity("decode", 1), transports=["ucx"], **says_so)
    deadline = Deadline(LONG)
    with producer("auto") as prefill, wire.open_socket(prefill.address) as sock:
        send_frame(sock, first, deadline)
        transcript = Transcript(None, first, recv_frame(sock, deadline))
        send_frame(sock, {"proof": transcript.proof("consumer")}, deadline)
        if rdma is False:
            assert recv_frame(sock, deadline)["transport"] == "ucx"
            return
        with pytest.raises(
            kvxfer.HandshakeError, match="no ucx for the producer: this host has no"
        ):
            recv_frame(sock, deadline)


def test_why_it_is_not_taken_is_said(
    use_ucx: None, two_hosts: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    offered = (["shm", "tcp"], {"ucx": "its daemon sleeps"})
    monkeypatch.setattr(connector, "offered_transports", lambda *_: offered)
    with pair("auto") as (prefill, decode):
        assert "no ucx for the consumer: its daemon sleeps" in report_of(prefill, decode).why


def test_it_is_not_taken_unasked(
    use_ucx: None, two_hosts: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ucx, "problem", lambda *, rdma: None)  # as if there were adapters
    with pair("auto") as (prefill, decode):
        report = report_of(prefill, decode)
    assert report.transport == "tcp"
    assert "ucx" not in report.why


# An endpoint of a process that stands still: its sockets accept, and nobody answers.
_STOPPED = """
import os, signal, kvxfer
agent = kvxfer.Agent("stopped", transport="ucx")
endpoint = agent._fabrics.endpoint("ucx", with_arena=True, rdma=False)
print(endpoint.address.hex(), flush=True)
os.kill(os.getpid(), signal.SIGSTOP)
"""


def test_a_connection_that_ucx_cannot_make_in_time_goes_by_tcp(
    use_ucx: None, two_hosts: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    with subprocess.Popen([sys.executable, "-c", _STOPPED], stdout=subprocess.PIPE) as stopped:
        try:
            assert stopped.stdout is not None
            address = bytes.fromhex(stopped.stdout.readline().decode())
            frame = connector.endpoint_frame(address)
            monkeypatch.setattr(connector, "endpoint_frame", lambda _: frame)
            monkeypatch.setattr(connector, "offered_transports", lambda *_: (["ucx", "tcp"], {}))
            monkeypatch.setattr(connector, "means_rdma", lambda config: False)
            with pair("auto", handshake_timeout=3.0) as (prefill, decode):
                report = report_of(prefill, decode)
            assert report.transport == "tcp"
            assert "UCX: the peer did not answer within 1.5" in report.why
        finally:
            stopped.kill()
