"""One side of a Mooncake pair, driven by JSON lines (mooncake_pair.py is the other end of them).

Runs under the interpreter of .venv-peers. TCP over loopback, no metadata server.
"""

from __future__ import annotations

import time
from importlib.metadata import distributions
from typing import Any

from kvbench.child import Reply, serve
from kvbench.memory import Pages, offsets_of, scattered_slots

from baselines.pool_side import PoolSide

Batch = tuple[list[int], list[int], list[int]]
MOST_RUNS = 32768  # of one batch: its queue takes 65,535, of which some may still be under way


class Side(PoolSide):
    """An engine with one registered pool. The initiator asks, the target has threads of its own."""

    def __init__(self) -> None:
        super().__init__()
        self._engine: Any = None
        self._batches: dict[str, tuple[str, str, list[Batch]]] = {}

    def start(self, pool_bytes: int, pages: Pages, seed: int | None) -> Reply:
        """Make the engine and register the pool."""
        from mooncake.engine import TransferEngine  # type: ignore[import-not-found]

        self.make_pool(pool_bytes, pages, seed)
        self._engine = TransferEngine()
        _check("initialize", self._engine.initialize("127.0.0.1:0", "P2PHANDSHAKE", "tcp", ""))
        _check("register_memory", self._engine.register_memory(self.pool.address, pool_bytes))
        version = next(
            (d.version for d in distributions() if d.name.startswith("mooncake-transfer-engine")),
            "?",
        )
        return {
            "peer": f"127.0.0.1:{self._engine.get_rpc_port()}",
            "address": self.pool.address,
            "version": version,
        }

    def prepare(
        self,
        key: str,
        operation: str,
        peer: str,
        run_bytes: int,
        runs: int,
        local_seed: int,
        remote_seed: int,
        remote_address: int,
    ) -> Reply:
        """Make the lists of addresses, which are used again."""

        def addresses(base: int, seed: int) -> list[int]:
            slots = scattered_slots(run_bytes, runs, self.pool.nbytes, seed)
            return [base + int(offset) for offset in offsets_of(slots, run_bytes)]

        mine = addresses(self.pool.address, local_seed)
        theirs = addresses(remote_address, remote_seed)
        lengths = [run_bytes] * runs
        batches = [
            (mine[part], theirs[part], lengths[part])
            for part in (slice(begin, begin + MOST_RUNS) for begin in range(0, runs, MOST_RUNS))
        ]
        self._batches[key] = (operation, peer, batches)
        return {}

    def go(self, key: str, count: int) -> Reply:
        """Run a transfer `count` times; seconds of each."""
        operation, peer, batches = self._batches[key]
        move = (
            self._engine.batch_transfer_sync_write
            if operation == "WRITE"
            else self._engine.batch_transfer_sync_read
        )
        seconds = []
        for _ in range(count):
            began = time.perf_counter()
            status = 0
            for mine, theirs, lengths in batches:
                status = status or move(peer, mine, theirs, lengths)
            seconds.append(time.perf_counter() - began)
            _check(operation, status)
        return {"seconds": seconds}


def _check(what: str, status: int) -> None:
    if status != 0:
        raise RuntimeError(f"{what} returned {status}")


if __name__ == "__main__":
    side = Side()
    serve(
        {
            "start": side.start,
            "prepare": side.prepare,
            "go": side.go,
            **side.handlers(),
        }
    )
