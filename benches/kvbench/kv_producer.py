"""The producing process of coded fetches: a KvPool, offered as often as asked."""

from __future__ import annotations

from typing import Any

from baselines.host import SRC_SEED

from kvbench.child import Reply, serve
from kvbench.kv import KvPool
from kvbench.memory import Pages


class _Producer:
    def __init__(self) -> None:
        self._agent: Any = None
        self._kv: KvPool | None = None
        self._cache: Any = None
        self._offer: Any = None

    def start(self, listen: str, secret: str, nbytes: int, pages: Pages, seed: int) -> Reply:
        import kvxfer

        self._kv = KvPool(nbytes, pages, SRC_SEED, seed)
        self._agent = kvxfer.Agent("bench-producer", listen=listen, transport="tcp", secret=secret)
        self._cache = self._agent.register(self._kv.cache())
        return {}

    def offer(self) -> Reply:
        assert self._kv is not None
        self._offer = self._agent.offer(
            self._cache, blocks=self._kv.blocks.tolist(), num_tokens=self._kv.num_tokens, lease=60.0
        )
        return {"ticket": self._offer.ticket}

    def close(self) -> None:
        if self._agent is not None:
            self._agent.close()


if __name__ == "__main__":
    _producer = _Producer()
    try:
        serve({"start": _producer.start, "offer": _producer.offer})
    finally:
        _producer.close()
