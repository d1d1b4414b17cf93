"""How attention backends on GPUs keep KV: told by backend, spec and layout, not by shapes."""

from __future__ import annotations

import ast
import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvxfer.errors import LayoutError

pytestmark = pytest.mark.filterwarnings("default")

BLOCKS, HEADS, TOKENS, LAYERS = 5, 3, 16, 2
PAIRS = ["FLASH_ATTN", "FLASHINFER", "TRITON_ATTN", "ROCM_AITER_UNIFIED_ATTN"]
LATENTS = ["FLASHMLA", "TRITON_MLA", "FLASHINFER_MLA", "ROCM_AITER_MLA", "AITER_TRITON_MLA"]


def spec_of(latent: bool = False, dtype: str = "bfloat16", **more: Any) -> Any:
    import torch
    from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec

    sizes = {"num_kv_heads": 1, "head_size": 40} if latent else {"num_kv_heads": HEADS}
    options = {"block_size": TOKENS, "head_size": 24, "dtype": getattr(torch, dtype), **sizes}
    return (MLAAttentionSpec if latent else FullAttentionSpec)(**{**options, **more})


class Model:
    """Layers in one allocation, as vLLM makes them; `memory` is its own idea of where all lies."""

    def __init__(
        self,
        layout: str = "LBNHC",
        backend: str = "FLASH_ATTN",
        spec: Any = None,
        cache_dtype: str = "auto",
        scales: Any = 1.0,
    ) -> None:
        import torch
        from rig.gpu import CudaTensor
        from vllm.v1.kv_cache_interface import KVCacheTensor, create_kv_cache_views
        from vllm.v1.kv_cache_layout import KVCacheLayout

        self.spec, self.layout = spec or spec_of(), layout
        names = [f"model.layers.{number}.attn" for number in range(LAYERS)]
        heads, size = self.spec.num_heads, self.spec.state_content_size_bytes
        extents = {"L": LAYERS, "B": BLOCKS, "H": heads, "N": TOKENS, "C": size}
        self.memory = np.zeros([extents[axis] for axis in layout], np.uint8)
        strides = dict(zip(layout, self.memory.strides, strict=True))
        where = KVCacheTensor(
            size=self.memory.nbytes,
            layers=names,
            offset=0,
            layer_stride=strides["L"],
            block_stride=strides["B"],
        )
        raw = torch.from_numpy(self.memory.reshape(-1)).view(torch.int8).as_subclass(CudaTensor)
        views = create_kv_cache_views(raw, self.spec, BLOCKS, KVCacheLayout[layout], where)
        self.tensors = dict(zip(names, views, strict=True))
        layer = SimpleNamespace(
            get_attn_backend=lambda: SimpleNamespace(get_name=lambda: backend),
            _k_scale=torch.tensor(scales),
            _k_scale_float=0.5,
            _v_scale_float=0.25,
        )
        model = SimpleNamespace(get_total_num_kv_heads=lambda: heads)
        self.config: Any = SimpleNamespace(
            compilation_config=SimpleNamespace(static_forward_context=dict.fromkeys(names, layer)),
            cache_config=SimpleNamespace(cache_dtype=cache_dtype),
            parallel_config=SimpleNamespace(tensor_parallel_size=1, rank=0),
            model_config=model,
        )
        group = SimpleNamespace(kv_cache_spec=self.spec, layer_names=names)
        self.kv_cache: Any = SimpleNamespace(
            transfer_group_ids=(0,),
            kv_cache_groups=[group],
            num_blocks=BLOCKS,
            kv_cache_layout=layout,
        )

    def describe(self) -> Any:
        from kvxfer.integrations.vllm_connector.caches import describe

        (found,) = describe(self.config, self.kv_cache, self.tensors, "model")
        return found


@pytest.mark.parametrize("layout", ["LBNHC", "LBHNC", "LHBNC", "BLHNC", "BLNHC", "BHLNC"])
@pytest.mark.parametrize("backend", [*PAIRS, *LATENTS])
def test_elements_are_where_numpy_finds_them(fake: Any, backend: str, layout: str) -> None:
    latent = backend in LATENTS
    model = Model(layout, backend, spec_of(latent))
    model.memory[:] = np.random.default_rng(3).integers(0, 256, model.memory.shape, np.uint8)
    elements = model.memory.view(np.uint16)
    wanted = elements.transpose([layout.index(axis) for axis in "LBHNC"])
    local = model.describe()
    core = local.cache.layout
    sizes = {"kv": 40} if latent else {"k": 24, "v": 24}
    assert dict(core.planes) == sizes
    assert (core.element, core.num_blocks, core.block_size) == ("bfloat16", BLOCKS, TOKENS)
    assert local.info.unit == 1
    begin = model.memory.ctypes.data
    views = iter(core.views)
    for layer in range(LAYERS):
        at = 0
        for size in sizes.values():
            address, *strides = next(views)
            found = np.lib.stride_tricks.as_strided(
                elements.reshape(-1)[(address - begin) // 2 :],
                (BLOCKS, wanted.shape[2], TOKENS, size),
                strides,
            )
            assert np.array_equal(found, wanted[layer, ..., at : at + size])
            at += size


@pytest.mark.parametrize("fnuz", [False, True])
@pytest.mark.parametrize("latent", [False, True])
def test_bytes_of_fp8_are_named(fake: Any, monkeypatch: Any, latent: bool, fnuz: bool) -> None:
    from vllm.platforms import current_platform

    monkeypatch.setattr(current_platform, "is_fp8_fnuz", lambda: fnuz)
    backend = "ROCM_AITER_MLA" if latent else "TRITON_ATTN"
    model = Model("LBHNC", backend, spec_of(latent, "uint8"), cache_dtype="fp8")
    local = model.describe()
    name = "float8_e4m3fnuz" if fnuz else "float8_e4m3fn"
    assert (local.cache.layout.element, local.info.fields["element type"]) == (name, name)
    assert local.cache.layout.scales == ([0.5] if latent else [0.5, 0.25]) * LAYERS


@pytest.mark.parametrize("fnuz", [False, True])
@pytest.mark.parametrize("backend", [*PAIRS, "ROCM_AITER_MLA"])
def test_what_backends_keep_under_the_name_e5m2(
    fake: Any, monkeypatch: Any, backend: str, fnuz: bool
) -> None:
    """Triton's kernels do not look at the name: they store and read e4m3."""
    from vllm.platforms import current_platform

    monkeypatch.setattr(current_platform, "is_fp8_fnuz", lambda: fnuz)
    spec = spec_of(backend == "ROCM_AITER_MLA", "uint8")
    model = Model("LBHNC", backend, spec, cache_dtype="fp8_e5m2")
    wanted = {("FLASHINFER", False): "float8_e5m2"}
    wanted["TRITON_ATTN", fnuz] = "float8_e4m3fnuz" if fnuz else "float8_e4m3fn"
    if (backend, fnuz) in wanted:
        assert model.describe().cache.layout.element == wanted[backend, fnuz]
    else:
        with pytest.raises(LayoutError, match="not known; those of fp8 and fp8_e4m3 are"):
            model.describe()


def test_names_of_backends_are_those_they_give_themselves(fake: Any) -> None:
    """Read from their sources: few of them can be imported without a GPU."""
    import vllm.v1.attention

    from kvxfer.integrations.vllm_connector import caches

    sources = Path(vllm.v1.attention.__file__).parent.glob("backends/**/*.py")
    functions = [
        node
        for source in sources
        for node in ast.walk(ast.parse(source.read_text()))
        if isinstance(node, ast.FunctionDef) and node.name == "get_name"
    ]
    names = {
        node.value.value
        for function in functions
        for node in ast.walk(function)
        if isinstance(node, ast.Return) and isinstance(node.value, ast.Constant)
    }
    assert not (caches._PAIRS | caches._LATENTS) - names


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (
            {"backend": "ROCM_ATTN"},
            "attention backend ROCM_ATTN keeps KV is not known; FLASHINFER, ",
        ),
        ({"backend": "FLASHMLA"}, "backend FLASHMLA keeps KV is not known"),
        (
            {"backend": "FLASHMLA_SPARSE", "spec": "latent"},
            "FLASHMLA_SPARSE .*not known; AITER_TRITON_MLA, ",
        ),
        ({"spec": "shuffled"}, "FLASH_ATTN packs KV in a way of its own .*: 2 x 48 elements"),
        ({"spec": "with scales"}, "packs KV in a way of its own .* 56 elements"),
        ({"spec": "bytes", "cache_dtype": "nvfp4"}, "bytes of this --kv-cache-dtype are not known"),
        ({"spec": "bytes", "cache_dtype": "fp8", "scales": [0.5, 0.5]}, "scales .* single heads"),
    ],
)
def test_what_is_not_known_is_refused(fake: Any, change: dict[str, Any], reason: str) -> None:
    specs = {
        "latent": lambda: spec_of(True),
        # Of the same shape as two heads of K and V.
        "shuffled": lambda: spec_of(num_kv_heads=2, num_head_slots=2, state_content_bytes=96),
        "with scales": lambda: spec_of(dtype="int8", state_content_bytes=56),
        "bytes": lambda: spec_of(dtype="uint8"),
    }
    change = dict(change)
    if "spec" in change:
        change["spec"] = specs[change["spec"]]()
    with pytest.raises(LayoutError, match=reason) as refused:
        Model(**change).describe()
    assert "model.layers.0.attn" in str(refused.value)


def test_strides_and_layout_must_agree(fake: Any) -> None:
    model = Model("LBNHC")
    for declared in ("LBHNC", None):  # as many heads as tokens, and nobody would see it
        model.kv_cache.kv_cache_layout = declared
        with pytest.raises(LayoutError, match=f"do not have the layout {declared}"):
            model.describe()
    model.kv_cache.kv_cache_layout = "BLNHC"  # one layer's strides are in the same order
    model.describe()


@pytest.mark.parametrize("change", [{"block_size": 2 * TOKENS}, {"num_kv_heads": HEADS - 1}])
def test_tensors_that_are_not_as_their_spec_says(fake: Any, change: dict[str, int]) -> None:
    model = Model("LBNHC")
    (group,) = model.kv_cache.kv_cache_groups
    group.kv_cache_spec = dataclasses.replace(model.spec, **change)
    with pytest.raises(LayoutError, match=r"attn' has a KV tensor of shape .*--block-size"):
        model.describe()
