"""Streams of GPUs, as libraries pass them around."""

from __future__ import annotations

import sys
from operator import index
from typing import TYPE_CHECKING

from kvxfer.errors import InvalidError

if TYPE_CHECKING:
    from kvxfer.cache import Cache

DEFAULT_STREAM = 0


def stream_handle(stream: object, cache: Cache) -> int:
    """Return the runtime's handle of a stream.

    Parameters
    ----------
    stream
        A torch or CuPy stream, anything with ``__cuda_stream__``, or the handle. None: torch's
        current stream where the cache is made of torch tensors, else the device's default stream,
        which follows all that were not made non-blocking.

    Raises
    ------
    InvalidError
        It is nothing of that, or the cache is not on a GPU.
    """
    if not cache.on_gpu:
        if stream is not None:
            raise InvalidError(f"stream is {stream!r}, but {cache!r} is not on a GPU: leave it out")
        return DEFAULT_STREAM
    if stream is None:
        return _current(cache)
    handle = _find(stream)
    if handle is None or not 0 <= handle < 1 << 64:
        raise InvalidError(
            f"stream is {stream!r}: expected a stream of torch or CuPy, or a handle, of which 0 is "
            "the default stream"
        )
    return handle


def _find(stream: object) -> int | None:
    for name in ("cuda_stream", "ptr"):  # torch's, on ROCm too; CuPy's
        handle = getattr(stream, name, None)
        if isinstance(handle, int):
            return handle
    protocol = getattr(stream, "__cuda_stream__", None)
    if protocol is not None:
        return int(protocol()[1])
    try:
        return index(stream)  # type: ignore[arg-type]
    except TypeError:
        return None


def _current(cache: Cache) -> int:
    torch = sys.modules.get("torch")
    tensor = cache.owner
    if torch is None or not isinstance(tensor, torch.Tensor):
        return DEFAULT_STREAM
    return int(torch.cuda.current_stream(tensor.device).cuda_stream)
