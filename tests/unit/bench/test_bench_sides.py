"""The two sides of kvxfer bench: who is let in, and what happens when one of them ends."""

from __future__ import annotations

import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from kvtest.bench import LONG, PATIENCE, SMALL, Process, bench, records

from kvxfer.bench.case import Case
from kvxfer.bench.channel import connect
from kvxfer.config import Config

TLS = Path(__file__).parents[2] / "data/tls"


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


def test_names_of_the_other_side_command_no_terminal(server):
    channel = connect(server.address, Config())
    case = {**Case(name="\x1b[2Jfetch").frame(), "transport": "shm"}
    channel.ask("prepare", case=case)
    channel.close()
    server.wait_for("serving .*fetch")
    assert "\\x1b[2Jfetch" in server.seen
    assert "\x1b" not in server.seen


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


def certificate(name: str) -> dict[str, str]:
    files = {"CERT": f"{name}.pem", "KEY": f"{name}.key", "CA": "ca.pem"}
    return {f"KVXFER_TLS_{kind}": str(TLS / file) for kind, file in files.items()}


def test_certificates(start):
    server = start("serve", "127.0.0.1:0", **certificate("agent"))
    address = server.wait_for(r"listening on (\S+)\n")[1]
    for wrong, said in (
        ({}, "the other side speaks TLS"),
        (certificate("expired"), "certificate expired"),
    ):
        done = bench("run", address, *SMALL, **wrong)
        assert done.returncode == 2
        assert said in done.stderr
    done = bench("run", address, *SMALL, "--transport", "tcp", **certificate("agent"))
    assert done.returncode == 0, done.stderr


def test_certificates_for_other_names_do_not_matter_within_a_host():
    options = [*SMALL, "--transport", "tcp", "--no-rivals"]
    done = bench("local", *options, **certificate("elsewhere"))
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
