"""`kvxfer doctor` as a user runs it."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from kvtest import ucx
from kvtest.doctor_hosts import h100, mi300x, validate

from kvxfer import _core, cli
from kvxfer.bench.channel import connect
from kvxfer.config import Config
from kvxfer.doctor import ask, pattern, selftest
from kvxfer.doctor.findings import State
from kvxfer.doctor.pattern import TOTAL_BYTES, PatternCache
from kvxfer.doctor.tree import open_tree
from kvxfer.transports import transports
from kvxfer.ucx import libraries

COMMAND = [sys.executable, "-m", "kvxfer", "doctor"]
LONG = 60.0


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *arguments],
        capture_output=True,
        text=True,
        timeout=LONG,
        env=surroundings(**environment),
    )


def surroundings(**changes: str) -> dict[str, str]:
    """What the tests run in, without settings of kvxfer that happen to be there."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("KVXFER_") or name == "KVXFER_UCX_PATH"  # as transports() here
    }
    return {**kept, **changes}


def findings(record: dict, group: str) -> dict[str, dict]:
    return {one["id"]: one for one in record["findings"] if one["group"] == group}


@pytest.fixture(scope="module")
def here() -> dict:
    done = run("--json")
    assert done.stderr == ""
    record = json.loads(done.stdout)
    assert done.returncode == record["exit_status"]
    return record


def test_this_machine_is_told_in_json(here):
    validate(here)
    hurts = here["summary"]["warn"] + here["summary"]["bad"]
    assert here["exit_status"] == int(hurts > 0)
    assert sum(here["summary"].values()) == len(here["findings"])
    build = {one["what"] for one in here["findings"] if one["group"] == "build"}
    assert {f"transport {name}" for name in transports()} <= build
    assert {f"library for {name}" for name in ask.QUESTIONS} <= build


@pytest.mark.parametrize("name", ["loopback", "shm", "tcp"])
def test_each_path_is_tested_here(name, here):
    tested = findings(here, "selftest")
    assert tested.keys() == {
        f"selftest.{one.name}" for one in transports().values() if one.available
    }
    assert tested[f"selftest.{name}"]["state"] == "ok"
    assert f"{TOTAL_BYTES >> 20} MiB" in tested[f"selftest.{name}"]["found"]
    assert f"over {name}" in tested[f"selftest.{name}"]["found"]


def test_this_machine_is_told_in_words():
    done = run("--no-self-test")
    assert done.returncode in (0, 1)
    assert done.stderr == ""
    assert "\x1b" not in done.stdout  # no terminal
    assert all(len(line) <= 100 for line in done.stdout.splitlines() if " " in line.strip())
    last = done.stdout.splitlines()[-1]
    assert last.startswith("Nothing would hurt" if done.returncode == 0 else tuple("123456789"))
    assert "Self-test" not in done.stdout


def test_a_host_elsewhere(tmp_path):
    host, _, folders = h100()
    host.port("mlx5_1", folders[1], state="1: DOWN", physical="2: Polling")
    root = tmp_path / "root"
    root.mkdir()
    host.write(root)
    recording = str(tmp_path / "host.json")
    done = run("--root", str(root), "--record", recording)
    assert done.returncode == 1
    assert "mlx5_1 port 1" in done.stdout.splitlines()[-1]
    assert "GPU0" in done.stdout
    again = run("--root", recording)
    assert again.stdout == done.stdout
    quiet = run("--root", recording, "--quiet")
    assert quiet.returncode == 1
    assert "mlx5_0" not in quiet.stdout
    assert "fix:" in quiet.stdout
    record = json.loads(run("--root", recording, "--json").stdout)
    validate(record)
    assert findings(record, "selftest") == {}


def test_what_was_recorded_on_another_machine_is_still_read():
    folder = Path(__file__).parents[2] / "data" / "doctor"
    recordings = sorted(folder.glob("*.json"))
    assert recordings
    for recording in recordings:
        done = run("--root", str(recording), "--json")
        assert done.stderr == ""
        validate(json.loads(done.stdout))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--root", "/nowhere/at/all"], "no folder, and no recording"),
        (["--root", __file__], "no recording"),
        (["--frobnicate"], "--frobnicate"),
        (["--peer", "host"], "'host' is not HOST:PORT"),
        (["--peer", "host:1", "--root", "/tmp"], "--root names another"),
        (["--listen", "127.0.0.1:0", "--json"], "--listen serves"),
        (["--insecure"], "--insecure is for --listen"),
        (["--listen", "0.0.0.0:0"], "without a shared secret"),
        (["--no-self-test", "--record", "/nowhere/at/all"], "/nowhere/at/all"),
    ],
)
def test_what_can_not_be_done(arguments, said):
    done = run(*arguments)
    assert done.returncode == 2
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_a_recording_of_something_else(tmp_path):
    for content in ("[]", "{}", '{"kvxfer_doctor": 99, "calls": {}}', '{"kvxfer_doctor": 1}'):
        (tmp_path / "x.json").write_text(content)
        done = run("--root", str(tmp_path / "x.json"))
        assert done.returncode == 2
        assert "no recording that this version reads" in done.stderr


def test_settings_that_no_agent_takes():
    done = run("--no-self-test", "--json", KVXFER_WINDOW="many")
    record = json.loads(done.stdout)
    assert done.returncode == 1
    assert findings(record, "host")["host.settings"]["state"] == "bad"
    done = run("--no-self-test", "--json", KVXFER_SIMD="mmx")
    assert findings(json.loads(done.stdout), "build")["build.simd"]["state"] == "bad"


def test_settings_that_narrow_the_choice_leave_the_test_alone():
    done = run("--json", KVXFER_TRANSPORT="tcp", KVXFER_ADVERTISE="nowhere.invalid")
    tested = findings(json.loads(done.stdout), "selftest")
    assert {one["state"] for one in tested.values()} == {"ok"}


def without_the_core(*arguments: str) -> subprocess.CompletedProcess[str]:
    code = (
        "import sys; sys.modules['kvxfer._core'] = None; from kvxfer import cli; "
        "sys.exit(cli.main(sys.argv[1:]))"
    )
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True,
        text=True,
        timeout=LONG,
        env=surroundings(),
    )


def test_a_build_that_does_not_load():
    done = without_the_core("doctor", "--json")
    assert done.stderr == ""
    assert done.returncode == 1
    record = json.loads(done.stdout)
    validate(record)
    assert findings(record, "build")["build.core"]["state"] == "bad"
    assert findings(record, "selftest") == {}
    done = without_the_core("doctor", "--peer", "127.0.0.1:1")
    assert done.returncode == 2
    assert "compiled part" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_secret_is_not_printed():
    done = run("--no-self-test", "--json", KVXFER_SECRET="open sesame")
    assert "KVXFER_SECRET" in done.stdout
    assert "sesame" not in done.stdout


def test_a_library_that_is_not_there():
    done = run("--no-self-test", "--json", KVXFER_VERBS_LIBRARY="/nowhere/libibverbs.so")
    told = [
        one for one in json.loads(done.stdout)["findings"] if one["what"] == "library for verbs"
    ]
    assert "/nowhere/libibverbs.so" in told[0]["found"]
    assert told[0]["state"] == "info"
    on = _core.build_info()["back_ends"]["verbs"]["state"] == "on"
    assert ("apt install" in told[0]["fix"]) == on


def test_the_ucx_that_agents_would_use_is_told(tmp_path):
    """Not whichever the system has: the one that is named, or why that is none."""
    if (reason := ucx.missing()) is not None:
        pytest.skip(f"no UCX here: {reason}")
    used = _core.ucx_info(libraries())

    def told(path: Path) -> dict:
        done = run("--no-self-test", "--json", KVXFER_UCX_PATH=str(path))
        assert done.stderr == ""
        found = [one for one in json.loads(done.stdout)["findings"] if "ucx" in one["what"]]
        assert [one["what"] for one in found] == ["transport ucx"]
        return found[0]

    there = told(Path(used.path).parent)
    assert there["state"] == "ok"
    assert f"UCX {used.version} ({used.path}), here over " in there["found"]
    assert "tcp/" in there["found"]
    missing = told(tmp_path)
    assert missing["state"] == "info"
    assert f"KVXFER_UCX_PATH is '{tmp_path}'" in missing["found"]


@pytest.mark.parametrize(
    ("program", "said"),
    [
        ("import time; time.sleep(60)", "did not answer within"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGABRT)", "signal 6"),
        ("import sys; sys.exit(3)", "ended with 3"),
        ("print('hello')", "ended with 0"),
    ],
)
def test_a_driver_that_hangs_or_crashes_takes_nothing_down(program, said, tmp_path, monkeypatch):
    script = tmp_path / "script.py"
    script.write_text(program)
    monkeypatch.setattr(ask, "_SCRIPT", script)
    monkeypatch.setattr(ask, "PATIENCE", 1.0 if "sleep" in program else 30.0)
    answers = ask.ask_all(open_tree("/"))
    assert answers.keys() == set(ask.QUESTIONS)
    for answer in answers.values():
        assert said in answer["error"]


def test_a_path_that_brings_wrong_bytes_is_found(monkeypatch):
    """The comparison can fail: one byte of the pattern is another on the producer's side."""
    producer = selftest.Producer()
    try:
        right = pattern._contents("layer.1", "v")
        wrong = bytes([right[0] ^ 1]) + right[1:]
        usual = pattern._contents
        monkeypatch.setattr(
            pattern,
            "_contents",
            lambda layer, plane: (
                wrong if (layer, plane) == ("layer.1", "v") else usual(layer, plane)
            ),
        )
        tested = selftest.test_paths(transports(), producer)
    finally:
        producer.close()
    between = [one for one in tested if one.id != "selftest.loopback"]
    assert between
    for one in between:
        assert one.state is State.BAD
        assert f"1 of {TOTAL_BYTES} bytes WRONG" in one.found


def test_bytes_that_were_not_fetched_are_wrong():
    cache = PatternCache(filled=False)
    assert cache.wrong_bytes() > TOTAL_BYTES * 0.99
    assert PatternCache(filled=True).wrong_bytes() == 0


def test_another_process_that_does_not_come_up(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/bin/false")
    producer = selftest.Producer()
    try:
        tested = {one.id: one for one in selftest.test_paths(transports(), producer)}
    finally:
        producer.close()
    assert tested["selftest.loopback"].state is State.OK
    assert tested["selftest.tcp"].state is State.BAD
    assert "ended at once" in tested["selftest.tcp"].found


LISTEN = ("doctor", "--listen")
BENCH = ("bench", "serve")


@contextlib.contextmanager
def listening(
    command: tuple[str, ...] = LISTEN, **environment: str
) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """A doctor or a benchmark that listens; its address."""
    with subprocess.Popen(
        [*COMMAND[:-1], *command, "127.0.0.1:0"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=surroundings(**environment),
    ) as process:
        try:
            for line in process.stdout:
                if found := re.search(r"(?:--peer|bench run) (\S+)", line):
                    yield found[1], process
                    break
        finally:
            process.terminate()
            process.wait(LONG)


@pytest.mark.parametrize("command", [LISTEN, BENCH])
def test_a_peer(command):
    with listening(command, KVXFER_SECRET="s") as (address, process):
        for _ in range(2):  # it serves more than one
            done = run("--peer", address, "--no-self-test", "--json", KVXFER_SECRET="s")
            record = json.loads(done.stdout)
            validate(record)
            told = findings(record, "peer")
            assert told["peer.auto"]["state"] == "ok"
            assert "over tcp" in told["peer.tcp"]["found"]
        process.send_signal(signal.SIGTERM)
        assert process.wait(LONG) == (0 if command is LISTEN else 130)


@pytest.mark.parametrize("command", [LISTEN, BENCH])
def test_a_peer_that_brings_wrong_bytes(command, tmp_path):
    (tmp_path / "sitecustomize.py").write_text(
        "from kvxfer.doctor import pattern\n"
        "usual = pattern._contents\n"
        "pattern._contents = lambda *key: bytes([usual(*key)[0] ^ 1]) + usual(*key)[1:]\n"
    )
    with listening(command, PYTHONPATH=f"{tmp_path}:{Path(__file__).parents[3]}") as (address, _):
        done = run("--peer", address, "--no-self-test", "--json")
    assert done.returncode == 1
    told = findings(json.loads(done.stdout), "peer")
    assert told["peer.auto"]["state"] == told["peer.tcp"]["state"] == "bad"
    assert f"4 of {TOTAL_BYTES} bytes WRONG" in told["peer.tcp"]["found"]


def test_a_benchmark_that_is_busy_is_no_peer():
    with listening(BENCH) as (address, process):
        channel = connect(address, Config())
        process.stdout.readline()  # it has connected
        done = run("--peer", address, "--no-self-test", "--json")
        channel.close()
    assert done.returncode == 1
    assert "another benchmark" in findings(json.loads(done.stdout), "peer")["peer.auto"]["found"]


@pytest.mark.parametrize("command", [LISTEN, BENCH])
def test_a_peer_with_another_secret(command):
    with listening(command, KVXFER_SECRET="s") as (address, _):
        done = run("--peer", address, "--no-self-test", "--json", KVXFER_SECRET="t")
    assert done.returncode == 1
    told = findings(json.loads(done.stdout), "peer")
    assert told.keys() == {"peer.auto"}
    assert told["peer.auto"]["state"] == "bad"
    assert "secret" in told["peer.auto"]["found"]


def test_a_peer_that_is_not_there():
    with socket.socket() as taken:  # bound, but nobody listens
        taken.bind(("127.0.0.1", 0))
        done = run("--peer", f"127.0.0.1:{taken.getsockname()[1]}", "--no-self-test")
    assert done.returncode == 1
    assert "peer" in done.stdout.lower()
    assert "refused" in done.stdout


def test_a_peer_that_says_nothing():
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        done = run("--peer", address, "--no-self-test", KVXFER_HANDSHAKE_TIMEOUT="1")
    assert done.returncode == 1


def test_an_address_that_is_in_use():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        done = run("--listen", f"127.0.0.1:{taken.getsockname()[1]}")
    assert done.returncode == 2
    assert "cannot listen" in done.stderr


def test_ctrl_c_ends_the_listener():
    with listening() as (_, process):
        process.send_signal(signal.SIGINT)
        assert process.wait(LONG) == 0


def test_help_loads_little():
    code = (
        "import sys; from kvxfer import cli\n"
        "try: cli.main(['doctor', '--help'])\n"
        "except SystemExit as end: assert end.code == 0\n"
        "heavy = {'numpy', 'torch', 'kvxfer.serving', 'kvxfer.doctor.examine'} & set(sys.modules)\n"
        "sys.exit(f'imported: {heavy}' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "doctor" in cli.COMMANDS


def test_every_finding_is_in_the_documentation():
    root = Path(__file__).parents[3]
    sources = "".join(path.read_text() for path in (root / "kvxfer" / "doctor").glob("*.py"))
    named = set(re.findall(r'"((?:build|gpu|nic|affinity|gpudirect|host)\.[a-z_]+)"', sources))
    documented = (root / "docs" / "doctor.md").read_text()
    assert len(named) > 30
    assert [name for name in sorted(named) if f"`{name}`" not in documented] == []


def test_colors_are_for_terminals(monkeypatch, tmp_path):
    host, _, _ = mi300x()
    host.numa_balancing(1)
    from kvxfer.doctor.examine import examine
    from kvxfer.doctor.report import report

    found = examine(open_tree(str(host.write(tmp_path))), self_test=False)
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert "\x1b[33m" in report(found, quiet=True)
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "60")
    narrow = report(found, quiet=True)
    assert "\x1b" not in narrow
    lines = narrow.splitlines()[1:-1]
    assert 50 < max(len(line) for line in lines if "http" not in line) <= 60
