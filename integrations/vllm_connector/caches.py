"""Describes an engine's KV tensors as kvxfer caches."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import MLAAttentionSpec
from vllm.v1.kv_cache_layout import KVCacheLayout

from kvxfer.cache import Cache
from kvxfer.errors import LayoutError

from .compat import layer_specs
from .messages import CacheInfo
from .packing import Packing, probe

# Rows travel whole within a chunk; the smallest chunks are of this size.
_MAX_ROW = 64 << 10
_FP8 = {"fp8": "float8_e4m3fn", "fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2"}
_FNUZ = {"fp8": "float8_e4m3fnuz", "fp8_e4m3": "float8_e4m3fnuz"}  # gfx942's; it has no e5m2
# What backends on GPUs keep of a token: for each kv head K and then V, or one latent vector.
_PAIRS = {"FLASH_ATTN", "FLASHINFER", "TRITON_ATTN", "ROCM_AITER_UNIFIED_ATTN"}
_LATENTS = {
    *("FLASHMLA", "FLASH_ATTN_MLA", "FLASHINFER_MLA", "CUTLASS_MLA", "TRITON_MLA"),
    *("ROCM_AITER_MLA", "AITER_TRITON_MLA"),
}


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
    planes: tuple[tuple[str, int], ...]
    """What the model has in the content of one token and head, with the number of elements."""
    dtype: torch.dtype
    element: str
    backend: str
    isa: str
    window: int | None
    latent: bool
    on_gpu: bool


def describe(
    vllm_config: Any, kv_cache_config: Any, tensors: Mapping[str, torch.Tensor], model: str
) -> list[LocalCache]:
    """Describe the tensors that `register_kv_caches` was given, group by group.

    Raises
    ------
    LayoutError
        Tensors of a shape or order that is not known here; names the layer.
    """
    attention = vllm_config.compilation_config.static_forward_context
    found = []
    for group in kv_cache_config.transfer_group_ids:
        members: dict[_Geometry, dict[str, torch.Tensor]] = {}
        for layer, spec in layer_specs(kv_cache_config, group).items():
            if layer in tensors:
                tensor = _blocks(tensors[layer], layer, spec, kv_cache_config.num_blocks)
                geometry = _geometry(vllm_config, attention.get(layer), tensor, spec)
                if geometry.on_gpu:
                    reason = _unknown(geometry, attention.get(layer), spec)
                    reason = reason or _disorder(tensor, kv_cache_config.kv_cache_layout)
                    if reason is not None:
                        raise LayoutError(f"layer {layer!r} on {tensor.device}: {reason}")
                members.setdefault(geometry, {})[layer] = tensor
        for number, (geometry, layers) in enumerate(members.items()):
            key = f"g{group}" if number == 0 else f"g{group}.{number}"
            scales = _scales(attention, layers, geometry)
            found.append(_make(vllm_config, key, group, geometry, layers, scales, model))
    return found


def _blocks(tensor: torch.Tensor, layer: str, spec: Any, count: int) -> torch.Tensor:
    """Return the tensor's blocks; an allocator may have made more than there are."""
    if tensor.dim() != 4 or tensor.shape[1:3] != (spec.num_heads, spec.block_size):
        raise LayoutError(
            f"layer {layer!r} has a KV tensor of shape {list(tensor.shape)}: expected [blocks, "
            f"{spec.num_heads} kv heads, {spec.block_size} tokens, content]; a --block-size that "
            "the attention backend takes as it is will do"
        )
    return tensor[:count]


def _geometry(vllm_config: Any, layer: Any, tensor: torch.Tensor, spec: Any) -> _Geometry:
    on_gpu, latent = tensor.device.type != "cpu", isinstance(spec, MLAAttentionSpec)
    element = str(tensor.dtype).removeprefix("torch.")
    backend = "unknown" if layer is None else layer.get_attn_backend().get_name()
    if tensor.dtype == torch.uint8:
        names = _FNUZ if on_gpu and current_platform.is_fp8_fnuz() else _FP8
        kind = vllm_config.cache_config.cache_dtype
        if on_gpu and kind == "fp8_e5m2" and backend != "FLASHINFER":
            # Triton's kernels store e4m3 under this name too; what others store is not known.
            kind = "fp8_e4m3" if backend == "TRITON_ATTN" else ""
        element = names.get(kind, element)
    sizes = {"kv": spec.head_size} if latent else {"k": spec.head_size, "v": spec.head_size_v}
    return _Geometry(
        heads=tensor.shape[1],
        block_size=tensor.shape[2],
        content=tensor.shape[3],
        planes=tuple(sizes.items()),
        dtype=tensor.dtype,
        element=element,
        backend=backend,
        isa=str(getattr(layer, "isa", "")),
        window=getattr(spec, "sliding_window", None),
        latent=latent,
        on_gpu=on_gpu,
    )


def _unknown(geometry: _Geometry, layer: Any, spec: Any) -> str | None:
    """Say why it is not known what a GPU's blocks hold: shapes alone do not tell."""
    known = _LATENTS if geometry.latent else _PAIRS
    if geometry.backend not in known:
        names = ", ".join(sorted(known))
        return f"how the attention backend {geometry.backend} keeps KV is not known; {names} are"
    sizes = [size for _, size in geometry.planes]
    own = spec.num_head_slots, spec.state_content_bytes
    if own != (None, None) or sum(sizes) != geometry.content:
        return (
            f"{geometry.backend} packs KV in a way of its own (AITER's shuffled blocks, or scales "
            f"beside the elements): {geometry.heads} x {geometry.content} elements of "
            f"{geometry.element} a token, where the model has {spec.num_kv_heads} kv heads of "
            f"{' + '.join(map(str, sizes))}"
        )
    if geometry.element == "uint8":
        return (
            "the bytes of this --kv-cache-dtype are not known; those of fp8 and fp8_e4m3 are, and "
            "of fp8_e5m2 TRITON_ATTN's, and FLASHINFER's but on gfx942"
        )
    if geometry.element.startswith("float8") and layer._k_scale.numel() > 1:  # noqa: SLF001
        return "its scales of K and V are of single heads; scales of whole layers are known"
    return None


def _disorder(tensor: torch.Tensor, layout: str | None) -> str | None:
    """Say in what a tensor's strides are not of the layout that vLLM has settled on."""
    order = KVCacheLayout[layout].layer_view_order if layout is not None else ()
    strides = [tensor.stride(axis) for axis in order if tensor.shape[axis] > 1]
    if order and strides == sorted(strides, reverse=True):
        return None
    return f"KV tensors with strides {tensor.stride()} do not have the layout {layout}"


def _scales(
    attention: Mapping[str, Any], layers: Mapping[str, torch.Tensor], geometry: _Geometry
) -> dict[str, tuple[float, float]] | None:
    """Return what stored K and V are multiplied by, where the cache is quantized."""
    if not geometry.element.startswith("float8"):
        return None
    return {
        name: (float(attention[name]._k_scale_float), float(attention[name]._v_scale_float))  # noqa: SLF001
        if name in attention
        else (1.0, 1.0)
        for name in layers
    }


def _heads(vllm_config: Any, geometry: _Geometry) -> tuple[int, int]:
    """Return which of the model's kv heads this rank holds."""
    if geometry.latent:
        return 0, 1
    ranks = vllm_config.parallel_config.tensor_parallel_size
    total = vllm_config.model_config.get_total_num_kv_heads()
    rank = vllm_config.parallel_config.rank % ranks
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
    vllm_config: Any,
    key: str,
    group: int,
    geometry: _Geometry,
    layers: dict[str, torch.Tensor],
    scales: dict[str, tuple[float, float]] | None,
    model: str,
) -> LocalCache:
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
    heads = _heads(vllm_config, geometry)
    fields = {"window": str(geometry.window or "none")}
    known: dict[str, Any] = {"model": model, "first_head": heads[0], "dtype": geometry.element}
    if geometry.on_gpu or (packing is not None and packing.planes is not None):
        unit = 1
        fields["element type"] = geometry.element
        fields["planes"] = ", ".join(f"{name} {size}" for name, size in geometry.planes)
        if scales is not None:
            known["scales"] = [scales[name][: len(geometry.planes)] for name in layers]
        if packing is not None:
            cache = Cache({name: _planes(each, packing) for name, each in layers.items()}, **known)
        else:
            names, sizes = zip(*geometry.planes, strict=True)
            cache = Cache(layers, planes=names, packed=sizes, **known)
    else:
        # Tokens of a block are interleaved: whole blocks are sent as they are.
        unit = geometry.block_size
        place = packing.fingerprint if packing else torch.backends.cpu.get_cpu_capability()
        fields["block size"] = str(geometry.block_size)
        fields["packing"] = (
            f"{geometry.backend} {geometry.isa} {place}, {geometry.content} elements of "
            f"{geometry.element} a token"
        )
        for name, (k, v) in (scales or {}).items():
            fields[f"scales of {name}"] = f"k {k!r}, v {v!r}"
        pieces = _pieces(geometry)
        blocks = {name: _whole(tensor, name, geometry) for name, tensor in layers.items()}
        cache = Cache(blocks, planes=pieces, packed=True, **known)
    info = CacheInfo(key, group, tuple(layers), heads, unit, geometry.window, fields)
    return LocalCache(info, cache)


def _planes(tensor: torch.Tensor, packing: Packing) -> tuple[torch.Tensor, ...]:
    assert packing.planes is not None
    return tuple(
        tensor.as_strided(
            (*tensor.shape[:3], tensor.shape[3] // 2),
            (*tensor.stride()[:2], plane.token_stride, plane.content_stride),
            tensor.storage_offset() + plane.start,
        )
        for plane in packing.planes
    )


def _pieces(geometry: _Geometry) -> list[str]:
    """Return the planes that a whole block is cut into, to be short enough for a chunk."""
    elements = geometry.block_size * geometry.content
    pieces = 1
    while elements * geometry.dtype.itemsize // pieces > _MAX_ROW and elements % (2 * pieces) == 0:
        pieces *= 2
    return [f"block{piece}" for piece in range(pieces)]


def _whole(tensor: torch.Tensor, layer: str, geometry: _Geometry) -> torch.Tensor:
    if tensor.stride()[2:] != (geometry.content, 1):
        raise LayoutError(
            f"layer {layer!r}: backend {geometry.backend} has KV tensors with strides "
            f"{tensor.stride()}: the tokens of a block must lie together to be sent as they are"
        )
    elements = geometry.block_size * geometry.content
    shape = (*tensor.shape[:2], 1, elements)
    return tensor.as_strided(shape, (*tensor.stride()[:2], elements, 1))
