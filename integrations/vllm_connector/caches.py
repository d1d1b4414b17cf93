"""Describes an engine's KV tensors as kvxfer caches."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    KVCacheConfig,
    MLAAttentionSpec,
    UniformTypeKVCacheSpecs,
)

from kvxfer.cache import Cache

from .messages import CacheInfo
from .packing import Packing, probe

# Rows travel whole within a chunk; the smallest chunks are of this size.
_MAX_ROW = 64 << 10
_FP8 = {"fp8": "float8_e4m3fn", "fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2"}


@dataclass(frozen=True)
class LocalCache:
    """A cache of this worker and what the scheduler is told about it."""

    info: CacheInfo
    cache: Cache


@dataclass(frozen=True)
class _Geometry:
    """Layers of equal geometry make one cache."""

    heads: int
    block_size: int
    content: int
    dtype: torch.dtype
    element: str
    backend: str
    isa: str
    window: int | None
    latent: bool


def layer_specs(kv_cache_config: KVCacheConfig, group: int) -> dict[str, Any]:
    """Return the spec of each layer of a group."""
    spec = kv_cache_config.kv_cache_groups[group].kv_cache_spec
    names = kv_cache_config.kv_cache_groups[group].layer_names
    if isinstance(spec, UniformTypeKVCacheSpecs):
        return {name: spec.kv_cache_specs[name] for name in names}
    return dict.fromkeys(names, spec)


def check_groups(kv_cache_config: KVCacheConfig) -> None:
    """Refuse what cannot be transferred: raises NotImplementedError, naming layer and kind."""
    for group in kv_cache_config.transfer_group_ids:
        for layer, spec in layer_specs(kv_cache_config, group).items():
            if not isinstance(spec, AttentionSpec):
                raise NotImplementedError(
                    f"KvxferConnector transfers attention caches; layer {layer!r} keeps a "
                    f"{type(spec).__name__}, whose state it cannot move yet"
                )


def describe(
    vllm_config: Any,  # noqa: ANN401 - vllm.config.VllmConfig, not there for type checks
    kv_cache_config: KVCacheConfig,
    tensors: Mapping[str, torch.Tensor],
    model: str,
) -> list[LocalCache]:
    """Describe the tensors that `register_kv_caches` was given, group by group."""
    attention = vllm_config.compilation_config.static_forward_context
    found = []
    for group in kv_cache_config.transfer_group_ids:
        members: dict[_Geometry, dict[str, torch.Tensor]] = {}
        for layer, spec in layer_specs(kv_cache_config, group).items():
            if layer in tensors:
                tensor = _blocks(tensors[layer], layer, spec, kv_cache_config.num_blocks)
                geometry = _geometry(vllm_config, attention.get(layer), tensor, spec)
                members.setdefault(geometry, {})[layer] = tensor
        for number, (geometry, layers) in enumerate(members.items()):
            key = f"g{group}" if number == 0 else f"g{group}.{number}"
            scales = _scales(attention, layers, geometry)
            found.append(_make(vllm_config, key, group, geometry, layers, scales, model))
    return found


def _blocks(tensor: torch.Tensor, layer: str, spec: AttentionSpec, count: int) -> torch.Tensor:
    """Return the tensor's blocks; an allocator may have made more than there are."""
    if tensor.dim() != 4 or tensor.shape[2] != spec.block_size:
        raise NotImplementedError(
            f"layer {layer!r} has a KV tensor of shape {list(tensor.shape)}: expected [blocks, kv "
            f"heads, {spec.block_size} tokens, content]; a --block-size that the attention backend "
            "takes as it is will do"
        )
    return tensor[:count]


def _geometry(
    vllm_config: Any,  # noqa: ANN401
    layer: Any,  # noqa: ANN401
    tensor: torch.Tensor,
    spec: AttentionSpec,
) -> _Geometry:
    cache_dtype = vllm_config.cache_config.cache_dtype
    quantized = tensor.dtype == torch.uint8
    backend = "unknown" if layer is None else layer.get_attn_backend().get_name()
    return _Geometry(
        heads=tensor.shape[1],
        block_size=tensor.shape[2],
        content=tensor.shape[3],
        dtype=tensor.dtype,
        element=_FP8.get(cache_dtype, "uint8") if quantized else str(tensor.dtype)[6:],
        backend=backend,
        isa=str(getattr(layer, "isa", "")),
        window=getattr(spec, "sliding_window", None),
        latent=isinstance(spec, MLAAttentionSpec),
    )


def _scales(
    attention: Mapping[str, Any], layers: Mapping[str, torch.Tensor], geometry: _Geometry
) -> dict[str, tuple[float, float]]:
    if geometry.dtype != torch.uint8:
        return {}
    return {
        name: (float(attention[name]._k_scale_float), float(attention[name]._v_scale_float))
        for name in layers
        if name in attention
    }


def _heads(vllm_config: Any, geometry: _Geometry) -> tuple[int, int]:  # noqa: ANN401
    """Return which of the model's kv heads this rank holds."""
    if geometry.latent:
        return 0, 1
    parallel = vllm_config.parallel_config
    total, ranks = (
        vllm_config.model_config.get_total_num_kv_heads(),
        parallel.tensor_parallel_size,
    )
    rank = parallel.rank % ranks
    # With fewer heads than ranks, neighbours hold the same one.
    first = rank * geometry.heads if geometry.heads * ranks <= total else rank * total // ranks
    return first, first + geometry.heads


@functools.lru_cache
def _packing(
    isa: str, block_size: int, head_size: int, dtype: torch.dtype, stored: torch.dtype, kind: str
) -> Packing:
    from vllm import _custom_ops as ops

    def write(*tensors: torch.Tensor) -> None:
        ops.cpu_attn_reshape_and_cache(*tensors, isa, kv_cache_dtype=kind)

    return probe(write, block_size, head_size, dtype, stored)


def _make(
    vllm_config: Any,  # noqa: ANN401
    key: str,
    group: int,
    geometry: _Geometry,
    layers: dict[str, torch.Tensor],
    scales: dict[str, tuple[float, float]],
    model: str,
) -> LocalCache:
    heads = _heads(vllm_config, geometry)
    fields = {"element type": geometry.element, "window": str(geometry.window or "none")}
    packing = None
    if geometry.backend == "CPU_ATTN":
        packing = _packing(
            geometry.isa,
            geometry.block_size,
            geometry.content // 2,
            vllm_config.model_config.dtype,
            geometry.dtype,
            vllm_config.cache_config.cache_dtype,
        )
    if packing is not None and packing.planes is not None:
        cache = _strided(geometry, layers, packing, model, heads[0])
        unit = 1
        fields["planes"] = f"k {geometry.content // 2}, v {geometry.content // 2}"
    else:
        # Tokens of a block are interleaved: whole blocks are sent as they are.
        cache = _opaque(geometry, layers, model, heads[0])
        unit = geometry.block_size
        place = (
            packing.fingerprint if packing is not None else torch.backends.cpu.get_cpu_capability()
        )
        fields["packing"] = f"{geometry.backend} {geometry.isa} {place}"
        fields["block size"] = str(geometry.block_size)
        fields["content"] = str(geometry.content)
    info = CacheInfo(key, group, tuple(layers), heads, unit, fields, scales)
    return LocalCache(info, cache)


def _strided(
    geometry: _Geometry,
    layers: Mapping[str, torch.Tensor],
    packing: Packing,
    model: str,
    first_head: int,
) -> Cache:
    assert packing.planes is not None

    def views(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
        shape = (*tensor.shape[:3], geometry.content // 2)
        assert packing.planes is not None
        return tuple(
            tensor.as_strided(
                shape,
                (*tensor.stride()[:2], plane.token_stride, plane.content_stride),
                tensor.storage_offset() + plane.start,
            )
            for plane in packing.planes
        )

    return Cache(
        {name: views(tensor) for name, tensor in layers.items()},
        axes="BHNC",
        model=model,
        first_head=first_head,
        dtype=geometry.element,
    )


def _opaque(
    geometry: _Geometry, layers: Mapping[str, torch.Tensor], model: str, first_head: int
) -> Cache:
    elements = geometry.block_size * geometry.content
    itemsize = torch.empty((), dtype=geometry.dtype).element_size()
    pieces = 1
    while elements * itemsize // pieces > _MAX_ROW and elements % (2 * pieces) == 0:
        pieces *= 2

    def whole(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.stride()[2:] != (geometry.content, 1):
            raise NotImplementedError(
                f"backend {geometry.backend} has KV tensors with strides {tensor.stride()}: the "
                "tokens of a block must lie together to be sent as they are"
            )
        shape = (*tensor.shape[:2], 1, elements)
        return tensor.as_strided(shape, (*tensor.stride()[:2], elements, 1))

    return Cache(
        {name: whole(tensor) for name, tensor in layers.items()},
        axes="BHNC",
        planes=[f"block{piece}" for piece in range(pieces)],
        packed=True,
        model=model,
        first_head=first_head,
        dtype=geometry.element,
    )


def scratch(local: LocalCache, layer: str, head: int) -> Cache:
    """Return a cache of one token, layer and head: the least that can be fetched."""
    tensors = tuple(
        torch.zeros((1, 1, 1, content), dtype=getattr(torch, local.cache.layout.element))
        for _, content in local.cache.layout.planes
    )
    return Cache(
        {layer: tensors},
        axes="BHNC",
        planes=[name for name, _ in local.cache.layout.planes],
        model=local.cache.layout.model,
        first_head=head,
        dtype=local.cache.layout.element,
    )
