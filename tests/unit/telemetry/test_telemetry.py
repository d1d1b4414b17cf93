"""Counters, histograms, Prometheus' view, and the flight recorder of agents at work."""

from __future__ import annotations

import gc
import json
import re
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import kvxfer
from kvxfer import telemetry

ROOT = Path(__file__).parents[3]
TOKENS = 200
SHAPE = (40, 2, 16, 32)  # block, head, token, content


def cache() -> kvxfer.Cache:
    tensors = {f"layer.{i}": (np.ones(SHAPE, "f2"), np.ones(SHAPE, "f2")) for i in range(2)}
    return kvxfer.Cache(tensors, axes="BHNC")


@pytest.fixture(params=["shm", "tcp"])
def pair(request):
    with (
        kvxfer.Agent("prefill", listen="127.0.0.1:0", transport=request.param) as prefill,
        kvxfer.Agent("decode", transport=request.param) as decode,
    ):
        yield prefill, decode


def move(prefill: kvxfer.Agent, decode: kvxfer.Agent, name: str = "req-1") -> int:
    """Move one request; return its bytes."""
    offer = prefill.offer(prefill.register(cache()), range(13), TOKENS, id=name)
    target = decode.register(cache())
    fetch = decode.fetch(offer.ticket, target, range(20, 33), timeout=30.0)
    fetch.wait()
    assert offer.wait(30.0) is kvxfer.Status.OK
    return fetch.report.bytes


def stale(prefill: kvxfer.Agent, decode: kvxfer.Agent) -> kvxfer.Fetch:
    """Fetch with a ticket whose offer has been released."""
    offer = prefill.offer(prefill.register(cache()), range(13), TOKENS, id="req-2")
    offer.release()
    fetch = decode.fetch(offer.ticket, decode.register(cache()), range(13), timeout=30.0)
    with pytest.raises(kvxfer.TransferError):
        fetch.wait()
    return fetch


def events(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()][1:]


def test_counts_and_histograms(pair):
    prefill, decode = pair
    nbytes = move(prefill, decode)
    stale(prefill, decode)
    theirs, ours = prefill.metrics(), decode.metrics()

    assert theirs["counters"]["bytes_sent"] == nbytes == ours["counters"]["bytes_received"]
    assert theirs["gauges"]["offers"] == 0
    assert ours["gauges"]["fetches"] == 0
    assert theirs["ends"]["offer_ends"] == {"OK": 1, "CANCELLED": 1}
    assert theirs["ends"]["refusals"] == {"CANCELLED": 1}
    assert ours["ends"]["fetch_ends"] == {"OK": 1, "CANCELLED": 1}
    assert ours["events"]["publish"] == ours["events"]["fail"] == 1
    chunks = theirs["events"]["pack"]
    assert chunks == ours["events"]["verify"] > 0
    assert theirs["histograms"]["pack_seconds"]["count"] == chunks
    assert ours["histograms"]["verify_seconds"]["count"] == chunks
    fetches = ours["histograms"]["fetch_seconds"]
    assert fetches["count"] == sum(fetches["counts"]) == 2
    assert len(fetches["counts"]) == len(fetches["bounds"]) + 1
    assert fetches["sum"] > 0
    json.dumps(theirs)


def test_a_quiet_agent_counts_nothing():
    with kvxfer.Agent("quiet") as agent:
        metrics = agent.metrics()
    assert not any(metrics["counters"].values())
    assert not any(metrics["events"].values())
    assert metrics["ends"] == {name: {} for name in telemetry.ENDS}


def test_prometheus(pair):
    registry = pytest.importorskip(
        "prometheus_client", reason="prometheus-client is not installed"
    ).CollectorRegistry()
    prefill, decode = pair
    for agent in pair:
        registry.register(telemetry.AgentCollector(agent))
    nbytes = move(prefill, decode)
    stale(prefill, decode)

    def sample(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(f"kvxfer_{name}", labels)

    assert sample("bytes_sent_total", agent="prefill") == nbytes
    assert sample("bytes_received_total", agent="decode") == nbytes
    assert sample("bytes_received_total", agent="prefill") == 0
    assert sample("fetch_ends_total", agent="decode", status="OK") == 1
    assert sample("refusals_total", agent="prefill", status="CANCELLED") == 1
    assert sample("offers", agent="prefill") == 0
    assert sample("fetch_seconds_count", agent="decode") == 2
    assert sample("fetch_seconds_bucket", agent="decode", le="+Inf") == 2
    decode.close()
    assert sample("bytes_received_total", agent="decode") == nbytes


def test_prometheus_keeps_no_agent_alive():
    registry = pytest.importorskip(
        "prometheus_client", reason="prometheus-client is not installed"
    ).CollectorRegistry()
    with kvxfer.Agent("brief") as agent:
        registry.register(telemetry.AgentCollector(agent))
        assert registry.get_sample_value("kvxfer_offers", {"agent": "brief"}) == 0
    del agent
    gc.collect()
    assert registry.get_sample_value("kvxfer_offers", {"agent": "brief"}) is None


def test_the_page_names_everything():
    page = (ROOT / "docs/telemetry.md").read_text()
    named = set(re.findall(r"^\| `(\w+)`", page, re.MULTILINE))
    counted = {
        *telemetry.GAUGES, *telemetry.COUNTERS, *telemetry.ENDS, *telemetry.HISTOGRAMS
    }  # fmt: skip
    with kvxfer.Agent("quiet") as agent:
        kinds = set(agent.metrics()["events"]) - {"expire"}  # shares a row with release
    assert counted | kinds <= named
    for name in set(re.findall(r"kvxfer_(\w+?)(?:_total)?[\[{ `]", page)):
        assert name in counted or name == "", name


def test_a_trace_has_the_story(pair, tmp_path):
    prefill, decode = pair
    nbytes = move(prefill, decode)
    paths = {agent.name: tmp_path / f"{agent.name}.jsonl" for agent in pair}
    for agent in pair:
        agent.dump_trace(paths[agent.name])
    theirs, ours = events(paths["prefill"]), events(paths["decode"])

    assert [e["event"] for e in theirs if "chunk" not in e] == ["offer", "serve", "release"]
    assert [e["event"] for e in ours if "chunk" not in e] == ["fetch", "accept", "publish"]
    packed = [e for e in theirs if e["event"] == "pack"]
    verified = [e for e in ours if e["event"] == "verify"]
    assert sorted(e["chunk"] for e in packed) == sorted(e["chunk"] for e in verified)
    assert sum(e["bytes"] for e in packed) == sum(e["bytes"] for e in verified) == nbytes
    sent = "commit" if prefill.config.transport == "shm" else "write"
    assert sorted(e["chunk"] for e in theirs if e["event"] == sent) == sorted(
        e["chunk"] for e in packed
    )
    assert len({e["request"] for e in theirs + ours}) == 1
    assert theirs[0]["offer"] == ours[0]["offer"] == "req-1"
    assert [e["nanos"] for e in ours] == sorted(e["nanos"] for e in ours)
    generation = prefill.offer(prefill.register(cache()), range(13), TOKENS).ticket
    assert theirs[0]["request"] not in json.dumps(generation)


def test_refusals_and_failures_are_in_it(pair, tmp_path):
    prefill, decode = pair
    stale(prefill, decode)
    for agent, kind in ((prefill, "refuse"), (decode, "fail")):
        agent.dump_trace(tmp_path / "trace")
        (found,) = [e for e in events(tmp_path / "trace") if e["event"] == kind]
        assert found["status"] == "CANCELLED"
        assert found["offer"] == "req-2"


def test_leases_that_end_are_in_it(tmp_path):
    with kvxfer.Agent("prefill", listen="127.0.0.1:0") as prefill:
        offer = prefill.offer(prefill.register(cache()), range(13), TOKENS, lease=0.05)
        offer.wait(30.0)
        prefill.dump_trace(tmp_path / "trace")
        ends = prefill.metrics()["ends"]["offer_ends"]
    assert [e["event"] for e in events(tmp_path / "trace")] == ["offer", "expire"]
    assert ends == {"EXPIRED": 1}


def test_the_ring_keeps_the_newest(tmp_path):
    with kvxfer.Agent("prefill", listen="127.0.0.1:0") as prefill:
        held = prefill.register(cache())
        for number in range(4200):  # each has two events
            prefill.offer(held, range(1), 16, id=f"req-{number}").release()
        prefill.dump_trace(tmp_path / "trace")
        header = json.loads((tmp_path / "trace").read_text().splitlines()[0])
        counted = prefill.metrics()["events"]["offer"]
    found = events(tmp_path / "trace")
    assert header["dropped"] == 2 * 4200 - 8192
    assert len(found) == 8192
    assert found[-1]["offer"] == "req-4199"
    assert counted == 4200


def test_ids_that_are_cut_off_stay_text(tmp_path):
    with kvxfer.Agent("prefill", listen="127.0.0.1:0") as prefill:
        prefill.offer(prefill.register(cache()), range(1), 16, id="ü" * 30)
        prefill.offer(prefill.register(cache()), range(1), 16, id="x" + "ü" * 30)
        prefill.dump_trace(tmp_path / "trace")
    assert [e["offer"] for e in events(tmp_path / "trace")[:2]] == ["ü" * 11, "x" + "ü" * 10]


def test_failures_leave_a_trace(pair, tmp_path, monkeypatch):
    monkeypatch.setenv("KVXFER_TRACE_DIR", str(tmp_path / "traces"))
    prefill, decode = pair
    with kvxfer.Agent("decode/2", transport=decode.config.transport) as other:
        move(prefill, other)
        assert not (tmp_path / "traces").exists()
        stale(prefill, other)
        stale(prefill, other)  # within a second: no other file
    (path,) = (tmp_path / "traces").iterdir()
    assert "decode_2" in path.name
    header = json.loads(path.read_text().splitlines()[0])
    assert header["reason"].startswith("CANCELLED: ")


def test_the_longest_names_leave_a_trace_too(pair, tmp_path, monkeypatch):
    monkeypatch.setenv("KVXFER_TRACE_DIR", str(tmp_path))
    prefill, decode = pair
    letter = "\U00020000"  # four bytes, and a file's name has 255
    with kvxfer.Agent(letter * 60 + "!", transport=decode.config.transport) as other:
        stale(prefill, other)
    (path,) = tmp_path.iterdir()
    assert path.name.count(letter) == 20


def test_fetches_that_were_being_answered_are_refused_too(pair):
    prefill, decode = pair
    held = prefill.register(cache())
    offer = prefill.offer(held, range(13), TOKENS, ready=False)
    fetch = decode.fetch(offer.ticket, decode.register(cache()), range(13), timeout=30.0)
    deadline = time.monotonic() + 30.0
    while not prefill.metrics()["events"]["serve"]:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    offer.release()
    with pytest.raises(kvxfer.TransferError):
        fetch.wait()
    assert prefill.metrics()["ends"]["refusals"] == {"CANCELLED": 1}


def test_a_folder_that_cannot_be_written_is_no_failure(pair, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("KVXFER_TRACE_DIR", str(tmp_path / "file" / "traces"))
    prefill, decode = pair
    with kvxfer.Agent("decode-2", transport=decode.config.transport) as other:
        stale(prefill, other)


def kvxfer_trace(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "kvxfer.cli", "trace", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_the_command(pair, tmp_path):
    prefill, decode = pair
    move(prefill, decode)
    move(prefill, decode, "req-9")
    for agent in pair:
        agent.dump_trace(tmp_path / agent.name)
    both = [tmp_path / "prefill", tmp_path / "decode"]

    done = kvxfer_trace(*both, "--request", "req-9")
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines() if " ms " in line]
    assert [line[4] for line in lines if line[2] == "decode"][0] == "fetch"
    assert lines[-1][4] in ("release", "publish")
    assert all("req-9" in line for line in lines)
    times = [float(line[0]) for line in lines]
    assert times == sorted(times)

    every = kvxfer_trace(*both, "--all")
    assert every.stdout.count("verify") == decode.metrics()["events"]["verify"]
    assert "req-1 " in every.stdout

    done = kvxfer_trace(*both, "--chrome", tmp_path / "chrome.json")
    assert done.returncode == 0, done.stderr
    records = json.loads((tmp_path / "chrome.json").read_text())["traceEvents"]
    names = {r["args"]["name"].split()[0] for r in records if r["ph"] == "M" and r["tid"] == 0}
    assert names == {"prefill", "decode"}
    spans = [r for r in records if r["ph"] == "X"]
    assert {"pack", "verify", "publish"} <= {r["name"] for r in spans}
    # What is on one thread does not overlap.
    for thread in {(r["pid"], r["tid"]) for r in spans}:
        mine = sorted(
            (r["ts"], r["ts"] + r["dur"]) for r in spans if (r["pid"], r["tid"]) == thread
        )
        assert all(a[1] <= b[0] + 0.01 for a, b in zip(mine, mine[1:], strict=False))


def test_what_others_have_named_commands_no_terminal(pair, tmp_path):
    prefill, decode = pair
    move(prefill, decode, "req\x1b[2J\n1")
    prefill.dump_trace(tmp_path / "trace")
    for arguments in ([], ["--all"], ["--request", "none"]):
        done = kvxfer_trace(tmp_path / "trace", *arguments)
        assert "req\\x1b[2J\\n1" in done.stdout + done.stderr
        assert "\x1b" not in done.stdout + done.stderr


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "No such file"),
        ("", "is not that of a trace"),
        ('{"kind": "env"}\n', "is not that of a trace"),
        ('{"kind": "trace", "version": 99}\n', "version 99"),
        ('{"kind": "trace", "version": "\\u001b[2J"}\n', "version \\x1b[2J,"),
        ('{"kind": "trace", "version": 1, "unix_nanos": 1}\n', "line 1"),
        (f'{{"kind": "trace", "version": 1, "agent": "a", "unix_nanos": {10**30}}}\n', "line 1"),
        ('{"kind": "trace", "version": 1, "agent": "a", "unix_nanos": 1}\n{}\n', "line 2"),
        ('{"kind": "trace", "version": 1, "agent": "a", "unix_nanos": 1}\n[', "line 2"),
    ],
)
def test_files_that_are_none(tmp_path, text, message):
    if text is not None:
        (tmp_path / "trace").write_text(text)
    done = kvxfer_trace(tmp_path / "trace")
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_a_request_that_is_not_there(tmp_path):
    with kvxfer.Agent("prefill", listen="127.0.0.1:0") as prefill:
        prefill.offer(prefill.register(cache()), range(1), 16, id="req-1")
        prefill.dump_trace(tmp_path / "trace")
    done = kvxfer_trace(tmp_path / "trace", "--request", "req-2")
    assert done.returncode == 2
    assert "there are req-1" in done.stderr
