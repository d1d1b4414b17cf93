"""What is measured: one case is one kind of transfer under one set of settings."""

from __future__ import annotations

import dataclasses
from typing import Any

MEMORIES = ("host", "gpu")
TRANSPORTS = ("auto", "shm", "tcp", "verbs", "ucx")
PATHS = ("auto", "staged", "direct")
ELEMENT_BYTES = {"bfloat16": 2, "float16": 2, "float8_e4m3fn": 1}
_TOKEN_BYTES = 1024  # of a case that names no model
_MOST_BLOCKS = 1 << 24


class BenchError(Exception):
    """Something that the user should read, without a traceback."""


class WrongBytesError(BenchError):
    """What arrived is not what was sent."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One kind of transfer. Both sides make the same caches of it."""

    name: str
    transport: str = "auto"
    memory: str = "host"
    layers: int = 1
    planes: tuple[str, ...] = ("kv",)
    heads: int = 1
    content: int = 512
    """Elements of one token, head and plane."""
    dtype: str = "bfloat16"
    block_size: int = 16
    """Tokens of a block."""
    tokens: int = 16
    codec: str = "raw"
    path: str = "auto"
    in_flight: int = 1
    """Fetches that are under way at once; they share the tokens."""
    threads: int = 0
    """That pack and unpack; 0 is the agents' default."""

    def __post_init__(self) -> None:
        for field in ("layers", "heads", "content", "block_size", "tokens", "in_flight"):
            value = getattr(self, field)
            if not isinstance(value, int) or not 1 <= value < 1 << 32:
                raise BenchError(f"{self.name}: {field} is {value!r}, not 1 to {(1 << 32) - 1}")
        if not 0 <= self.threads <= 1024:
            raise BenchError(f"{self.name}: {self.threads} threads; there can be 1 to 1024")
        if self.dtype not in ELEMENT_BYTES:
            raise BenchError(f"dtype {self.dtype!r}: there are {', '.join(ELEMENT_BYTES)}")
        if self.block_bytes % 8:
            raise BenchError(f"{self.name}: blocks have {self.block_bytes} bytes, not 8 times any")
        if self.blocks > _MOST_BLOCKS:
            raise BenchError(f"{self.name}: {self.blocks} blocks are more than {_MOST_BLOCKS}")
        if self.in_flight > self.blocks:
            raise BenchError(
                f"{self.name}: {self.in_flight} fetches at once need as many blocks; there are "
                f"{self.blocks}"
            )

    @property
    def blocks(self) -> int:
        """Blocks of one layer and plane that the tokens fill."""
        return -(-self.tokens // self.block_size)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block of one layer and plane: one contiguous run."""
        return self.heads * self.block_size * self.content * ELEMENT_BYTES[self.dtype]

    @property
    def runs(self) -> int:
        return self.blocks * self.layers * len(self.planes)

    @property
    def pool_blocks(self) -> int:
        """Blocks of the caches: a quarter more than are used, which nobody asks for."""
        return self.blocks + max(8, self.blocks // 4)

    @property
    def pool_bytes(self) -> int:
        return self.pool_blocks * self.layers * len(self.planes) * self.block_bytes

    @property
    def bytes(self) -> int:
        """Bytes of KV of one transfer."""
        token = self.layers * len(self.planes) * self.heads * self.content
        return self.tokens * token * ELEMENT_BYTES[self.dtype]

    def parts(self) -> list[tuple[int, int]]:
        """Return the tokens of each fetch, [begin, end); borders are borders of blocks."""
        borders = [
            min(self.tokens, self.blocks * part // self.in_flight * self.block_size)
            for part in range(self.in_flight + 1)
        ]
        borders[-1] = self.tokens
        return list(zip(borders, borders[1:], strict=False))

    def frame(self) -> dict[str, Any]:
        """Return it as JSON has it."""
        return dataclasses.asdict(self)

    @classmethod
    def of(cls, frame: object) -> Case:
        """Return what the other side sent; raise BenchError when that is no case."""
        if not isinstance(frame, dict):
            raise BenchError("the other side sent no case")
        try:
            return cls(**{**frame, "planes": tuple(map(str, frame["planes"]))})
        except (TypeError, KeyError, ValueError) as error:
            raise BenchError(f"the other side sent a case that is none: {error}") from None


def plain_case(name: str, block_bytes: int, blocks: int, **settings: Any) -> Case:  # noqa: ANN401
    """Return a case of one layer and plane: `blocks` runs of `block_bytes`."""
    if block_bytes % 8:
        raise BenchError(f"--block {block_bytes}: blocks have a multiple of 8 bytes")
    element = ELEMENT_BYTES[settings.get("dtype", "bfloat16")]
    token_bytes = _TOKEN_BYTES if block_bytes % _TOKEN_BYTES == 0 else block_bytes
    block_size = block_bytes // token_bytes
    return Case(
        name=name,
        content=token_bytes // element,
        block_size=block_size,
        tokens=block_size * blocks,
        **settings,
    )
