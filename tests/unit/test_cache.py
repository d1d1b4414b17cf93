"""kvxfer.Cache: what it reads from tensors and what it refuses."""

from __future__ import annotations

import ctypes
import gc
import weakref

import numpy as np
import pytest

import kvxfer
from kvxfer import _core


def address(array: np.ndarray) -> int:
    return array.__array_interface__["data"][0]


def kv(*shape: int, dtype: object = np.float16) -> tuple[np.ndarray, np.ndarray]:
    return np.zeros(shape, dtype), np.zeros(shape, dtype)


class TorchLike:
    """The part of a torch tensor that kvxfer uses."""

    def __init__(self, array: np.ndarray, dtype: str = "torch.bfloat16", device: str = "cpu"):
        self.array = array
        self.shape = array.shape
        self.dtype = type("dtype", (), {"__str__": lambda _: dtype})()
        self.device = type("device", (), {"type": device, "__str__": lambda _: f"{device}:0"})()

    def data_ptr(self) -> int:
        return address(self.array)

    def element_size(self) -> int:
        return self.array.itemsize

    def stride(self) -> tuple[int, ...]:
        return tuple(stride // self.array.itemsize for stride in self.array.strides)


class CudaArrayLike:
    """Only the interface that does not say which GPU it is."""

    def __init__(self, array: np.ndarray):
        self.array = array
        self.__cuda_array_interface__ = {**array.__array_interface__, "version": 3}


class DlpackLike:
    """Only DLPack, as jax arrays have it."""

    def __init__(
        self, array: np.ndarray, device: tuple[int, int] = (1, 0), *, versioned: bool = True
    ):
        self.array = array
        self.device = device
        self.versioned = versioned

    @property
    def __cuda_array_interface__(self) -> dict[str, object]:
        raise AttributeError("not on a GPU of NVIDIA")

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device

    def __dlpack__(self, **options: object) -> object:
        on_gpu = self.device[0] in (2, 10)
        assert options.pop("stream", None) == (-1 if on_gpu else None)  # nothing to wait for
        if not self.versioned and options:
            raise TypeError("unexpected keyword argument")
        if not self.versioned:
            return self.array.__dlpack__()
        return self.array.__dlpack__(**options)


class InterfaceOnly:
    """Only the array interface."""

    def __init__(self, array: np.ndarray, **changes: object):
        self.__array_interface__ = {**array.__array_interface__, **changes}
        self.owner = array


def test_separate_k_and_v():
    k, v = kv(10, 4, 16, 32)
    cache = kvxfer.Cache({"layer.0": (k, v)}, axes="BHNC", model="m", first_head=8)
    layout = cache.layout
    assert (layout.num_blocks, layout.num_heads, layout.block_size) == (10, 4, 16)
    assert layout.planes == [("k", 32), ("v", 32)]
    assert layout.layers == ["layer.0"]
    assert (layout.element, layout.model, layout.first_head) == ("float16", "m", 8)
    assert layout.views == [(address(array), *array.strides) for array in (k, v)]
    assert layout.token_bytes() == 2 * 4 * 32 * 2
    assert cache.writable
    assert repr(cache) == (
        "<kvxfer.Cache: 1 layers, planes k of 32, v of 32, kv heads 8 to 11, 10 blocks of 16 "
        "tokens, float16, 512 bytes a token, in memory BHNC>"
    )


def test_axes_in_any_order_with_any_strides():
    store = np.zeros((16, 12, 40, 6), np.float32)
    k = store[:, 1:9, ::2, :4]  # N B C H
    cache = kvxfer.Cache({"a": k}, axes="NBCH")
    layout = cache.layout
    assert (layout.num_blocks, layout.num_heads, layout.block_size) == (8, 4, 16)
    assert layout.planes == [("kv", 20)]
    n, b, c, h = k.strides
    assert layout.views == [(address(k), b, h, n, c)]
    assert "in memory NBCH" in repr(cache)


@pytest.mark.parametrize("axes", ["PBNHC", "BPNHC", "BNHCP"])
def test_plane_axis(axes):
    sizes = {"P": 2, "B": 5, "N": 4, "H": 3, "C": 8}
    store = np.zeros([sizes[axis] for axis in axes], np.float16)
    layout = kvxfer.Cache({"a": store}, axes=axes).layout
    first = address(store)
    assert [name for name, _ in layout.planes] == ["k", "v"]
    assert [view[0] - first for view in layout.views] == [0, store.strides[axes.index("P")]]


def test_packed_in_halves_and_in_parts():
    store = np.zeros((5, 4, 3, 24), np.float16)
    halves = kvxfer.Cache({"a": store}, axes="BNHC", packed=True).layout
    assert halves.planes == [("k", 12), ("v", 12)]
    assert [view[0] - address(store) for view in halves.views] == [0, 24]
    parts = kvxfer.Cache({"a": store}, axes="BNHC", packed=(16, 8)).layout
    assert parts.planes == [("k", 16), ("v", 8)]
    assert [view[0] - address(store) for view in parts.views] == [0, 32]
    thirds = kvxfer.Cache({"a": store}, axes="BNHC", packed=True, planes=("q", "k", "v")).layout
    assert thirds.planes == [("q", 8), ("k", 8), ("v", 8)]


def test_mla_has_one_plane_and_one_head():
    store = np.zeros((6, 64, 576), np.uint16)
    layout = kvxfer.Cache({"a": store}, axes="BNC", dtype="bfloat16", planes=["latent"]).layout
    assert layout.planes == [("latent", 576)]
    assert (layout.num_heads, layout.block_size, layout.element) == (1, 64, "bfloat16")


def test_planes_of_other_content():
    k, v = np.zeros((4, 2, 8, 192), np.float16), np.zeros((4, 2, 8, 128), np.float16)
    assert kvxfer.Cache({"a": (k, v)}).layout.planes == [("k", 192), ("v", 128)]


def test_cross_layer_tensor_as_views():
    store = np.zeros((4, 3, 2, 16, 2, 8), np.float16)  # B L P N H C
    tensors = {f"layer.{index}": store[:, index] for index in range(3)}
    layout = kvxfer.Cache(tensors, axes="BPNHC").layout
    assert layout.layers == ["layer.0", "layer.1", "layer.2"]
    assert layout.views[2][0] - layout.views[0][0] == store.strides[1]
    layout.validate()


@pytest.mark.parametrize(
    ("storage", "dtype", "element"),
    [
        (np.float32, None, "float32"),
        (np.float16, None, "float16"),
        (np.uint8, None, "uint8"),
        (np.uint16, "bfloat16", "bfloat16"),
        (np.uint8, "float8_e4m3fn", "float8_e4m3fn"),
        (np.int8, "float8_e5m2fnuz", "float8_e5m2fnuz"),
        (np.uint16, np.float16, "float16"),
        (np.uint16, np.dtype(np.float16), "float16"),
    ],
)
def test_element_types(storage, dtype, element):
    cache = kvxfer.Cache({"a": kv(2, 2, 2, 2, dtype=storage)}, dtype=dtype)
    assert cache.layout.element == element


@pytest.mark.parametrize(
    "name", ["bfloat16", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz"]
)
def test_ml_dtypes(name):
    ml_dtypes = pytest.importorskip("ml_dtypes")
    dtype = np.dtype(getattr(ml_dtypes, name))
    assert kvxfer.Cache({"a": kv(2, 2, 2, 2, dtype=dtype)}).layout.element == name


def test_torch_tensors():
    torch = pytest.importorskip("torch")
    store = torch.zeros((2, 6, 16, 4, 8), dtype=torch.bfloat16)
    cache = kvxfer.Cache({"a": store}, axes="PBNHC")
    assert cache.layout.element == "bfloat16"
    assert cache.layout.views[1][0] - store.data_ptr() == store.stride(0) * 2
    eight_bits = torch.zeros((6, 16, 8), dtype=torch.float8_e4m3fn)
    assert kvxfer.Cache({"a": eight_bits}, axes="BNC").layout.element == "float8_e4m3fn"
    as_dtype = kvxfer.Cache({"a": eight_bits.view(torch.uint8)}, "BNC", dtype=torch.float8_e5m2)
    assert as_dtype.layout.element == "float8_e5m2"
    with pytest.raises(kvxfer.LayoutError, match="memory of meta"):
        kvxfer.Cache({"a": eight_bits.to("meta")}, axes="BNC")


def test_duck_typed_torch_tensor():
    array = np.zeros((3, 2, 4, 8), np.uint16)
    layout = kvxfer.Cache({"a": TorchLike(array)}).layout
    assert layout.element == "bfloat16"
    assert layout.views == [(address(array), *array.strides)]
    with pytest.raises(kvxfer.LayoutError, match="layer 'a': it lies in the memory of xpu:0"):
        kvxfer.Cache({"a": TorchLike(array, device="xpu")})
    on_gpu = kvxfer.Cache({"a": TorchLike(array, device="cuda")})
    assert on_gpu.on_gpu
    assert repr(on_gpu).endswith("in memory BHNC of a GPU>")


@pytest.mark.parametrize("versioned", [True, False])
def test_dlpack(versioned):
    array = np.zeros((3, 2, 4, 9), np.float16)[..., :8]
    layout = kvxfer.Cache({"a": DlpackLike(array, versioned=versioned)}).layout
    assert layout.element == "float16"
    assert layout.views == [(address(array), *array.strides)]


@pytest.mark.parametrize(
    ("device", "name"), [((8, 1), "metal:1"), ((14, 0), "oneapi:0"), ((99, 3), "99:3")]
)
def test_dlpack_of_another_device_is_refused(device, name):
    with pytest.raises(kvxfer.LayoutError, match=f"layer 'a': it lies in the memory of .*{name}"):
        kvxfer.Cache({"a": DlpackLike(np.zeros((3, 2, 4, 8), np.float16), device)})


@pytest.mark.parametrize("versioned", [True, False])
def test_dlpack_of_a_gpu(versioned):
    array = np.zeros((3, 2, 4, 8), np.float16)
    cache = kvxfer.Cache({"a": DlpackLike(array, (10, 1), versioned=versioned)})
    assert cache.on_gpu
    assert cache.layout.views == [(address(array), *array.strides)]


def test_a_cache_lies_on_one_device():
    array = np.zeros((3, 2, 4, 8), np.float16)
    tensors = DlpackLike(array, (2, 0)), DlpackLike(array.copy(), (2, 1))
    with pytest.raises(kvxfer.LayoutError, match="lie on cuda:0, cuda:1: .* on one device"):
        kvxfer.Cache({"a": tensors})
    with pytest.raises(kvxfer.LayoutError, match="lie on cuda:1, the CPU"):
        kvxfer.Cache({"a": (tensors[1], array)})
    # Names of one GPU in several libraries: registering it looks closer.
    torch = TorchLike(np.zeros((3, 2, 4, 8), np.uint16), device="cuda")
    named = DlpackLike(array.copy(), (10, 0))
    for other in (named, CudaArrayLike(array.copy())):
        assert kvxfer.Cache({"a": (torch, other)}, dtype="bfloat16").on_gpu
    with pytest.raises(kvxfer.LayoutError, match="lie on cuda, the CPU"):
        kvxfer.Cache({"a": (CudaArrayLike(array.copy()), array)})


def test_dlpack_capsules_are_used_once_and_released():
    array = np.zeros((3, 2, 4, 8), np.float16)
    capsule = array.__dlpack__()
    alive = weakref.ref(array)
    tensor = _core.DlpackTensor(capsule)
    assert (tensor.dtype, tensor.itemsize, tensor.device) == ("float16", 2, (1, 0))
    with pytest.raises(kvxfer.InvalidError, match="nobody has used yet"):
        _core.DlpackTensor(capsule)
    del array, capsule
    gc.collect()
    assert alive() is not None
    del tensor
    gc.collect()
    assert alive() is None
    other = ctypes.pythonapi.PyCapsule_New
    other.restype, other.argtypes = (
        ctypes.py_object,
        [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p],
    )
    with pytest.raises(kvxfer.InvalidError, match="expected a DLPack capsule"):
        _core.DlpackTensor(other(address(np.zeros(8)), None, None))


def test_array_interface():
    array = np.zeros((3, 2, 4, 8), np.float32)
    layout = kvxfer.Cache({"a": InterfaceOnly(array, strides=None)}).layout
    assert layout.element == "float32"
    assert layout.views == [(address(array), *array.strides)]
    with pytest.raises(kvxfer.LayoutError, match="big-endian"):
        kvxfer.Cache({"a": array.astype(">f4")})


def test_read_only_tensors_make_a_read_only_cache():
    k, v = kv(3, 2, 4, 8)
    v.flags.writeable = False
    cache = kvxfer.Cache({"a": (k, v)})
    assert not cache.writable
    assert repr(cache).endswith("in memory BHNC, read-only>")


def test_the_cache_keeps_its_tensors_alive():
    k, v = kv(3, 2, 4, 8)
    alive = weakref.ref(k)
    cache = kvxfer.Cache({"a": (k, DlpackLike(v))})
    del k, v
    gc.collect()
    assert alive() is not None
    del cache
    gc.collect()
    assert alive() is None


def test_caches_are_compared_by_identity():
    pair = kv(3, 2, 4, 8)
    one, other = kvxfer.Cache({"a": pair}), kvxfer.Cache({"a": pair})
    assert one != other
    assert len({one: 1, other: 2}) == 2


GOOD = kv(4, 2, 8, 16)


def shaped(*shape: int) -> np.ndarray:
    return np.zeros(shape, np.float16)


@pytest.mark.parametrize(
    ("tensors", "options", "message"),
    [
        ({}, {}, "no tensors were given"),
        ({"a": ()}, {}, "layer 'a': no tensors were given"),
        ({"a": GOOD}, {"axes": "BHNX"}, r"axes 'BHNX': 'X' is not an axis; there are P plane, B"),
        ({"a": GOOD}, {"axes": "BHNN"}, r"axes 'BHNN': N \(token\) is there twice"),
        ({"a": GOOD}, {"axes": "BHN"}, r"axes 'BHN': C \(content\) is missing"),
        (
            {"a": GOOD},
            {"axes": "BNC"},
            r"layer 'a', tensor 0: its shape \[4, 2, 8, 16\] has 4 axes",
        ),
        ({"a": GOOD}, {"axes": "PBNHC"}, "layer 'a': 2 tensors were given, but axes has P"),
        ({"a": GOOD}, {"packed": True}, "layer 'a': 2 tensors were given, but packed is set"),
        ({"a": shaped(2, 4, 8, 2, 16)}, {"axes": "PBNHC", "packed": True}, "can only be in one"),
        (
            {"a": shaped(3, 4, 8, 2, 16)},
            {"axes": "PBNHC"},
            r"axis P \(plane\) has 3 elements, not 2",
        ),
        ({"a": shaped(4, 8, 2, 15)}, {"packed": True}, "15 elements, which are not 2 equal parts"),
        ({"a": shaped(4, 8, 2, 15)}, {"packed": (8, 8)}, r"packed=\(8, 8\) doesn't add up"),
        ({"a": shaped(4, 8, 2, 15)}, {"packed": (15, 0)}, r"packed=\(15, 0\) doesn't add up"),
        ({"a": shaped(4, 8, 2, 15)}, {"packed": ()}, r"packed=\(\) doesn't add up"),
        ({"a": GOOD}, {"planes": ["k"]}, "layer 'a': it has 2 planes, but planes names 1: k"),
        ({"a": (*GOOD, shaped(4, 2, 8, 16))}, {}, "layer 'a': it has 3 planes; name them"),
        ({"a": GOOD}, {"planes": ["k", "k"]}, 'plane "k" is named twice'),
        ({"a": GOOD}, {"first_head": -1}, "first_head is -1"),
        ({"a": shaped(4, 0, 8, 16)}, {}, r"layer 'a': its axis H \(kv head\) has no elements"),
        (
            {"a": (shaped(4, 2, 8, 16), shaped(4, 3, 8, 16))},
            {},
            r"layer 'a', tensor 1 does not fit tensor 0: its axis H \(kv head\) is 3, not 2",
        ),
        (
            {"a": GOOD, "b": kv(4, 2, 16, 16)},
            {},
            r"layer 'b' differs from layer 'a': its axis N \(token\) is 16, not 8",
        ),
        ({"a": GOOD, "b": kv(5, 2, 8, 16)}, {}, r"axis B \(block\) is 5, not 4"),
        ({"a": GOOD, "b": kv(4, 2, 8, 32)}, {}, r"axis C \(content\) is 32\+32, not 16\+16"),
        ({"a": GOOD, "b": shaped(4, 2, 8, 16)}, {}, r"axis P \(plane\) is 1, not 2"),
        (
            {"a": GOOD, "b": kv(4, 2, 8, 16, dtype=np.float32)},
            {},
            "its elements are float32, not float16",
        ),
        (
            {"a": kv(4, 2, 8, 16, dtype=np.uint16)},
            {},
            '"uint16" is not supported; .* say so: dtype=',
        ),
        ({"a": GOOD}, {"dtype": "int4"}, "layer 'a', tensor 0: element type \"int4\" is not"),
        (
            {"a": GOOD},
            {"dtype": "float8_e4m3fn"},
            "has 1 bytes an element, the tensor's float16 has 2",
        ),
        ({"a": "text"}, {}, "layer 'a': expected a tensor .* found str"),
        ({1: GOOD}, {}, "layer 1: layers are named by strings"),
        ({"": GOOD}, {}, "empty name"),
        (
            {"a": shaped(4, 2, 8, 16)[::-1]},
            {},
            'layer "a", plane "kv": the stride of the block axis is -512 bytes; strides must be',
        ),
        (
            {"a": np.lib.stride_tricks.as_strided(shaped(4000), (4, 2, 8, 16), (512, 256, 0, 2))},
            {},
            "stride of the token axis is 0 bytes",
        ),
        (
            {"a": np.lib.stride_tricks.as_strided(shaped(4000), (4, 2, 8, 16), (512, 256, 30, 2))},
            {},
            "stride of the token axis is 30 bytes, less than the 32 bytes that its content spans",
        ),
        ({"a": (GOOD[0], GOOD[0])}, {}, 'plane "k" and layer "a", plane "v" share memory'),
        ({"a": GOOD, "b": GOOD}, {}, 'layer "a", plane "." and layer "b", plane "." share memory'),
    ],
)
def test_refused(tensors, options, message):
    with pytest.raises(kvxfer.LayoutError, match=message):
        kvxfer.Cache(tensors, **options)


def test_layout_errors_are_value_errors():
    with pytest.raises(ValueError, match="no tensors"):
        kvxfer.Cache({})
    assert issubclass(kvxfer.LayoutError, kvxfer.Error)
