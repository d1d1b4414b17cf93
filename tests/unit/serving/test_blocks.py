"""The block pool against a slow one that keeps lists."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from kvxfer.serving.sim.blocks import BlockPool

SHARED = 4


class SlowPool:
    """Who holds what, and prefixes in the order of their last use."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.held: list[tuple[tuple, int]] = []
        self.cached: list[tuple] = []

    @property
    def pinned(self) -> int:
        return SHARED * len(self.holding()) + sum(private for _, private in self.held)

    def holding(self) -> set:
        return {block for ids, _ in self.held for block in ids}

    def match(self, ids) -> int:
        here = 0
        while here < len(ids) and (ids[here] in self.holding() or ids[here] in self.cached):
            here += 1
        return here

    def acquire(self, ids, private: int) -> bool:
        self.held.append((ids, private))
        if self.pinned > self.capacity:
            self.held.pop()
            return False
        self.cached = [block for block in self.cached if block not in ids]
        self.evict()
        return True

    def release(self, index: int) -> tuple[tuple, int]:
        ids, private = self.held.pop(index)
        self.cached += [block for block in reversed(ids) if block not in self.holding()]
        return ids, private

    def evict(self) -> None:
        while self.pinned + SHARED * len(self.cached) > self.capacity:
            self.cached.pop(0)


def chain(choices: list[int]) -> tuple:
    """Ids that, as in a trace, name everything that comes before them."""
    return tuple(tuple(choices[: n + 1]) for n in range(len(choices)))


prompts = st.lists(st.integers(0, 1), max_size=6).map(chain)
steps = st.lists(st.tuples(st.booleans(), prompts, st.integers(0, 8)), max_size=60)


@given(st.integers(8, 80), steps)
@settings(max_examples=80)
def test_like_a_slow_pool(capacity, steps) -> None:
    pool, slow = BlockPool(capacity, SHARED, caching=True), SlowPool(capacity)
    for take, ids, number in steps:
        assert pool.match(ids) == slow.match(ids)
        if take:
            assert pool.acquire(ids, number) == slow.acquire(ids, number)
        elif slow.held:
            pool.release(*slow.release(number % len(slow.held)))
        assert pool.pinned == slow.pinned
        assert pool.cached == SHARED * len(slow.cached)
        assert pool.pinned + pool.cached <= capacity
    while slow.held:
        pool.release(*slow.release(0))
    assert pool.pinned == 0


def test_without_a_prefix_cache_nothing_is_shared() -> None:
    pool = BlockPool(20, SHARED, caching=False)
    ids = chain([0, 1])
    assert pool.acquire(ids, 1)
    assert pool.acquire(ids, 1)
    assert pool.pinned == 18
    assert not pool.acquire(ids, 1)
    pool.release(ids, 1)
    assert pool.match(ids) == 0
    assert (pool.pinned, pool.cached) == (9, 0)


def test_what_has_to_stay_free_stays_free() -> None:
    pool = BlockPool(10, SHARED, caching=True)
    assert not pool.acquire((), 8, spare=3)
    assert pool.acquire((), 7, spare=3)
    assert pool.free == 3
