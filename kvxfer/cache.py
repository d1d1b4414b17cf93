"""The description of an engine's paged KV cache."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvxfer import _core
from kvxfer._tensors import TensorView, describe, dtype_name
from kvxfer.errors import InvalidError, LayoutError

_AXES = {"P": "plane", "B": "block", "H": "kv head", "N": "token", "C": "content"}
_REQUIRED = "BNC"
# Normal numbers of float32, which is how scales travel: those below have no inverse there.
_LEAST_SCALE, _MOST_SCALE = 2.0**-126, (2.0 - 2.0**-23) * 2.0**127


@dataclass(frozen=True)
class _Plane:
    """One plane of one layer; strides in bytes, in the order block, kv head, token, content."""

    address: int
    strides: tuple[int, int, int, int]
    content: int


@dataclass(frozen=True)
class _Geometry:
    """What has to be the same in all layers."""

    num_blocks: int
    num_heads: int
    block_size: int
    contents: tuple[int, ...]
    dtype: str

    def difference(self, other: _Geometry) -> str:
        """Say in what `other` differs, or return ''."""
        for what, ours, theirs in (
            ("B (block)", self.num_blocks, other.num_blocks),
            ("H (kv head)", self.num_heads, other.num_heads),
            ("N (token)", self.block_size, other.block_size),
            ("P (plane)", len(self.contents), len(other.contents)),
            ("C (content)", self.contents, other.contents),
        ):
            if ours != theirs:
                return f"its axis {what} is {_plain(theirs)}, not {_plain(ours)}"
        if self.dtype != other.dtype:
            return f"its elements are {other.dtype}, not {self.dtype}"
        return ""


class Cache:
    """An engine's paged KV cache, described by the strides of its tensors.

    The tensors are not copied. They stay alive as long as the cache does.

    Parameters
    ----------
    tensors
        Layer name to tensor, or to a tuple of tensors with one plane each, such as ``(k, v)``; in
        the order of the model. torch tensors and anything with ``__array_interface__``,
        ``__cuda_array_interface__`` or ``__dlpack__``, with any positive strides; all on the CPU,
        or all on one GPU. A tensor that holds all layers is passed as one view of it per layer.
    axes
        What the tensors' axes are, in their order: B block, H kv head, N token in its block,
        C content, and P plane where one tensor holds K and V (vLLM's ``[2, blocks, ...]`` is
        ``"PBNHC"``). Without H there is one kv head, as in MLA.
    planes
        Their names, by which two caches are matched. By default ``("k", "v")``, or ``("kv",)``
        where there is only one.
    packed
        K and V lie together in the content axis: True for halves, or the number of elements of
        each plane.
    model
        Caches that both name a model only exchange data when it is the same.
    first_head
        Global index of the first kv head held here, for tensor parallelism.
    dtype
        What the elements are where the tensors' own dtype doesn't say, e.g. ``"bfloat16"`` in
        uint16 storage or ``"float8_e4m3fn"`` in uint8.
    scales
        What stored numbers are multiplied by to get their values, in caches of 8-bit floats: one
        for each plane, as ``(k_scale, v_scale)``, or a list of such for each layer. At least
        2^-126; by default 1.

    Raises
    ------
    LayoutError
        The tensors can't be described so; the message names the layer and the axis.

    Examples
    --------
    >>> k = numpy.zeros((64, 8, 16, 128), dtype=numpy.float16)
    >>> v = numpy.zeros_like(k)
    >>> cache = kvxfer.Cache({"layer.0": (k, v)}, axes="BHNC")
    """

    def __init__(
        self,
        tensors: Mapping[str, object],
        axes: str = "BHNC",
        *,
        planes: Sequence[str] | None = None,
        packed: bool | Sequence[int] = False,
        model: str = "",
        first_head: int = 0,
        dtype: object = None,
        scales: Sequence[float] | Sequence[Sequence[float]] | None = None,
    ) -> None:
        _check_axes(axes)
        if packed is not False and "P" in axes:
            raise LayoutError(
                f"axes {axes!r} has P, and packed is set: the planes can only be in one"
            )
        if not tensors:
            raise LayoutError("no tensors were given: a cache has at least one layer")
        if first_head < 0:
            raise LayoutError(f"first_head is {first_head}; heads are counted from 0")

        self._owners: list[object] = []
        self._devices: set[str] = set()
        self._writable = True
        geometry: _Geometry | None = None
        views: list[tuple[int, int, int, int, int]] = []
        for layer, given in tensors.items():
            if not isinstance(layer, str):
                raise LayoutError(f"layer {layer!r}: layers are named by strings")
            found, layer_planes = self._read_layer(layer, given, axes, packed, planes, dtype)
            geometry = geometry or found
            if difference := geometry.difference(found):
                raise LayoutError(
                    f"layer {layer!r} differs from layer {next(iter(tensors))!r}: {difference}; "
                    "layers of another geometry belong in a cache of their own"
                )
            views += [(plane.address, *plane.strides) for plane in layer_planes]
        assert geometry is not None
        if not _may_be_one(self._devices):
            places = ", ".join(sorted(device or "the CPU" for device in self._devices))
            raise LayoutError(f"the tensors lie on {places}: a cache has all of its on one device")

        names = tuple(planes) if planes is not None else _default_planes(len(geometry.contents))
        try:
            self._layout = _core.CacheLayout(
                num_blocks=geometry.num_blocks,
                block_size=geometry.block_size,
                num_heads=geometry.num_heads,
                layers=list(tensors),
                planes=list(zip(names, geometry.contents, strict=True)),
                views=views,
                element=geometry.dtype,
                first_head=first_head,
                model=model,
                scales=_scales(scales, geometry, list(tensors)),
            )
            self._layout.validate()
        except InvalidError as error:
            raise LayoutError(str(error)) from None

    @property
    def layout(self) -> _core.CacheLayout:
        """The core's description. It doesn't keep the tensors alive, the cache does."""
        return self._layout

    @property
    def writable(self) -> bool:
        """Whether all tensors can be written, so that fetches may go into them."""
        return self._writable

    @property
    def owner(self) -> object:
        """The first tensor."""
        return self._owners[0]

    @property
    def on_gpu(self) -> bool:
        """Whether the tensors lie in the memory of a GPU."""
        return self._devices != {""}

    def __repr__(self) -> str:
        layout = self._layout
        last = layout.first_head + layout.num_heads - 1
        planes = ", ".join(f"{name} of {content}" for name, content in layout.planes)
        return (
            f"<kvxfer.Cache: {len(layout.layers)} layers, planes {planes}, "
            f"kv heads {layout.first_head} to {last}, {layout.num_blocks} blocks of "
            f"{layout.block_size} tokens, {layout.element}, {layout.token_bytes()} bytes a token, "
            f"in memory {self._memory_order()}{' of a GPU' if self.on_gpu else ''}"
            f"{'' if self._writable else ', read-only'}>"
        )

    def _memory_order(self) -> str:
        _, *strides = self._layout.views[0]
        by_stride = sorted(zip(strides, "BHNC", strict=True), key=lambda axis: -axis[0])
        return "".join(letter for _, letter in by_stride)

    def _read_layer(
        self,
        layer: str,
        given: object,
        axes: str,
        packed: bool | Sequence[int],
        names: Sequence[str] | None,
        dtype: object,
    ) -> tuple[_Geometry, list[_Plane]]:
        if isinstance(given, (tuple, list)):
            if "P" in axes or packed is not False:
                raise LayoutError(
                    f"layer {layer!r}: {len(given)} tensors were given, but "
                    f"{'axes has P' if 'P' in axes else 'packed is set'}, which is for one tensor "
                    "that holds all planes"
                )
            members = list(given)
            labels = [f"layer {layer!r}, tensor {index}" for index in range(len(members))]
        else:
            members, labels = [given], [f"layer {layer!r}"]
        if not members:
            raise LayoutError(f"layer {layer!r}: no tensors were given")

        geometries: list[_Geometry] = []
        planes: list[_Plane] = []
        for member, where in zip(members, labels, strict=True):
            view = describe(member, where)
            self._owners.append(view.owner)
            self._devices.add(view.device)
            self._writable &= view.writable
            element = _element(view, dtype, where)
            axis = _axes_of(view, axes, where)
            split = _split(view, axis, packed, names, where)
            planes += split
            geometries.append(
                _Geometry(
                    num_blocks=axis["B"][0],
                    num_heads=axis["H"][0],
                    block_size=axis["N"][0],
                    contents=tuple(plane.content for plane in split),
                    dtype=element,
                )
            )
        contents = tuple(plane.content for plane in planes)
        if names is not None and len(names) != len(contents):
            raise LayoutError(
                f"layer {layer!r}: it has {len(contents)} planes, but planes names {len(names)}: "
                f"{', '.join(names)}"
            )
        if names is None and len(contents) > 2:
            raise LayoutError(
                f"layer {layer!r}: it has {len(contents)} planes; name them: planes=..."
            )
        first, *others = (_with_contents(geometry, contents) for geometry in geometries)
        for other, where in zip(others, labels[1:], strict=True):
            if difference := first.difference(other):
                raise LayoutError(f"{where} does not fit tensor 0: {difference}")
        return first, planes


def _may_be_one(devices: set[str]) -> bool:
    """Whether tensors of these may lie on one device.

    Libraries have names of their own for a GPU, not all of which say its number; registering the
    cache looks at the addresses.
    """
    numbers = {name.rpartition(":")[2] for name in devices if ":" in name}
    return len(numbers) <= 1 and ("" not in devices or len(devices) == 1)


def _check_axes(axes: str) -> None:
    known = ", ".join(f"{letter} {name}" for letter, name in _AXES.items())
    for letter in axes:
        if letter not in _AXES:
            raise LayoutError(f"axes {axes!r}: {letter!r} is not an axis; there are {known}")
        if axes.count(letter) > 1:
            raise LayoutError(f"axes {axes!r}: {letter} ({_AXES[letter]}) is there twice")
    for letter in _REQUIRED:
        if letter not in axes:
            raise LayoutError(f"axes {axes!r}: {letter} ({_AXES[letter]}) is missing")


def _element(view: TensorView, dtype: object, where: str) -> str:
    name = view.dtype if dtype is None else dtype_name(dtype)
    try:
        itemsize = _core.element_bytes(name)
    except InvalidError as error:
        hint = "" if dtype is not None else '; if they hold another type, say so: dtype="..."'
        raise LayoutError(f"{where}: {error}{hint}") from None
    if itemsize != view.itemsize:
        raise LayoutError(
            f"{where}: dtype {name} has {itemsize} bytes an element, the tensor's {view.dtype} has "
            f"{view.itemsize}"
        )
    return name


def _axes_of(view: TensorView, axes: str, where: str) -> dict[str, tuple[int, int]]:
    """Return extent and stride by letter; H is always there."""
    if len(view.shape) != len(axes):
        raise LayoutError(
            f"{where}: its shape {list(view.shape)} has {len(view.shape)} axes, but axes {axes!r} "
            f"names {len(axes)}"
        )
    for letter, extent in zip(axes, view.shape, strict=True):
        if extent == 0:
            raise LayoutError(f"{where}: its axis {letter} ({_AXES[letter]}) has no elements")
    found = dict(zip(axes, zip(view.shape, view.strides, strict=True), strict=True))
    found.setdefault("H", (1, found["B"][1]))
    return found


def _split(
    view: TensorView,
    axis: dict[str, tuple[int, int]],
    packed: bool | Sequence[int],
    names: Sequence[str] | None,
    where: str,
) -> list[_Plane]:
    """Return the planes that one tensor holds."""
    strides = (axis["B"][1], axis["H"][1], axis["N"][1], axis["C"][1])
    content, content_stride = axis["C"]
    if "P" in axis:
        count, stride = axis["P"]
        wanted = len(names) if names is not None else 2
        if count != wanted:
            raise LayoutError(f"{where}: its axis P (plane) has {count} elements, not {wanted}")
        return [_Plane(view.address + p * stride, strides, content) for p in range(count)]
    if packed is False:
        return [_Plane(view.address, strides, content)]

    if packed is True:
        count = len(names) if names is not None else 2
        if content % count:
            raise LayoutError(
                f"{where}: its axis C (content) has {content} elements, which are not "
                f"{count} equal parts; give the sizes of the planes: packed=(..., ...)"
            )
        sizes = [content // count] * count
    else:
        sizes = [int(size) for size in packed]
        if sum(sizes) != content or min(sizes, default=0) <= 0:
            raise LayoutError(
                f"{where}: its axis C (content) has {content} elements, packed={tuple(sizes)} "
                "doesn't add up to that"
            )
    starts = [sum(sizes[:index]) for index in range(len(sizes))]
    return [
        _Plane(view.address + start * content_stride, strides, size)
        for start, size in zip(starts, sizes, strict=True)
    ]


def _scales(
    given: Sequence[float] | Sequence[Sequence[float]] | None,
    geometry: _Geometry,
    layers: list[str],
) -> list[float]:
    """Return a scale for each layer and plane, or [] where there are none."""
    if given is None:
        return []
    if not geometry.dtype.startswith("float8"):
        raise LayoutError(
            f"scales are for caches of 8-bit floats; the elements of this one are {geometry.dtype}"
        )
    planes = len(geometry.contents)
    items: list[Any] = list(given)
    nested = [hasattr(item, "__len__") for item in items]
    if any(nested) and (not all(nested) or len(items) != len(layers)):
        raise LayoutError(
            f"scales has {len(items)} entries, where the cache has {len(layers)} layers; give one "
            "scale for each plane, or a list of such for each layer"
        )
    rows = items if any(nested) else [items] * len(layers)
    found: list[float] = []
    for layer, row in zip(layers, rows, strict=True):
        values = [float(value) for value in row]
        if len(values) != planes:
            raise LayoutError(
                f"layer {layer!r}: it has {planes} planes and {len(values)} scales: {values}"
            )
        for value in values:
            if not _LEAST_SCALE <= value <= _MOST_SCALE:
                raise LayoutError(
                    f"layer {layer!r}: a scale is {value}; as a float32 it must be finite, and at "
                    f"least 2^-126, which is {_LEAST_SCALE:.4g}"
                )
        found += values
    return found


def _with_contents(geometry: _Geometry, contents: tuple[int, ...]) -> _Geometry:
    return _Geometry(
        geometry.num_blocks, geometry.num_heads, geometry.block_size, contents, geometry.dtype
    )


def _default_planes(count: int) -> tuple[str, ...]:
    return ("kv",) if count == 1 else ("k", "v")


def _plain(value: int | tuple[int, ...]) -> str:
    return str(value) if isinstance(value, int) else "+".join(str(part) for part in value)
