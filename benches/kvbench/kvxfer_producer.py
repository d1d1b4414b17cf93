"""The producing process of kvxfer's side."""

from __future__ import annotations

from typing import Any

from kvbench.child import Reply, serve
from kvbench.memory import Pages, Pool, scattered_slots
from kvbench.sides import TOKEN_BYTES, cache_array, make_agent


class _Producer:
    def __init__(self) -> None:
        self._pool = Pool(0)
        self._run_bytes = 0
        self._agent: Any = None
        self._cache: Any = None
        self._blocks: tuple[tuple[int, int], list[int]] = ((0, 0), [])
        self._offers: list[Any] = []

    def start(
        self,
        transport: str,
        digest: bool,
        run_bytes: int,
        pool_bytes: int,
        pages: Pages,
        seed: int,
        devices: str | None,
    ) -> Reply:
        import kvxfer

        self._pool = Pool(pool_bytes, pages)
        self._pool.fill_random(seed)
        self._run_bytes = run_bytes
        self._agent = make_agent("bench-producer", transport, digest, "127.0.0.1:0", devices)
        array = cache_array(self._pool, run_bytes)
        self._cache = self._agent.register(kvxfer.Cache({"layer": array}, axes="BHNC"))
        return {}

    def offer(self, runs: int, seed: int, count: int) -> Reply:
        if self._blocks[0] != (runs, seed):
            slots = scattered_slots(self._run_bytes, runs, self._pool.nbytes, seed)
            self._blocks = ((runs, seed), slots.tolist())
        tokens = runs * (self._run_bytes // TOKEN_BYTES)
        self._offers = [
            self._agent.offer(self._cache, blocks=self._blocks[1], num_tokens=tokens, lease=60.0)
            for _ in range(count)
        ]
        return {"tickets": [offer.ticket for offer in self._offers]}

    def close(self) -> None:
        if self._agent is not None:
            self._agent.close()


if __name__ == "__main__":
    _producer = _Producer()
    try:
        serve({"start": _producer.start, "offer": _producer.offer})
    finally:
        _producer.close()
