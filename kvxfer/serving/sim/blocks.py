"""An engine's KV memory: blocks in use, and a prefix cache in those that are not."""

from __future__ import annotations

from collections.abc import Sequence


class BlockPool:
    """Blocks of one engine, counted; those of known prefixes are found again by their id.

    An id stands for `shared_blocks` blocks. While a sequence holds it, it is pinned, and counted
    once however many sequences share it. When the last lets go it stays cached until the memory is
    needed: the least recently used goes first, and of one prompt its end before its beginning.
    """

    def __init__(self, capacity: int, shared_blocks: int, caching: bool) -> None:
        self.capacity = capacity
        self.pinned = 0
        self._shared_blocks = shared_blocks
        self._caching = caching
        self._holders: dict[int, int] = {}
        self._cached: dict[int, None] = {}  # in the order of their last use

    @property
    def free(self) -> int:
        """Blocks that can be had, those of cached prefixes included."""
        return self.capacity - self.pinned

    @property
    def cached(self) -> int:
        """Blocks that hold prefixes nobody uses at the moment."""
        return len(self._cached) * self._shared_blocks

    def match(self, ids: Sequence[int]) -> int:
        """Return how many of the leading `ids` are here.

        An id stands for a whole prefix, so what comes before one that is here is here too: blocks
        are let go of from the end of a prompt, and evicted in that order.
        """
        holders, cached = self._holders, self._cached
        low, high = 0, len(ids)
        while low < high:
            middle = (low + high) // 2
            if ids[middle] in holders or ids[middle] in cached:
                low = middle + 1
            else:
                high = middle
        return low

    def acquire(self, ids: Sequence[int], private: int, spare: int = 0) -> bool:
        """Pin `ids` and `private` blocks more, or change nothing and return False.

        `spare` blocks have to remain free.
        """
        if not self._caching:
            private += len(ids) * self._shared_blocks
            ids = ()
        holders, cached = self._holders, self._cached
        unheld = sum(1 for block in ids if block not in holders)
        wanted = unheld * self._shared_blocks + private
        if wanted + spare > self.free:
            return False
        for block in ids:
            if block in holders:
                holders[block] += 1
            else:
                cached.pop(block, None)
                holders[block] = 1
        self.pinned += wanted
        self._evict()
        return True

    def grow(self, blocks: int) -> None:
        """Pin more private blocks. The caller has looked at `free`."""
        self.pinned += blocks
        self._evict()

    def release(self, ids: Sequence[int], private: int) -> None:
        """Let go of what a sequence held."""
        if not self._caching:
            private += len(ids) * self._shared_blocks
            ids = ()
        holders = self._holders
        for block in reversed(ids):
            holders[block] -= 1
            if not holders[block]:
                del holders[block]
                self._cached[block] = None
                self.pinned -= self._shared_blocks
        self.pinned -= private

    def _evict(self) -> None:
        cached = self._cached
        excess = self.pinned + len(cached) * self._shared_blocks - self.capacity
        while excess > 0:
            del cached[next(iter(cached))]
            excess -= self._shared_blocks
