"""What running transfers lose when others ask for more than fits.

``python -m faults.overload``. A producer serves one consumer that fetches all the time, alone and,
in turns with that, beside a crowd: an agent that keeps more fetches open than one peer may, is
refused with BUSY, and tries again when it was told to. Each in a process of its own.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import time
from multiprocessing.connection import Connection
from typing import Any

from kvtest.caches import Geometry, Paged

import kvxfer

BLOCKS = 256
SIDE = Geometry(
    layers=tuple(f"layer.{i}" for i in range(8)), content=128, heads=(0, 8), num_blocks=BLOCKS
)
TOKENS = BLOCKS * SIDE.block_size


def steady(pipe: Connection, transport: str, ticket: kvxfer.Ticket) -> None:
    """Fetch for as many seconds as the pipe says, again and again; answer with bytes a second."""
    with kvxfer.Agent("steady", transport=transport) as decode:
        target = Paged(SIDE)
        decode.register(target.cache)

        def fetch() -> int:
            one = decode.fetch(ticket, target.cache, range(BLOCKS))
            one.wait()
            return one.report.bytes

        fetch()
        while (seconds := pipe.recv()) is not None:
            begin, moved = time.monotonic(), 0
            while (took := time.monotonic() - begin) < seconds:
                moved += fetch()
            pipe.send(moved / took)


def crowd(pipe: Connection, transport: str, ticket: kvxfer.Ticket, open_at_once: int) -> None:
    """Keep fetches open that wait for an offer; answer with how many were asked for and refused."""
    with kvxfer.Agent("crowd", transport=transport) as decode:
        target = Paged(SIDE)
        decode.register(target.cache)
        while pipe.recv() is not None:
            asked = refused = 0
            running: list[kvxfer.Fetch | None] = [None] * open_at_once
            again = [0.0] * open_at_once
            while not pipe.poll():
                now = time.monotonic()
                for index, fetch in enumerate(running):
                    if fetch is not None and fetch.done:
                        error = fetch.error
                        assert error is not None
                        assert error.status is kvxfer.Status.BUSY, error
                        refused += 1
                        again[index] = now + (error.retry_after or 0)
                        running[index] = None
                    elif fetch is None and now >= again[index]:
                        running[index] = decode.fetch(ticket, target.cache, range(BLOCKS))
                        asked += 1
                time.sleep(0.01)
            pipe.recv()
            for fetch in running:
                if fetch is not None:
                    fetch.cancel()
            pipe.send((asked, refused))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m faults.overload")
    parser.add_argument("--transport", default="tcp", choices=["tcp", "shm"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=3.0, help="of each half of a round")
    parser.add_argument("--open", type=int, default=150, help="fetches that the crowd has open")
    arguments = parser.parse_args()
    processes = multiprocessing.get_context("spawn")
    with kvxfer.Agent(
        "prefill", listen="127.0.0.1:0", transport=arguments.transport, peer_bytes=1 << 16
    ) as prefill:
        source = Paged(SIDE, seed=1)
        prefill.register(source.cache)
        offer = prefill.offer(source.cache, range(BLOCKS), TOKENS, consumers=1 << 30, lease=3600)
        never = kvxfer.issue_ticket("never", [prefill.reference()], num_tokens=TOKENS)
        calls: list[tuple[Any, tuple[object, ...]]] = [
            (steady, (offer.ticket,)),
            (crowd, (never, arguments.open)),
        ]
        pipes, running = [], []
        for work, what in calls:
            ours, theirs = processes.Pipe()
            process = processes.Process(target=work, args=(theirs, arguments.transport, *what))
            process.start()
            pipes.append(ours)
            running.append(process)
        one, many = pipes
        alone, beside, asked, refused = [], [], 0, 0
        for _ in range(arguments.rounds):
            one.send(arguments.seconds)
            alone.append(one.recv())
            many.send(True)
            time.sleep(0.3)  # until its fetches have come
            one.send(arguments.seconds)
            beside.append(one.recv())
            many.send(False)
            more, no = many.recv()
            asked, refused = asked + more, refused + no
        for pipe in pipes:
            pipe.send(None)
        for process in running:
            process.join()
    kept = [with_crowd / without for without, with_crowd in zip(alone, beside, strict=True)]
    print(
        json.dumps(
            {
                "transport": arguments.transport,
                "alone_gbps": round(statistics.median(alone) / 1e9, 2),
                "beside_gbps": round(statistics.median(beside) / 1e9, 2),
                "kept": round(statistics.median(kept), 3),
                "kept_least": round(min(kept), 3),
                "fetches_asked": asked,
                "fetches_refused": refused,
            }
        )
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
