"""Fuzzing of what Python decodes: tickets and the frames of the handshake.

``python -m faults.fuzz_python --runs 1000000``. Inputs are honest ones with pieces changed, cut,
repeated and exchanged, as JSON text and as values. Each is refused with the error that is meant for
it, or taken for what it says; anything else ends the run with the input.
"""

from __future__ import annotations

import argparse
import copy
import json
import random
import socket
import struct
import sys
import time
from typing import Any

import kvxfer
from kvxfer.handshake import PROTOCOL, Deadline, Identity, Transcript, recv_frame
from kvxfer.ticket import _signature, parse_ticket

_ODD: list[Any] = [
    None, True, 0, -1, 1 << 31, 1 << 32, 1 << 64, -(1 << 63), 1.5, float("inf"), float("nan"), "",
    "x", "\ud800", "0" * 33, "ff" * 16, [], {}, [[]], [None], {"": None}, "127.0.0.1:1", [0, 1],
]  # fmt: skip


def _ticket() -> kvxfer.Ticket:
    agents = [
        kvxfer.AgentRef(name="a", address="127.0.0.1:1", incarnation=7, layers=("l",)),
        kvxfer.AgentRef(name="b", address="[::1]:2", heads=(0, 4)),
    ]
    return kvxfer.issue_ticket("r", agents, num_tokens=9, first_token=1, model="m", secret="s")


def _hello() -> dict[str, Any]:
    who = Identity("decode", 7).frame()
    return {
        "kvxfer": PROTOCOL, "kind": "peer", **who, "nonce": "0" * 32, "host": "h",
        "transports": ["shm", "tcp"], "streams": 2,
    }  # fmt: skip


def _mutate(draw: random.Random, value: Any) -> Any:  # noqa: ANN401 - any JSON
    """Change one thing somewhere in a JSON value."""
    if isinstance(value, dict) and value and draw.random() < 0.9:
        key = draw.choice(list(value))
        changed = dict(value)
        kind = draw.randrange(6)
        if kind == 0:
            del changed[key]
        elif kind == 1:
            changed[draw.choice(["", "kvxfer", "x", key + "x"])] = changed.pop(key)
        elif kind == 2:
            changed[key] = copy.deepcopy(value[draw.choice(list(value))])
        else:
            changed[key] = _mutate(draw, value[key])
        return changed
    if isinstance(value, list) and value and draw.random() < 0.8:
        changed_list = list(value)
        at = draw.randrange(len(value))
        kind = draw.randrange(4)
        if kind == 0:
            del changed_list[at]
        elif kind == 1:
            changed_list.insert(at, copy.deepcopy(value[at]))
        else:
            changed_list[at] = _mutate(draw, value[at])
        return changed_list
    if isinstance(value, str) and value and draw.random() < 0.6:
        at = draw.randrange(len(value))
        return value[:at] + draw.choice(["", "0", "é", "\0", '"', "g", value]) + value[at + 1 :]
    if isinstance(value, int) and draw.random() < 0.5:
        return value + draw.choice([-1, 1, 1 << 16, -(1 << 40)])
    return draw.choice(_ODD)


def _bytes_of(draw: random.Random, value: Any) -> bytes:  # noqa: ANN401 - any JSON
    raw = bytearray(json.dumps(value).encode())
    for _ in range(draw.choice([0, 0, 0, 1, 3])):
        if raw:
            raw[draw.randrange(len(raw))] = draw.randrange(256)
    return bytes(raw)


def ticket(draw: random.Random) -> None:
    """Refused with TicketError, or honest; signed ones of any content too."""
    changed = _ticket_seed
    for _ in range(draw.choice([1, 1, 2, 4])):
        changed = _mutate(draw, changed)
    if isinstance(changed, dict) and draw.random() < 0.7:
        try:
            changed["signature"] = _signature(changed, "s")
        except (TypeError, ValueError, RecursionError):
            return
    try:
        parsed = parse_ticket(changed, "s")
    except kvxfer.TicketError:
        return
    assert len(parsed.generation) == 16
    assert parsed.num_tokens >= 1
    assert parsed.agents


def frame(draw: random.Random) -> None:
    """Refused with HandshakeError or as malformed, or taken for what it says."""
    changed = _hello_seed
    for _ in range(draw.choice([0, 1, 2])):
        changed = _mutate(draw, changed)
    raw = _bytes_of(draw, changed)
    size = len(raw) if draw.random() < 0.9 else draw.choice([0, 1, len(raw) + 1, 1 << 20])
    _ours.sendall(struct.pack("<I", size) + raw)
    if size > len(raw):
        _ours.sendall(b"x" * min(size - len(raw), 64))
    try:
        got = recv_frame(_theirs, Deadline(0.5 if size <= len(raw) + 64 else 0.001))
        Identity.of(got)
        Transcript("s", got, got).check("consumer", got)
    except (kvxfer.HandshakeError, TimeoutError):
        pass
    except (KeyError, TypeError, ValueError, OverflowError, RecursionError):
        pass  # what the listener takes for a stranger
    _theirs.setblocking(False)
    try:
        while _theirs.recv(1 << 16):
            pass
    except BlockingIOError:
        pass


_ticket_seed, _hello_seed = _ticket(), _hello()
_ours, _theirs = socket.socketpair()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m faults.fuzz_python")
    parser.add_argument("--runs", type=int, default=100_000)
    parser.add_argument("--seconds", type=float, default=3600)
    parser.add_argument("--seed", type=int, default=time.time_ns())
    arguments = parser.parse_args()
    draw = random.Random(arguments.seed)
    for target in (ticket, frame):
        end, runs = time.monotonic() + arguments.seconds, 0
        while runs < arguments.runs and time.monotonic() < end:
            try:
                target(draw)
            except Exception:
                print(f"{target.__name__}, seed {arguments.seed}, run {runs}", file=sys.stderr)
                raise
            runs += 1
        print(f"{target.__name__}: {runs} runs, nothing found", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
