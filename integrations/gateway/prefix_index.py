"""What an engine's prefix cache is believed to hold: hashes of blocks, by when they were used."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

Hashes = Sequence[int]


def chain(root: object, data: bytes, block_bytes: int) -> list[int]:
    """Return a hash for each full block of `data`, each of which depends on all before it.

    Python's hash of bytes is keyed anew in each process, so nobody can construct a collision; one
    would cost a wrong guess, not a wrong answer.
    """
    return extend(hash(root), data, block_bytes)


def extend(state: int, data: bytes, block_bytes: int) -> list[int]:
    """Return the hashes of what follows the block whose hash is `state`."""
    found = []
    for at in range(0, len(data) - block_bytes + 1, block_bytes):
        state = hash((state, data[at : at + block_bytes]))
        found.append(state)
    return found


class PrefixIndex:
    """A bounded set of block hashes."""

    def __init__(self, most_blocks: int) -> None:
        self._most = most_blocks
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._blocks)

    def limit(self, most_blocks: int) -> None:
        """Keep at most so many blocks from now on."""
        self._most = most_blocks
        self._trim()

    def match(self, hashes: Hashes) -> int:
        """Return how many leading blocks are there."""
        blocks = self._blocks
        for count, one in enumerate(hashes):
            if one not in blocks:
                return count
        return len(hashes)

    def add(self, hashes: Hashes) -> None:
        """Note that these are there, and were just used. The last are the first to go."""
        blocks = self._blocks
        for one in reversed(hashes):
            blocks[one] = None
            blocks.move_to_end(one)
        self._trim()

    def remove(self, hashes: Iterable[int]) -> None:
        """Note that these are gone."""
        for one in hashes:
            self._blocks.pop(one, None)

    def clear(self) -> None:
        """Note that nothing is there, as after a restart."""
        self._blocks.clear()

    def _trim(self) -> None:
        while len(self._blocks) > self._most:
            self._blocks.popitem(last=False)
