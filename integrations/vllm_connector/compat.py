"""What has to be equal on both sides of a transfer, by name."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from .messages import CacheInfo

CONNECTOR = "1"  # changes with what kv_transfer_params mean
# Of a model's config, what says nothing of the numbers in its cache.
_IRRELEVANT = ("_name_or_path", "transformers_version", "torch_dtype", "dtype", "use_cache")
_SAMPLE, _PLACES = 4096, 64  # bytes, and from how many places of each file of weights
_MAX_SCALES = 4096  # characters; longer lists of scales are compared by digest


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _weights(model: str) -> str:
    """Tell fine-tunes of one architecture apart, without reading all of them."""
    folder = Path(model)
    if not folder.is_dir():
        return model
    parts = []
    for file in sorted(folder.glob("*.safetensors")):
        with file.open("rb") as stream:
            size = stream.seek(0, 2)
            state = hashlib.sha256()
            for place in range(_PLACES):  # the first and the last are the file's ends
                stream.seek(max(0, size - _SAMPLE) * place // (_PLACES - 1))
                state.update(stream.read(_SAMPLE))
            parts.append(f"{file.name} {size} {state.hexdigest()}")
    return _digest("\n".join(parts)) if parts else "none"


def engine_fields(vllm_config: Any) -> dict[str, str]:  # noqa: ANN401 - VllmConfig
    """Return the fields that an engine's configuration decides."""
    import vllm

    model = vllm_config.model_config
    config = {k: v for k, v in model.hf_config.to_dict().items() if k not in _IRRELEVANT}
    commit = getattr(model.hf_config, "_commit_hash", None)
    architectures = ",".join(config.get("architectures") or ["?"])
    return {
        "connector version": CONNECTOR,
        "vllm version": vllm.__version__,
        "model": f"{architectures} {_digest(json.dumps(config, sort_keys=True, default=str))}",
        "weights": _weights(model.model),
        "model revision": f"{model.revision or 'none'}{f' ({commit})' if commit else ''}",
        "dtype": str(model.dtype).removeprefix("torch."),
        "kv cache dtype": str(vllm_config.cache_config.cache_dtype),
        "quantization": str(model.quantization or "none"),
    }


def cache_fields(caches: Iterable[CacheInfo]) -> dict[str, str]:
    """Return the fields that the caches of all ranks decide together."""
    fields: dict[str, str] = {}
    layers: dict[str, list[str]] = {}
    scales: dict[str, dict[str, tuple[float, float]]] = {}
    heads: dict[str, int] = {}
    for info in caches:
        for name, value in info.fields.items():
            fields[f"{info.key} {name}"] = value
        layers.setdefault(info.key, []).extend(info.layers)
        scales.setdefault(info.key, {}).update(info.scales)
        heads[info.key] = max(heads.get(info.key, 0), info.heads[1])
    for key, names in layers.items():
        held = sorted(set(names))
        fields[f"{key} layers"] = f"{len(held)} {_digest(','.join(held))}"
        fields[f"{key} kv heads"] = str(heads[key])
        if scales[key]:
            fields[f"{key} scales"] = _scales(scales[key])
    return fields


def _scales(scales: Mapping[str, tuple[float, float]]) -> str:
    """Write the scales of K and V, by layer where it is not too much."""
    text = ", ".join(f"{layer} {k!r}/{v!r}" for layer, (k, v) in sorted(scales.items()))
    return text if len(text) <= _MAX_SCALES else _digest(text)


def _first_difference(ours: str, theirs: str) -> tuple[str, str]:
    """Return what two lists of scales do not share, of the first layer that differs."""
    for here, there in zip(ours.split(", "), theirs.split(", "), strict=False):
        if here != there:
            return here, there
    return ours, theirs


def difference(
    ours: Mapping[str, str], theirs: Mapping[str, str], ignored: Iterable[str] = ()
) -> str | None:
    """Return what differs, with both values, or None."""
    differing = []
    for name in {**ours, **theirs}:
        here, there = ours.get(name, "missing"), theirs.get(name, "missing")
        if here == there or name in set(ignored):
            continue
        if name.endswith(" scales"):
            here, there = _first_difference(here, there)
        differing.append(f"{name} is {here!r} here and {there!r} there")
    return "; ".join(differing) or None
