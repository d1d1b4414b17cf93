"""A pair of fake engines, and what a proxy does with them."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from rig.arithmetic import expected
from rig.engines import prompt as prompt
from rig.fake import Engine, prefill_params

PATIENCE = 30.0  # seconds; what is waited for takes milliseconds


def step_until(done: Callable[[], bool], *engines: Engine) -> None:
    deadline = time.monotonic() + PATIENCE
    while not done():
        assert time.monotonic() < deadline, "it did not happen in time"
        for engine in engines:
            engine.step()
        time.sleep(0.001)


def prefill(engine: Engine, tokens: list[int], **more: Any) -> tuple[str, dict[str, Any] | None]:
    """Run the prefill side's request; return its name and the kv_transfer_params of its answer."""
    name = engine.add(tokens, params=prefill_params(), max_tokens=1, **more)
    step_until(lambda: engine.answers[name]["finish"] is not None, engine)
    return name, engine.answers[name]["params"]


def decode(
    engine: Engine, tokens: list[int], params: dict[str, Any] | None, *others: Engine, **more: Any
) -> str:
    """Run the decode side's request to its end; its tokens must be right."""
    name = engine.add(tokens, params=params, **more)
    step_until(lambda: engine.answers[name]["finish"] is not None, engine, *others)
    check(engine, name, tokens)
    return name


def check(engine: Engine, name: str, tokens: list[int], count: int = 4) -> None:
    assert not engine.wrong, engine.wrong[:3]
    assert engine.answers[name]["tokens"] == expected(tokens, count)


def settle(*engines: Engine) -> None:
    """Step until nothing is under way; no block may be missing then."""
    step_until(lambda: all(engine.idle for engine in engines), *engines)
    for engine in engines:
        total = engine.config.cache_config.num_gpu_blocks
        assert engine.free_blocks == total - 1, "blocks leaked"  # vLLM keeps one as null block
