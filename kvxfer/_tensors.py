"""Reads where a tensor's elements lie, whatever library it comes from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from kvxfer import _core
from kvxfer.errors import LayoutError

# DLPack's numbers of memory that the CPU can address: plain, and pinned by CUDA or ROCm.
_HOST_DEVICES = {1, 3, 11}
_DEVICE_NAMES = {2: "cuda", 8: "metal", 10: "rocm", 13: "cuda (managed)", 14: "oneapi"}

_DLPACK_VERSION = (1, 0)


class _Device(Protocol):
    type: str


@runtime_checkable
class _TorchLike(Protocol):
    device: _Device
    dtype: object
    shape: Sequence[int]

    def data_ptr(self) -> int: ...
    def element_size(self) -> int: ...
    def stride(self) -> Sequence[int]: ...


@runtime_checkable
class _ArrayLike(Protocol):
    __array_interface__: Mapping[str, Any]


@runtime_checkable
class _DlpackLike(Protocol):
    def __dlpack__(self, *, max_version: tuple[int, int] = ...) -> object: ...
    def __dlpack_device__(self) -> tuple[int, int]: ...


@dataclass(frozen=True)
class TensorView:
    """A tensor's memory. Strides are in bytes; `owner` keeps it alive."""

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    itemsize: int
    writable: bool
    owner: object


def describe(tensor: object, where: str) -> TensorView:
    """Return the memory of a tensor that the CPU can address.

    Parameters
    ----------
    tensor
        A torch tensor, anything with ``__array_interface__`` or anything with ``__dlpack__``.
    where
        What to call it in errors.

    Raises
    ------
    LayoutError
        It is none of these, or lies in the memory of a GPU.
    """
    if isinstance(tensor, _TorchLike):
        return _from_torch(tensor, where)
    if isinstance(tensor, _ArrayLike):
        return _from_array_interface(tensor, where)
    if isinstance(tensor, _DlpackLike):
        return _from_dlpack(tensor, where)
    if hasattr(tensor, "__cuda_array_interface__"):
        raise _not_on_cpu(where, "cuda")
    raise LayoutError(
        f"{where}: expected a tensor with __array_interface__ or __dlpack__ (NumPy, torch, ...), "
        f"found {type(tensor).__name__}"
    )


def dtype_name(dtype: object) -> str:
    """Return the name of a dtype of torch, NumPy or ml_dtypes, or the name itself."""
    if isinstance(dtype, str):
        return dtype
    name = getattr(dtype, "name", None) or getattr(dtype, "__name__", None) or str(dtype)
    return str(name).removeprefix("torch.")


def _from_torch(tensor: _TorchLike, where: str) -> TensorView:
    if tensor.device.type != "cpu":
        raise _not_on_cpu(where, str(tensor.device))
    itemsize = int(tensor.element_size())
    return TensorView(
        address=tensor.data_ptr(),
        shape=tuple(tensor.shape),
        strides=tuple(stride * itemsize for stride in tensor.stride()),
        dtype=dtype_name(tensor.dtype),
        itemsize=itemsize,
        writable=True,
        owner=tensor,
    )


def _from_array_interface(tensor: _ArrayLike, where: str) -> TensorView:
    interface = tensor.__array_interface__
    if interface.get("data") is None:
        raise LayoutError(f"{where}: its __array_interface__ has no address")
    address, read_only = interface["data"]
    kind = interface["typestr"]
    itemsize = int(kind[2:])
    if kind[0] == ">":
        raise LayoutError(f"{where}: its elements are big-endian ({kind}); convert them first")
    shape = tuple(interface["shape"])
    strides = interface.get("strides")
    dtype = getattr(tensor, "dtype", None)
    return TensorView(
        address=address,
        shape=shape,
        strides=tuple(strides) if strides is not None else _compact_strides(shape, itemsize),
        dtype=dtype_name(dtype) if dtype is not None else _name_of_typestr(kind),
        itemsize=itemsize,
        writable=not read_only,
        owner=tensor,
    )


def _from_dlpack(tensor: _DlpackLike, where: str) -> TensorView:
    device, index = tensor.__dlpack_device__()
    if device not in _HOST_DEVICES:
        name = _DEVICE_NAMES.get(device, f"DLPack device {int(device)}")
        raise _not_on_cpu(where, f"{name}:{index}")
    try:
        capsule = tensor.__dlpack__(max_version=_DLPACK_VERSION)
    except TypeError:  # from before DLPack 1.0
        capsule = tensor.__dlpack__()
    view = _core.DlpackTensor(capsule)
    return TensorView(
        address=view.address,
        shape=tuple(view.shape),
        strides=tuple(view.strides),
        dtype=view.dtype,
        itemsize=view.itemsize,
        writable=not view.read_only,
        owner=view,
    )


def _compact_strides(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    strides: list[int] = []
    for extent in reversed(shape):
        strides.append(itemsize)
        itemsize *= extent
    return tuple(reversed(strides))


def _name_of_typestr(kind: str) -> str:
    names = {"f": "float", "u": "uint", "i": "int", "b": "bool", "V": "void", "c": "complex"}
    return f"{names.get(kind[1], kind[1])}{int(kind[2:]) * 8}"


def _not_on_cpu(where: str, device: str) -> LayoutError:
    return LayoutError(
        f"{where}: it lies in the memory of {device}; this version moves caches in CPU memory only"
    )
