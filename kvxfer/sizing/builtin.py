"""Built-in models: what of their published ``config.json`` the size of the KV follows from."""

from __future__ import annotations

import re
from typing import Any

Config = dict[str, Any]


def _gqa(layers: int, kv_heads: int, head_size: int = 128, **more: object) -> Config:
    return {
        "num_hidden_layers": layers,
        "num_attention_heads": kv_heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_size,
        **more,
    }


def _gemma3(layers: int, kv_heads: int, head_size: int, window: int = 1024) -> Config:
    return _gqa(layers, kv_heads, head_size, sliding_window=window, sliding_window_pattern=6)


def _mla(layers: int, **more: object) -> Config:
    return {"num_hidden_layers": layers, "kv_lora_rank": 512, "qk_rope_head_dim": 64, **more}


def _gpt_oss(layers: int) -> Config:
    return _gqa(layers, 8, 64, sliding_window=128, sliding_window_pattern=2)


CONFIGS: dict[str, Config] = {
    "llama-3-8b": _gqa(32, 8),
    "llama-3-70b": _gqa(80, 8),
    "llama-3.1-8b": _gqa(32, 8),
    "llama-3.1-70b": _gqa(80, 8),
    "llama-3.1-405b": _gqa(126, 8),
    "llama-3.2-1b": _gqa(16, 8, 64),
    "llama-3.2-3b": _gqa(28, 8),
    "llama-3.3-70b": _gqa(80, 8),
    "qwen3-0.6b": _gqa(28, 8),
    "qwen3-1.7b": _gqa(28, 8),
    "qwen3-4b": _gqa(36, 8),
    "qwen3-8b": _gqa(36, 8),
    "qwen3-14b": _gqa(40, 8),
    "qwen3-32b": _gqa(64, 8),
    "qwen3-30b-a3b": _gqa(48, 4),
    "qwen3-235b-a22b": _gqa(94, 4),
    "qwen2.5-7b": _gqa(28, 4),
    "qwen2.5-14b": _gqa(48, 8),
    "qwen2.5-32b": _gqa(64, 8),
    "qwen2.5-72b": _gqa(80, 8),
    "gemma-3-1b": _gemma3(26, 1, 256, 512),
    "gemma-3-4b": _gemma3(34, 4, 256),
    "gemma-3-12b": _gemma3(48, 8, 256),
    "gemma-3-27b": _gemma3(62, 16, 128),
    "deepseek-v2-lite": _mla(27),
    "deepseek-v3": _mla(61),
    "deepseek-r1": _mla(61),
    "deepseek-v3.2": _mla(61, index_head_dim=128),
    "kimi-k2": _mla(61),
    "mistral-7b": _gqa(32, 8),
    "mistral-small-24b": _gqa(40, 8),
    "mixtral-8x7b": _gqa(32, 8),
    "gpt-oss-20b": _gpt_oss(24),
    "gpt-oss-120b": _gpt_oss(36),
    "phi-4": _gqa(40, 10),
}
_TAIL = re.compile(
    r"-(instruct|chat|base|it|pt|hf|fp8|bf16|exp|thinking|2[45]\d\d|v0\.\d|0[135]\d\d)(?=-|$)"
)
_SAME = {
    "llama-3-70b-tp8": "llama-3-70b",
    "llama-70b": "llama-3-70b",
    "llama-8b": "llama-3-8b",
    "deepseek-r1-0528": "deepseek-r1",
    "deepseek-v3.1": "deepseek-v3",
}


def canonical(name: str) -> str:
    """Return a name as `CONFIGS` has it: ``meta-llama/Llama-3.3-70B-Instruct`` and the like."""
    short = name.rsplit("/", 1)[-1].lower().replace("_", "-").removeprefix("meta-")
    while (shorter := _TAIL.sub("", short)) != short:
        short = shorter
    return _SAME.get(short, short)
