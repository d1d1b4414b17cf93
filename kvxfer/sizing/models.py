"""Shapes of models' KV caches, from a Hugging Face ``config.json`` or a built-in name."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvxfer.errors import InvalidError
from kvxfer.sizing.builtin import CONFIGS, canonical

ELEMENT_BYTES = {
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "uint8": 1,
    "float8_e4m3fn": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2": 1,
    "float8_e5m2fnuz": 1,
}
_OTHER_NAMES = {
    "fp32": "float32",
    "float": "float32",
    "fp16": "float16",
    "half": "float16",
    "bf16": "bfloat16",
    "fp8": "float8_e4m3fn",
    "fp8_e4m3": "float8_e4m3fn",
    "fp8_e5m2": "float8_e5m2",
}


@dataclass(frozen=True)
class LayerGroup:
    """Layers whose caches have one shape: what an engine keeps in a cache of its own."""

    count: int
    planes: tuple[tuple[str, int], ...]
    """Name and elements per token and kv head of each."""
    kv_heads: int
    window: int | None = None
    """Tokens that its attention sees, where that is not all of them."""
    element: str | None = None
    """What it holds, whatever the rest of the cache holds."""

    def rank_heads(self, tp: int) -> int:
        """Return the kv heads that one rank of `tp` holds: replicas, where there are more ranks.

        Raises
        ------
        InvalidError
            The heads can't be shared out evenly.
        """
        if self.kv_heads % tp and tp % self.kv_heads:
            raise InvalidError(
                f"{self.kv_heads} kv heads can't be shared out evenly to {tp} ranks: choose a "
                "degree that divides them, or a multiple of them"
            )
        return max(1, self.kv_heads // tp)

    def cached_tokens(self, tokens: int) -> int:
        """Return how many of a prompt's tokens the decode side needs to go on."""
        return tokens if self.window is None else min(tokens, max(self.window - 1, 1))


@dataclass(frozen=True)
class Model:
    """What of a model matters for the size of its KV."""

    name: str
    dtype: str
    groups: tuple[LayerGroup, ...]
    notes: tuple[str, ...] = ()

    @property
    def layers(self) -> int:
        """How many layers can be sent one after the other."""
        return max(1, sum(group.count for group in self.groups if group.element is None))


def element_name(text: str) -> str:
    """Return the element type that a text means, as ``bf16`` or ``torch.bfloat16``.

    Raises
    ------
    InvalidError
        No such type.
    """
    name = text.lower().removeprefix("torch.")
    name = _OTHER_NAMES.get(name, name)
    if name not in ELEMENT_BYTES:
        raise InvalidError(
            f"dtype {text!r} is not known; there are {', '.join(ELEMENT_BYTES)}, and fp16, bf16, "
            "fp8 for short"
        )
    return name


def model_names() -> list[str]:
    """Return the built-in names."""
    return list(CONFIGS)


def find_model(name: str) -> Model:
    """Return the model of a built-in name, or of a ``config.json`` or the folder that has one.

    Raises
    ------
    InvalidError
        Neither; the message names the built-in ones that are close.
    """
    path = Path(name)
    if path.is_dir():
        path /= "config.json"
    if path.is_file():
        return _read(path)
    known = canonical(name)
    if known in CONFIGS:
        return model_of(CONFIGS[known], known)
    close = difflib.get_close_matches(known, CONFIGS, 4, 0.5) or list(CONFIGS)[::5]
    raise InvalidError(
        f"{name!r} is neither a file, nor a folder with a config.json, nor a built-in model. "
        f"Built-in are, among others: {', '.join(close)} (kvxfer size --list has all)"
    )


def _read(path: Path) -> Model:
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InvalidError(f"can't read {path} as a config.json: {error}") from error
    if not isinstance(config, dict):
        raise InvalidError(f"{path} holds no JSON object: it is no config.json of a model")
    name = str(config.get("_name_or_path") or "") or path.resolve().parent.name
    return model_of(config, name)


def model_of(config: Mapping[str, Any], name: str) -> Model:
    """Return the model that a parsed ``config.json`` describes.

    Raises
    ------
    InvalidError
        It lacks what the shape follows from.
    """
    text = config.get("text_config") or config.get("llm_config") or config
    if not isinstance(text, Mapping):
        raise InvalidError(f"{name}: its text_config is no object")
    dtype = text.get("dtype") or text.get("torch_dtype") or config.get("dtype")
    dtype = element_name(str(dtype or config.get("torch_dtype") or "bfloat16"))
    layers = _number(text, name, "num_hidden_layers", "n_layer", "num_layers")
    if text.get("kv_lora_rank"):
        return _latent(text, name, dtype, layers)
    heads = _number(text, name, "num_attention_heads", "n_head")
    kv_heads = _optional(text, name, "num_key_value_heads", "num_kv_heads") or heads
    size = _optional(text, name, "head_dim")
    size = size or max(1, _number(text, name, "hidden_size", "n_embd") // heads)
    planes = (("k", size), ("v", _optional(text, name, "v_head_dim") or size))
    full, windowed, stateful = _kinds(text, layers)
    notes = []
    if stateful:
        notes.append(
            f"{stateful} of {layers} layers keep a state instead of KV; that state is not counted"
        )
    groups = []
    if full:
        groups.append(LayerGroup(full, planes, kv_heads))
    if windowed:
        window = _number(text, name, "sliding_window", "attention_chunk_size")
        groups.append(LayerGroup(windowed, planes, kv_heads, window))
    if not groups:
        raise InvalidError(f"{name}: none of its {layers} layers has a KV cache")
    return Model(name, dtype, tuple(groups), tuple(notes))


def _latent(text: Mapping[str, Any], name: str, dtype: str, layers: int) -> Model:
    """MLA: one latent and one rotary key for all heads. Each rank keeps all of it."""
    content = _optional(text, name, "kv_lora_rank") + _optional(text, name, "qk_rope_head_dim")
    groups = [LayerGroup(layers, (("kv", content),), 1)]
    if size := _optional(text, name, "index_head_dim"):
        # Keys of the sparse attention's indexer: 8-bit, with a float32 for each 128.
        keys = (("index", size + 4 * -(-size // 128)),)
        groups.append(LayerGroup(layers, keys, 1, element="uint8"))
    return Model(name, dtype, tuple(groups))


def _number(text: Mapping[str, Any], name: str, *keys: str) -> int:
    value = _optional(text, name, *keys)
    if not value:
        raise InvalidError(
            f"{name}: its config has no {keys[0]}, so the shape of its KV cache is not known"
        )
    return value


def _optional(text: Mapping[str, Any], name: str, *keys: str) -> int:
    """Return the first of these that there is, or 0."""
    key = next((key for key in keys if text.get(key)), None)
    if key is None:
        return 0
    value = text[key]
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 1 << 32:
        raise InvalidError(
            f"{name}: its config's {key} is {value!r:.40}, not a whole number above 0"
        )
    return value


def _kinds(text: Mapping[str, Any], layers: int) -> tuple[int, int, int]:
    """Return how many layers see everything, how many a window, and how many have no KV."""
    kinds = text.get("layer_types") or text.get("layers_block_type")
    window = text.get("sliding_window") or text.get("attention_chunk_size")
    if isinstance(kinds, list):
        windowed = sum(kind in ("sliding_attention", "chunked_attention") for kind in kinds)
        full = sum(kind in ("full_attention", "attention") for kind in kinds)
        return full, windowed, len(kinds) - full - windowed
    if not window or text.get("use_sliding_window") is False:
        return layers, 0, 0
    pattern = text.get("sliding_window_pattern")
    if isinstance(pattern, int) and pattern > 0:  # every so many-th layer sees everything
        return layers // pattern, layers - layers // pattern, 0
    if text.get("use_sliding_window") and isinstance(text.get("max_window_layers"), int):
        full = min(layers, max(0, int(text["max_window_layers"])))
        return full, layers - full, 0
    return 0, layers, 0
