"""kvxfer bench as a user runs it: what it prints, and what it refuses."""

from __future__ import annotations

import os
import pty
import subprocess
import sys

import pytest
from kvtest.bench import KVXFER, PATIENCE, SMALL, bench, environment, records


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


def test_a_path_that_was_not_taken_says_why():
    done = bench("local", *SMALL, "--transport", "shm", "--path", "direct", "--no-rivals")
    assert done.returncode == 0, done.stderr
    assert "  staged    because " in done.stdout


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
