"""A disk that is full for traces: the failure that they are about is what matters."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path

import pytest
from kvtest.agents import LONG, consumer, producer
from kvtest.caches import Geometry, Paged

import kvxfer
from kvxfer import Status

SIDE = Geometry(layers=("a",), content=8, num_blocks=4)


def opened() -> set[str]:
    found = set()
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found.add(os.readlink(f"/proc/self/fd/{descriptor}"))
    return found


def test_a_full_disk_costs_the_trace_alone(tmp_path: Path) -> None:
    def trace_of(name: str) -> Path:
        return tmp_path / f"kvxfer-{name}-{os.getpid()}-01.jsonl"

    trace_of("full").symlink_to("/dev/full")
    with producer("loopback") as prefill:
        for name in ("full", "roomy"):
            with consumer("loopback", name, trace_dir=str(tmp_path)) as decode:
                target = Paged(SIDE)
                decode.register(target.cache)
                ticket = kvxfer.issue_ticket("never", [prefill.reference()], num_tokens=16)
                fetch = decode.fetch(ticket, target.cache, [0], timeout=0.05)
                with pytest.raises(kvxfer.TransferError) as caught:
                    fetch.wait(LONG)
                assert caught.value.status is Status.TIMEOUT
                assert "/dev/full" not in opened()
    first = trace_of("roomy").read_text().splitlines()[0]
    assert "'never'" in json.loads(first)["reason"]
