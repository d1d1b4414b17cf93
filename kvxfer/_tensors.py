"""Reads where a tensor's elements lie, whatever library it comes from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from kvxfer import _core
from kvxfer.errors import LayoutError

# DLPack's numbers of memory that the CPU can address: plain, and pinned by CUDA or ROCm.
_HOST_DEVICES = {1, 3, 11}
_GPU_DEVICES = {2: "cuda", 10: "rocm", 13: "cuda (managed)"}
_OTHER_DEVICES = {8: "metal", 14: "oneapi"}
# DLPack's stream that stands for none: only the address is wanted, so nothing has to be waited for.
_NO_STREAM = -1

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
    def __dlpack__(
        self, *, stream: int | None = ..., max_version: tuple[int, int] = ...
    ) -> object: ...
    def __dlpack_device__(self) -> tuple[int, int]: ...


@dataclass(frozen=True)
class TensorView:
    """A tensor's memory. Strides are in bytes; `owner` keeps it alive.

    `device` is "" for memory of the CPU, else what the tensor's library calls the GPU.
    """

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    itemsize: int
    writable: bool
    owner: object
    device: str = ""


def describe(tensor: object, where: str) -> TensorView:
    """Return the memory of a tensor.

    Parameters
    ----------
    tensor
        A torch tensor, or anything with ``__array_interface__``, ``__cuda_array_interface__`` or
        ``__dlpack__``.
    where
        What to call it in errors.

    Raises
    ------
    LayoutError
        It is none of these, or lies neither in the memory of the CPU nor of a GPU of AMD or NVIDIA.
    """
    if isinstance(tensor, _TorchLike):
        return _from_torch(tensor, where)
    if isinstance(tensor, _ArrayLike):
        return _from_array_interface(tensor, tensor.__array_interface__, where)
    # Not by a protocol: arrays of jax on the CPU have this property too, and it raises there.
    interface = getattr(tensor, "__cuda_array_interface__", None)
    if interface is not None:
        return _from_array_interface(tensor, interface, where, "cuda")
    if isinstance(tensor, _DlpackLike):
        return _from_dlpack(tensor, where)
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
    # ROCm's torch says cuda, too.
    if tensor.device.type not in ("cpu", "cuda"):
        raise _unreachable(where, str(tensor.device))
    itemsize = int(tensor.element_size())
    return TensorView(
        address=tensor.data_ptr(),
        shape=tuple(tensor.shape),
        strides=tuple(stride * itemsize for stride in tensor.stride()),
        dtype=dtype_name(tensor.dtype),
        itemsize=itemsize,
        writable=True,
        owner=tensor,
        device="" if tensor.device.type == "cpu" else str(tensor.device),
    )


def _from_array_interface(
    tensor: object, interface: Mapping[str, Any], where: str, device: str = ""
) -> TensorView:
    if interface.get("data") is None:
        raise LayoutError(f"{where}: its array interface has no address")
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
        device=device,
    )


def _from_dlpack(tensor: _DlpackLike, where: str) -> TensorView:
    device, index = tensor.__dlpack_device__()
    if device not in _HOST_DEVICES and device not in _GPU_DEVICES:
        name = _OTHER_DEVICES.get(device, f"DLPack device {int(device)}")
        raise _unreachable(where, f"{name}:{index}")
    about: dict[str, Any] = {"stream": _NO_STREAM} if device in _GPU_DEVICES else {}
    try:
        capsule = tensor.__dlpack__(max_version=_DLPACK_VERSION, **about)
    except TypeError:  # from before DLPack 1.0
        capsule = tensor.__dlpack__(**about)
    view = _core.DlpackTensor(capsule)
    return TensorView(
        address=view.address,
        shape=tuple(view.shape),
        strides=tuple(view.strides),
        dtype=view.dtype,
        itemsize=view.itemsize,
        writable=not view.read_only,
        owner=view,
        device=f"{_GPU_DEVICES[device]}:{index}" if device in _GPU_DEVICES else "",
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


def _unreachable(where: str, device: str) -> LayoutError:
    return LayoutError(
        f"{where}: it lies in the memory of {device}; caches lie in that of the CPU, or of a GPU "
        "of AMD or NVIDIA"
    )
