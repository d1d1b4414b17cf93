"""kvxfer bench as a user runs it: in processes of its own."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import jsonschema
import pytest

from kvxfer.bench.case import Case
from kvxfer.bench.channel import connect
from kvxfer.config import Config

SCHEMA = json.loads((Path(__file__).parents[3] / "docs/schemas/bench.json").read_text())
KVXFER = [sys.executable, "-m", "kvxfer.cli"]
SMALL = ["--block", "4KiB", "--blocks", "40", "--seconds", "0.05"]
LONG = ["--block", "4KiB", "--blocks", "40", "--seconds", "600"]
PATIENCE = 60.0


def environment(**variables: str) -> dict[str, str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("KVXFER_")}
    return {**clean, "PYTHONUNBUFFERED": "1", **variables}


def bench(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*KVXFER, "bench", *arguments],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        env=environment(**variables),
        check=False,
    )


def records(text: str) -> list[dict]:
    lines = [json.loads(line) for line in text.splitlines()]
    for line in lines:
        jsonschema.validate(line, SCHEMA)
    assert [line["kind"] for line in lines] == ["env"] + ["result"] * (len(lines) - 1)
    return lines[1:]


class Process:
    """A command that runs beside the test; it is killed at the end if it has not ended."""

    def __init__(self, *arguments: str, **variables: str) -> None:
        self.process = subprocess.Popen(
            [*KVXFER, "bench", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment(**variables),
            start_new_session=True,
        )
        self.seen = ""

    def wait_for(self, pattern: str) -> re.Match[str]:
        deadline = time.monotonic() + PATIENCE
        while (found := re.search(pattern, self.seen)) is None:
            left = deadline - time.monotonic()
            assert left > 0, f"no {pattern!r} in {self.seen!r}"
            if select.select([self.process.stdout], [], [], left)[0]:
                data = os.read(self.process.stdout.fileno(), 1 << 16)
                assert data, f"it ended: {self.seen!r} {self.process.stderr.read()!r}"
                self.seen += data.decode()
        return found

    def end(self) -> tuple[int, str]:
        out, err = self.process.communicate(timeout=PATIENCE)
        self.seen += out.decode()
        return self.process.returncode, err.decode()

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self.process.stdout.close()
        self.process.stderr.close()


@pytest.fixture
def start() -> Iterator:
    started: list[Process] = []

    def start(*arguments: str, **variables: str) -> Process:
        started.append(Process(*arguments, **variables))
        return started[-1]

    yield start
    for process in started:
        process.close()


@pytest.fixture
def server(start):
    process = start("serve", "127.0.0.1:0")
    process.address = process.wait_for(r"listening on (\S+)\n")[1]
    return process


def members(group: int) -> list[int]:
    """Processes of a process group or of a session that its leader began."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue  # it has ended
        if fields[0] != "Z" and group in (int(fields[1]), int(fields[2]), int(fields[3])):
            found.append(int(stat.parent.name))
    return found


@pytest.mark.parametrize("command", ["bench", "bench serve", "bench run", "bench local"])
def test_help_needs_no_numpy(command):
    script = (
        "import sys\nfrom kvxfer.cli import main\n"
        "try:\n    main([*sys.argv[1:], '--help'])\n"
        "except SystemExit as end:\n    assert not end.code\n"
        "heavy = {'numpy', 'torch', 'matplotlib'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, *command.split()],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert f"usage: kvxfer {command}" in done.stdout


def test_local_as_json():
    done = bench(
        "local", *SMALL, "--transport", "shm,tcp", "--codec", "raw,int8", "--in-flight", "1,3",
        "--json", "--no-rivals",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    results = records(done.stdout)
    assert len(results) == 8
    for result in results:
        case = result["case"]
        assert result["why"] is None
        assert result["bytes"] == 40 * 4096
        assert result["report"]["transport"] == case["transport"]
        assert result["report"]["codec"] == case["codec"]
        assert result["verified"] == ("exact" if case["codec"] == "raw" else "within 0.02")
        assert result["wire_bytes"] == pytest.approx(
            result["bytes"] * (1 if case["codec"] == "raw" else 0.52), rel=0.1
        )
        rates = result["gb_per_s"]
        assert rates["min"] <= rates["median"] <= rates["max"]
        assert result["limit"] is None  # too small to compare


def test_local_as_a_table():
    done = bench("local", "--block", "16KiB", "--blocks", "64", "--seconds", "0.05", "--no-rivals")
    assert done.returncode == 0, done.stderr
    assert "\r" not in done.stdout
    rows = [line for line in done.stdout.splitlines() if line.startswith("fetch_")]
    assert [row.split()[0] for row in rows] == ["fetch_shm", "fetch_tcp"]
    assert all(row.endswith("exact") and "%" in row for row in rows)
    assert "memcpy, 1 thread" in done.stdout
    assert "plain sockets" in done.stdout


def test_a_model():
    done = bench(
        "local", "--model", "llama-3-8b", "--tp", "8", "--tokens", "50", "--seconds", "0.05",
        "--json", "--no-rivals",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (result,) = records(done.stdout)
    assert result["bytes"] == 2 * 32 * 1 * 128 * 2 * 50
    assert result["blocks"] == 2 * 32 * 4
    assert result["verified"] == "exact"


def test_what_cannot_be_had_says_why():
    done = bench(
        "local", *SMALL, "--transport", "ucx,shm", "--json", "--no-rivals",
        KVXFER_UCX_PATH="/nonexistent",
    )  # fmt: skip
    assert done.returncode == 2
    ucx, shm = records(done.stdout)
    assert "ucx" in ucx["why"]
    assert shm["why"] is None


def test_plot(tmp_path):
    target = tmp_path / "chart.svg"
    done = bench("local", *SMALL, "--no-rivals", "--plot", str(target))
    assert done.returncode == 0, done.stderr
    assert "<svg" in target.read_text()


def test_a_rival_that_hangs_does_not_hold_up_the_rest(tmp_path):
    (tmp_path / "nixl_cu12.py").write_text("import time\ntime.sleep(600)\n")
    done = bench(
        "local", "--block", "16KiB", "--blocks", "128", "--transport", "shm,tcp", "--within", "2",
        "--json", PYTHONPATH=os.pathsep.join([str(tmp_path), *sys.path]),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    for result, said in zip(
        records(done.stdout), ("has not answered within", "no time was left"), strict=True
    ):
        assert result["verified"] == "exact"
        assert result["repeat"] >= 3
        assert said in result["rivals"][0]["why"]


def test_names_of_the_other_side_command_no_terminal(server):
    channel = connect(server.address, Config())
    case = {**Case(name="\x1b[2Jfetch").frame(), "transport": "shm"}
    channel.ask("prepare", case=case)
    channel.close()
    server.wait_for("serving .*fetch")
    assert "\\x1b[2Jfetch" in server.seen
    assert "\x1b" not in server.seen


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "required: COMMAND"),
        (["run"], "required: HOST:PORT"),
        (["run", "nowhere"], "is not host:port"),
        (["local", "--block", "12 cats"], "is not a size"),
        (["local", "--blocks", "0"], "is not a count"),
        (["local", "--blocks", "999999999999"], "not 1 to 4294967295"),
        (["local", "--block", "4097"], "multiple of 8"),
        (["local", "--transport", "carrier-pigeon"], "there are auto, shm, tcp"),
        (["local", "--codec", "zip"], "not known"),
        (["local", "--model", "no-such-model"], "no-such-model"),
        (["local", "--model", "llama-3-8b", "--blocks", "4"], "blocks of its own"),
        (["local", "--tokens", "4"], "goes with --model"),
        (["local", "--blocks", "2", "--in-flight", "3"], "fewer blocks"),
        (["local", "--seconds", "-1"], "number of seconds"),
        (["local", "--plot", "chart.txt"], ".png, .svg or .pdf"),
        (["serve", "127.0.0.1"], "is not host:port"),
        (["serve", "0.0.0.0:0"], "KVXFER_SECRET"),
    ],
)
def test_bad_arguments(arguments, message):
    done = bench(*arguments)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_busy_port():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        done = bench("serve", f"127.0.0.1:{taken.getsockname()[1]}")
    assert done.returncode == 2
    assert "in use; choose another port" in done.stderr


def test_nobody_listens():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    done = bench("run", f"127.0.0.1:{port}")
    assert done.returncode == 2
    assert "is `kvxfer bench serve` running there?" in done.stderr


def test_somebody_else_listens():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        process = Process("run", f"127.0.0.1:{listener.getsockname()[1]}")
        connection, _ = listener.accept()
        connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        connection.close()
        status, message = process.end()
        process.close()
    assert status == 2
    assert "does not let us in" in message


def test_two_processes(server):
    for _ in range(2):  # one after the other
        done = bench("run", server.address, *SMALL, "--json")
        assert done.returncode == 0, done.stderr
        assert all(result["verified"] == "exact" for result in records(done.stdout))
    server.wait_for(r"has ended\n(.*\n)*.*has ended\n")
    server.process.send_signal(signal.SIGINT)
    assert server.end()[0] == 130


def test_secret(start):
    server = start("serve", "127.0.0.1:0", KVXFER_SECRET="right")
    address = server.wait_for(r"listening on (\S+)\n")[1]
    for wrong in ({}, {"KVXFER_SECRET": "wrong"}):
        done = bench("run", address, *SMALL, **wrong)
        assert done.returncode == 2
        assert "shared secret" in done.stderr
    done = bench("run", address, *SMALL, KVXFER_SECRET="right")
    assert done.returncode == 0, done.stderr


def test_one_at_a_time(server, start):
    first = start("run", server.address, *LONG)
    server.wait_for("serving fetch_shm")
    done = bench("run", server.address, *SMALL)
    assert done.returncode == 2
    assert "serving another benchmark" in done.stderr
    first.process.send_signal(signal.SIGTERM)
    assert first.end()[0] == 130


def test_the_serving_side_vanishes(server, start):
    runner = start("run", server.address, *LONG)
    server.wait_for("serving fetch_shm")
    time.sleep(0.3)
    server.process.kill()
    status, message = runner.end()
    assert status == 2
    assert "has ended" in message
    assert "Traceback" not in message


def test_the_running_side_vanishes(server, start):
    runner = start("run", server.address, *LONG)
    server.wait_for("serving fetch_shm")
    time.sleep(0.3)
    runner.process.kill()
    server.wait_for("has ended")
    done = bench("run", server.address, *SMALL)  # it serves the next
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupting_leaves_nothing(start, number):
    local = start("local", *LONG, "--no-rivals")
    local.wait_for("serving: ")
    time.sleep(0.5)
    others = members(local.process.pid)
    assert len(others) == 2  # itself and the serving side
    local.process.send_signal(number)
    status, message = local.end()
    assert status == 130
    assert message == "Interrupted; nothing is left behind.\n"
    assert not [pid for pid in others if Path(f"/proc/{pid}/stat").exists()]


def test_killing_leaves_nothing(start):
    local = start("local", *LONG, "--no-rivals")
    local.wait_for("serving: ")
    time.sleep(0.5)
    others = members(local.process.pid)
    local.process.kill()
    local.process.wait()
    deadline = time.monotonic() + PATIENCE
    while [pid for pid in others if Path(f"/proc/{pid}/stat").exists()]:
        assert time.monotonic() < deadline, "the serving side is still there"
        time.sleep(0.05)


def test_interrupting_the_serving_side_ends_both(server, start):
    runner = start("run", server.address, *LONG)
    server.wait_for("serving fetch_shm")
    server.process.send_signal(signal.SIGINT)
    assert server.end() == (130, "Interrupted; nothing is left behind.\n")
    assert runner.end()[0] == 2


def test_progress_is_for_terminals():
    parent, child = pty.openpty()
    process = subprocess.Popen(
        [*KVXFER, "bench", "local", *SMALL, "--no-rivals"],
        stdout=child,
        stderr=child,
        env=environment(COLUMNS="80"),
    )
    os.close(child)
    seen = b""
    while True:
        try:
            data = os.read(parent, 1 << 16)
        except OSError:
            break  # the other end has been closed
        if not data:
            break
        seen += data
    os.close(parent)
    assert process.wait(PATIENCE) == 0
    assert b"\r\x1b[K[1/2] fetch_shm" in seen
    lines = [line.rpartition("\x1b[K")[2] for line in seen.decode().split("\r\n")]
    table = lines[lines.index(next(line for line in lines if line.startswith("case "))) :]
    assert all(len(line) <= 80 for line in table)
    assert [line for line in table if line.startswith("  ") and line.endswith("exact")]
