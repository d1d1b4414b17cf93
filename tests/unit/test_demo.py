"""The demo: that it runs and ends cleanly, and that it would notice a wrong byte."""

from __future__ import annotations

import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import jsonschema
import numpy as np
import pytest

from kvxfer import _demo_kv as kv
from kvxfer import _demo_run as run
from kvxfer import demo

SMALL = ["--tokens", "100", "--repeat", "1", "--model", "llama-3-70b-tp8"]
COMMAND = [sys.executable, "-m", "kvxfer.demo"]


def moved(model: kv.Model, source: kv.Array, request: kv.Request) -> kv.Array:
    """The consumer's tensor after a right fetch, element by element in plain loops."""
    blocks = max(request.consumer_blocks) + 3
    extents = kv.shape(model, model.consumer_axes, blocks, kv.CONSUMER_BLOCK_SIZE)
    target = np.empty(extents, np.uint16)
    kv.poison({"": [target]})
    by_head = "H" in model.producer_axes
    for token in range(len(request.consumer_blocks) * kv.CONSUMER_BLOCK_SIZE):
        block, slot = divmod(token, kv.CONSUMER_BLOCK_SIZE)
        to = target[request.consumer_blocks[block], slot]
        if token >= request.tokens:
            to[...] = 0
            continue
        block, slot = divmod(token, kv.PRODUCER_BLOCK_SIZE)
        held = source[request.producer_blocks[block]]
        to[...] = held[:, slot] if by_head else held[slot]
    return target


@pytest.fixture(params=["heads", "mla"])
def case(request):
    if request.param == "heads":
        model = kv.Model(name="small", layers=1, heads=2, content=4)
    else:
        model = kv.Model(
            name="small", layers=1, heads=None, content=6, planes=("latent",),
            producer_axes="BNC", consumer_axes="BNC",
        )  # fmt: skip
    asked = kv.Request(70, [4, 0, 2, 6, 1], [3, 0, 5])
    source = kv.contents(0, 0, kv.shape(model, model.producer_axes, 7, kv.PRODUCER_BLOCK_SIZE))
    return model, asked, source, moved(model, source, asked)


def test_check_accepts_what_is_right(case):
    model, asked, source, got = case
    assert kv.compare(model, 0, 0, got, source, [asked]) == []


@pytest.mark.parametrize(
    ("block", "slot", "what"),
    [
        (3, 0, "a fetch of 70 tokens"),
        (5, 5, "a fetch of 70 tokens"),
        (5, 6, "the rest of the last block"),
        (5, 31, "the rest of the last block"),
        (1, 9, "blocks that were not asked for"),
    ],
)
def test_check_finds_one_wrong_bit(case, block, slot, what):
    model, asked, source, got = case
    got[block, slot, ..., -1] ^= 0x0100
    (found,) = kv.compare(model, 0, 0, got, source, [asked])
    assert what in found.where
    assert "small, model.layers.0" in found.where
    assert found.elements == (model.heads or 1)


def test_check_finds_exchanged_blocks(case):
    model, asked, source, got = case
    got[[3, 0]] = got[[0, 3]]
    assert kv.compare(model, 0, 0, got, source, [asked])


def test_a_wrong_byte_ends_the_demo_with_1(monkeypatch, capsys):
    def wrong(*args):
        return [kv.Difference("model.layers.7, plane k", 3)]

    monkeypatch.setattr(kv, "compare", wrong)
    assert demo.main([*SMALL, "--transport", "shm"]) == 1
    out = capsys.readouterr().out
    assert "BYTES DIFFER" in out
    assert "model.layers.7, plane k: 3 elements differ" in out
    assert "Every byte" not in out


def test_json_has_one_object_a_line():
    done = subprocess.run([*COMMAND, *SMALL, "--json"], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    records = [json.loads(line) for line in done.stdout.splitlines()]
    assert [record["transport"] for record in records] == ["shm", "tcp"]
    schema = json.loads((Path(__file__).parents[2] / "docs/schemas/demo.json").read_text())
    for record in records:
        jsonschema.validate(record, schema)
        assert record["exact"] is True
        assert record["bytes"] == 100 * 80 * 2 * 128 * 2
        assert record["gb_per_s"] == pytest.approx(record["bytes"] / record["seconds"] / 1e9)
        assert record["path"] == "staged"
        assert record["why"]


@pytest.mark.slow
def test_all_caches_over_all_transports():
    done = subprocess.run(
        [*COMMAND, "--tokens", "300", "--repeat", "1"], capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    assert "\r" not in done.stdout
    assert "\x1b" not in done.stdout
    rows = [line for line in done.stdout.splitlines() if " yes " in line]
    assert len(rows) == 6
    assert all(len(line) <= 100 for line in done.stdout.splitlines())


def test_progress_on_a_terminal_is_one_line():
    ours, theirs = pty.openpty()
    with subprocess.Popen([*COMMAND, *SMALL, "--transport", "tcp"], stdout=theirs) as process:
        os.close(theirs)
        output = b""
        while True:
            try:
                piece = os.read(ours, 4096)
            except OSError:  # the terminal's other side is closed
                break
            output += piece
    os.close(ours)
    assert process.returncode == 0
    assert b"\r\x1b[KLlama-3-70B, TP8 over tcp: fetching" in output
    # What stands after each line end was wiped before the line was written.
    for line in output.decode().split("\r\n"):
        assert "checking" not in line.split("\x1b[K")[-1]


def test_interrupt_ends_both_processes():
    with subprocess.Popen(
        [*COMMAND, "--tokens", "2000", "--repeat", "1000", "--model", "llama-3-70b-tp8"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        # A background job is started with SIGINT ignored, which the demo would inherit from us.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    ) as process:  # fmt: skip
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        deadline = time.monotonic() + 60
        while not (child := children.read_text().split()):
            assert time.monotonic() < deadline
            select.select([], [], [], 0.02)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
        assert process.returncode == 130, err
    assert "Traceback" not in err
    assert "Interrupted" in err
    assert not Path("/proc", child[0]).exists()


def test_the_producers_death_is_told(monkeypatch, capsys):
    load = run.Producer.ask

    def die(self, **command):
        if command["do"] == "serve":
            os.kill(self.pid, signal.SIGKILL)
        return load(self, **command)

    monkeypatch.setattr(run.Producer, "ask", die)
    assert demo.main(SMALL) == 2
    assert "ended with status -9" in capsys.readouterr().err


def test_too_little_memory_is_told(monkeypatch, capsys):
    monkeypatch.setattr(demo, "_available_bytes", lambda: 1 << 30)
    assert demo.main([]) == 2
    assert "choose fewer --tokens" in capsys.readouterr().err


def test_numpy_that_is_missing_is_told():
    code = (
        "import sys; sys.modules['numpy'] = None; import kvxfer.demo as demo; "
        "sys.exit(demo.main([]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "pip install numpy" in done.stderr
    assert done.stdout == ""


@pytest.mark.parametrize("arguments", [["--tokens", "0"], ["--repeat", "x"], ["--model", "gpt"]])
def test_bad_options_are_refused(arguments, capsys):
    with pytest.raises(SystemExit) as exit:
        demo.main(arguments)
    assert exit.value.code == 2
    assert "usage" in capsys.readouterr().err
