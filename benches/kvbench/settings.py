"""What the command line chooses, and what all measurements share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from baselines.nixl import peers_python

from kvbench.measure import MIB, Result
from kvbench.memory import Pages
from kvbench.native import Native


@dataclass(frozen=True)
class Settings:
    """Sizes and counts of one run."""

    native: Native
    pages: Pages = "thp"
    quick: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes of one large transfer."""
        return (64 if self.quick else 256) * MIB

    @property
    def repetitions(self) -> int:
        """Repetitions of one large transfer."""
        return 5 if self.quick else 15

    @property
    def nixl_python(self) -> str | None:
        """The interpreter that has NIXL, or None."""
        return peers_python()


Measurement = Callable[[Settings], Iterator[Result]]
