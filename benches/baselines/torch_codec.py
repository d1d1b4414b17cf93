"""What one writes in torch to send 8-bit KV: amax, scale, cast. Driven by JSON lines.

Runs under the interpreter of .venv-peers, on one thread. Contiguous tensors, already gathered: the
gather and the digest that kvxfer includes are not counted here.
"""

from __future__ import annotations

import time
from typing import Any

import torch  # type: ignore[import-not-found, unused-ignore]  # only in .venv-peers
from kvbench.child import Reply, serve
from kvbench.kv import CONTENT

PANEL_TOKENS = 64


class _Eager:
    def __init__(self) -> None:
        self._x: Any = None
        self._coded: dict[str, Any] = {}

    def start(self, nbytes: int, heads: int) -> Reply:
        torch.set_num_threads(1)
        tokens = nbytes // 2 // heads // CONTENT // PANEL_TOKENS * PANEL_TOKENS
        self._x = torch.randn(tokens, heads, CONTENT).to(torch.bfloat16)
        return {"version": torch.__version__}

    def run(self, operation: str, codec: str) -> Reply:
        if codec not in self._coded:
            self._coded[codec] = self._encode(codec)
        began = time.perf_counter()
        if operation == "encode":
            self._coded[codec] = self._encode(codec)
        else:
            self._decode(codec)
        return {"seconds": time.perf_counter() - began}

    def _encode(self, codec: str) -> Any:
        x = self._x.float()
        if codec == "fp8_e4m3":
            scale = x.abs().amax(-1, keepdim=True) / 448
            return (x / scale).to(torch.float8_e4m3fn), scale
        # Half of int8's bytes are K, per channel, half are V, per row.
        k, v = x.chunk(2)
        k = k.unflatten(0, (-1, PANEL_TOKENS))
        low, high = k.aminmax(dim=1, keepdim=True)
        step = (high - low) / 255
        scale = v.abs().amax(-1, keepdim=True) / 127
        return (
            ((k - low) / step).round().to(torch.uint8),
            step,
            low,
            (v / scale).round().to(torch.int8),
            scale,
        )

    def _decode(self, codec: str) -> Any:
        if codec == "fp8_e4m3":
            codes, scale = self._coded[codec]
            return (codes.float() * scale).to(torch.bfloat16)
        k, step, low, v, scale = self._coded[codec]
        return (k.float() * step + low).to(torch.bfloat16), (v.float() * scale).to(torch.bfloat16)


if __name__ == "__main__":
    _eager = _Eager()
    serve({"start": _eager.start, "run": _eager.run})
