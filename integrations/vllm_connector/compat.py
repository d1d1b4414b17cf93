"""What has to fit on both sides of a transfer, by name."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from vllm.v1.kv_cache_interface import AttentionSpec, UniformTypeKVCacheSpecs

from kvxfer.errors import ConfigError

from .messages import CacheInfo

CONNECTOR = "2"  # changes with what kv_transfer_params mean
# Of a model's config, what says nothing of the numbers in its cache.
_IRRELEVANT = {
    *("_name_or_path", "transformers_version", "torch_dtype", "dtype", "use_cache", "return_dict"),
    *("problem_type", "id2label", "label2id", "output_attentions", "output_hidden_states"),
    *("attention_dropout", "initializer_range"),
}
_MODEL = "model config "
_WEIGHTS = "*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf"
_SAMPLE, _PLACES = 4096, 64  # bytes, and from how many places of each file of weights
_MOST_TEXT = 200  # characters of a field; what is longer ends in a digest
_MOST_CONFIG = 16 << 10  # characters of a model's config; longer ones go by their outermost keys


def layer_specs(kv_cache_config: Any, group: int) -> dict[str, Any]:
    """Return the spec of each layer of a group."""
    spec = kv_cache_config.kv_cache_groups[group].kv_cache_spec
    names = kv_cache_config.kv_cache_groups[group].layer_names
    if isinstance(spec, UniformTypeKVCacheSpecs):
        return {name: spec.kv_cache_specs[name] for name in names}
    return dict.fromkeys(names, spec)


def check_supported(vllm_config: Any, kv_cache_config: Any) -> None:
    """Refuse engines whose KV cannot be transferred: raises ConfigError."""
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        count = getattr(vllm_config.parallel_config, name, 1)
        if count > 1:
            raise ConfigError(f"KvxferConnector does not know {name} > 1, this engine has {count}")
    for group in kv_cache_config.transfer_group_ids:
        for layer, spec in layer_specs(kv_cache_config, group).items():
            if not isinstance(spec, AttentionSpec):
                raise ConfigError(
                    f"KvxferConnector transfers attention caches; layer {layer!r} keeps a "
                    f"{type(spec).__name__}, whose state it cannot move yet"
                )


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def _clip(text: str) -> str:
    """Bound what travels with each request, and keep it telling."""
    if len(text) <= _MOST_TEXT:
        return text
    return f"{text[: _MOST_TEXT // 2]}... (sha256 {_digest(text.encode())})"


def _weights(model: str) -> str:
    """Tell fine-tunes of one architecture apart, without reading all of them."""
    where = Path(model)
    if where.is_file():
        files = [where]
    elif where.is_dir():  # vLLM prefers them in this order, too
        found = (sorted(where.glob(pattern)) for pattern in _WEIGHTS)
        files = next(filter(None, found), [])
    else:
        return model
    parts = []
    for file in files:
        with file.open("rb") as stream:
            size = stream.seek(0, 2)
            samples = []
            for place in range(_PLACES):  # the first and the last are the file's ends
                stream.seek(max(0, size - _SAMPLE) * place // (_PLACES - 1))
                samples.append(stream.read(_SAMPLE))
            parts.append(f"{file.name} of {size} bytes, sampled {_digest(b''.join(samples))}")
    return _clip("; ".join(parts)) or "none"


def _leaves(name: str, value: Any, depth: int) -> Iterator[tuple[str, str]]:
    """Yield a config key by key, as ``rope_parameters.factor``, down to a depth."""
    if isinstance(value, dict) and depth > 0:
        for key, each in value.items():
            if key not in _IRRELEVANT:
                yield from _leaves(f"{name}.{key}" if name else str(key), each, depth - 1)
    else:
        yield name, _clip(json.dumps(value, sort_keys=True, default=str))


def _config(config: dict[str, Any]) -> dict[str, str]:
    for depth in (8, 1):
        found = {_MODEL + key: value for key, value in _leaves("", config, depth)}
        if sum(len(key) + len(value) for key, value in found.items()) <= _MOST_CONFIG:
            return found
    return {f"{_MODEL}as a whole": _clip(json.dumps(found, sort_keys=True))}


def engine_fields(vllm_config: Any) -> dict[str, str]:
    """Return the fields that an engine's configuration decides."""
    import vllm

    model = vllm_config.model_config
    commit = getattr(model.hf_config, "_commit_hash", None)
    return {
        "connector version": CONNECTOR,
        "vllm version": vllm.__version__,
        "weights": _weights(model.model),
        "model revision": f"{model.revision or 'none'}{f' ({commit})' if commit else ''}",
        "quantization": str(model.quantization or "none"),
        **_config(model.hf_config.to_dict()),
    }


def model_name(fields: Mapping[str, str]) -> str:
    """Name a model for the caches, where the core compares it once more."""
    named = [f"{name} {fields[name]}" for name in sorted(fields) if name.startswith(_MODEL)]
    return _digest("\n".join([fields["weights"], *named]).encode())


def layer_ranges(layers: Iterable[str]) -> str:
    """Write many layers' names in short, as ``model.layers.{0-17,20}.self_attn.attn``."""
    numbers: dict[tuple[str, ...], list[int]] = {}
    for layer in layers:
        pieces = re.split(r"(\d+)", layer, maxsplit=1)  # before, number, behind
        number = int(pieces[1]) if len(pieces) > 1 else 0
        numbers.setdefault(tuple(pieces[::2]), []).append(number)
    written = []
    for around, found in sorted(numbers.items()):
        runs: list[list[int]] = []
        for number in sorted(found):
            if runs and runs[-1][1] == number - 1:
                runs[-1][1] = number
            else:
                runs.append([number, number])
        text = ",".join(f"{a}-{b}" if a < b else f"{a}" for a, b in runs)
        written.append(f"{{{text}}}".join(around))
    return _clip(", ".join(written))


def cache_fields(caches: Iterable[CacheInfo]) -> dict[str, str]:
    """Return the fields that the caches of all ranks decide together.

    Raises
    ------
    ConfigError
        Ranks of this engine describe a cache differently.
    """
    fields: dict[str, str] = {}
    layers: dict[str, set[str]] = {}
    heads: dict[str, int] = {}
    for info in caches:
        for name, value in info.fields.items():
            known = fields.setdefault(f"cache {info.key} {name}", value)
            if known != value:
                raise ConfigError(
                    f"ranks of this engine differ: {name} of cache {info.key} is {known!r} on one "
                    f"and {value!r} on another"
                )
        layers.setdefault(info.key, set()).update(info.layers)
        heads[info.key] = max(heads.get(info.key, 0), info.heads[1])
    for key in layers:
        fields[f"cache {key} layers"] = layer_ranges(layers[key])
        fields[f"cache {key} kv heads"] = str(heads[key])
    return fields


def _fits(name: str, ours: str, theirs: str) -> bool:
    """Return whether the core makes one of the other without loss that would show."""
    if ours == theirs:
        return True
    if not name.endswith(" element type"):
        return False
    # 8-bit floats are never rounded to others; those of other widths hardly ever have an equal.
    e4m3, e5m2 = (any(kind in each for each in (ours, theirs)) for kind in ("e4m3", "e5m2"))
    known = all(each.startswith(("float", "bfloat")) for each in (ours, theirs))
    return known and not (e4m3 and e5m2)


def difference(
    ours: Mapping[str, str], theirs: Mapping[str, str], ignored: Iterable[str] = ()
) -> str | None:
    """Return what does not fit, with both values, or None."""
    both = {
        name: (ours.get(name, "missing"), theirs.get(name, "missing"))
        for name in {**ours, **theirs}
        if name not in ignored
    }
    return (
        "; ".join(
            f"{name} is {here!r} here and {there!r} there"
            for name, (here, there) in both.items()
            if not _fits(name, here, there)
        )
        or None
    )
