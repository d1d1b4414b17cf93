"""Bytes that a request's KV has on the wire: the formulas of docs/coded_chunks.md.

What is left out are a chunk's header (64 bytes in 100 KiB and more) and the messages around it.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvxfer.codecs import Codec
from kvxfer.errors import InvalidError
from kvxfer.serving.cost_model import kv_bytes_per_token
from kvxfer.sizing.models import ELEMENT_BYTES, LayerGroup, Model

PANEL_TOKENS = 64
_SCALE_BYTES = {"float32": 4, "bfloat16": 2, "e8m0": 1}
_CODABLE = ("float32", "float16", "bfloat16")
_WIDE_ROW, _GROUP_OF_WIDE_ROW = 256, 128


@dataclass(frozen=True)
class Encoding:
    """How one plane is encoded: names as in the core; group 0 is the whole row."""

    scheme: str
    scale: str = "bfloat16"
    group: int = 0


def encoding_of(codec: Codec, plane: str, content: int) -> Encoding:
    """Return how a codec encodes a plane with rows of `content` elements."""
    if codec.name == "raw":
        return Encoding("raw")
    scale = codec.scale or "bfloat16"
    if codec.name == "int8" and plane == "k":
        return Encoding("int8_channel", scale)
    group = codec.group or 0
    if group == 0 and content > _WIDE_ROW:
        group = _GROUP_OF_WIDE_ROW
    return Encoding(codec.name, scale, group if group < content else 0)


def panel_bytes(encoding: Encoding, element: str, rows: int, content: int) -> int:
    """Return the bytes of a panel: codes and scales, each filled up to a multiple of 16."""
    if encoding.scheme == "raw":
        return _up16(rows * content * ELEMENT_BYTES[element])
    if encoding.scheme == "int8_channel":
        scales = 2 * content
    else:
        scales = rows * -(-content // (encoding.group or content))
    return _up16(rows * content) + _up16(scales * _SCALE_BYTES[encoding.scale])


def group_bytes(group: LayerGroup, codec: Codec, element: str, tokens: int, tp: int) -> int:
    """Return the bytes on the wire of one rank's part of a request, over all layers of a group.

    Raises
    ------
    InvalidError
        The codec can't encode elements of that type; the heads can't be shared out.
    """
    heads = group.rank_heads(tp)
    if group.element is not None:
        element, codec = group.element, Codec("raw")
    kept = group.cached_tokens(tokens)
    runs = _runs(codec, tokens - kept, tokens)
    if not any(coded for _, coded in runs):
        content = sum(size for _, size in group.planes)
        size = kv_bytes_per_token(group.count, heads, content, ELEMENT_BYTES[element], planes=1)
        return int(size) * kept
    if element not in _CODABLE:
        raise InvalidError(
            f"codec {codec} takes {', '.join(_CODABLE)}, not {element}: a cache of 8-bit floats "
            "travels as it is, with codec raw"
        )
    if codec.name == "auto":
        raise InvalidError("codec auto becomes int8 or raw, by the link: name one of these")
    total = 0
    for plane, content in group.planes:
        encoding = encoding_of(codec, plane, content)
        for rows, coded in runs:
            total += panel_bytes(encoding if coded else Encoding("raw"), element, rows, content)
    return total * heads * group.count


def request_bytes(model: Model, codec: Codec, element: str, tokens: int, tp: int = 1) -> int:
    """Return the bytes on the wire of one rank's part of a request of `tokens` tokens."""
    return sum(group_bytes(group, codec, element, tokens, tp) for group in model.groups)


def _runs(codec: Codec, begin: int, end: int) -> list[tuple[int, bool]]:
    """Cut tokens [begin, end) of an offer that ends there into runs, and say which are coded."""
    if codec.name == "raw":
        return [(end - begin, False)]
    step = codec.panel_tokens or PANEL_TOKENS
    raw_until = min(max(codec.sinks, begin), end)
    raw_from = max(raw_until, end - codec.recent) if codec.recent else end
    runs = []
    for first, last, coded in (
        (begin, raw_until, False),
        (raw_until, raw_from, True),
        (raw_from, end, False),
    ):
        full, rest = divmod(last - first, step)
        runs += [(step, coded)] * full + [(rest, coded)] * bool(rest)
    return runs


def _up16(size: int) -> int:
    return (size + 15) // 16 * 16
