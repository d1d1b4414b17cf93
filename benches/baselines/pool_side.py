"""What each process of a pair has, whichever engine moves its bytes: a pool, and looks at it."""

from __future__ import annotations

import hashlib

from kvbench.child import Handler, Reply
from kvbench.memory import Pages, Pool, scattered_slots


class PoolSide:
    """One pool of memory, and the commands that fill and compare it."""

    def __init__(self) -> None:
        self.pool = Pool(0)

    def make_pool(self, pool_bytes: int, pages: Pages, seed: int | None) -> None:
        """Make the pool; with a seed it is the source's."""
        self.pool = Pool(pool_bytes, pages)
        if seed is not None:
            self.pool.fill_random(seed)

    def fill(self, value: int) -> Reply:
        """Set every byte of the pool."""
        self.pool.fill(value)
        return {}

    def refill(self, seed: int) -> Reply:
        """Put the source's bytes back."""
        self.pool.fill_random(seed)
        return {}

    def digest(self, run_bytes: int, runs: int, seed: int) -> Reply:
        """Hash of the runs, in their order."""
        slots = scattered_slots(run_bytes, runs, self.pool.nbytes, seed)
        rows = self.pool.bytes.reshape(-1, run_bytes)
        return {"digest": hashlib.blake2b(rows[slots].tobytes()).hexdigest()}

    def handlers(self) -> dict[str, Handler]:
        """These commands, by name."""
        return {"fill": self.fill, "refill": self.refill, "digest": self.digest}
