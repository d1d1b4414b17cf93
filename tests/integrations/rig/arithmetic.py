"""The model of the fake engines: what its KV is, and what follows from it."""

from __future__ import annotations

import dataclasses

import torch

HEADS, HEAD_SIZE, LAYERS = 4, 64, 2  # as rig.model has it, but for the layers


def chain_of(tokens: list[int]) -> torch.Tensor:
    """Return for each token a number that depends on it and on all before it."""
    state, numbers = 17, []
    for token in tokens:
        state = (state * 31 + token + 1) % 1000003
        numbers.append(state)
    return torch.tensor(numbers, dtype=torch.int64)


def kv_of(chain: torch.Tensor, layer: int, plane: int, levels: int) -> torch.Tensor:
    """Return K or V ``[token, head, content]`` of these tokens."""
    head = torch.arange(HEADS).view(1, -1, 1) * 131
    content = torch.arange(HEAD_SIZE).view(1, 1, -1) * 17
    factor = 2 * layer + plane + 1
    return ((chain.view(-1, 1, 1) * factor + head + content) % levels + 1).to(torch.float32)


@dataclasses.dataclass(frozen=True)
class Numbers:
    """What an engine computes with and stores. So few levels as its types hold exactly."""

    model: str = "float32"
    cache: str = "auto"
    scales: tuple[float, float] = (1.0, 1.0)
    levels: int = 4093

    @property
    def stored(self) -> torch.dtype:
        return getattr(torch, self.model) if self.cache == "auto" else torch.uint8

    @property
    def held(self) -> torch.dtype:
        """The type of what is stored, where `stored` doesn't say."""
        eight = {"fp8": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
        return eight.get(self.cache, self.stored)


def expected(tokens: list[int], count: int) -> list[int]:
    """Return the tokens that the arithmetic model generates."""
    found = list(tokens)
    for _ in range(count):
        found.append(int(chain_of(found)[-1]) % 509 + 3)
    return found[len(tokens) :]
