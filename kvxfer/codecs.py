"""How the elements of a cache are encoded on the wire."""

from __future__ import annotations

import dataclasses
import re
from operator import index
from typing import TYPE_CHECKING

from kvxfer.errors import InvalidError

if TYPE_CHECKING:
    from kvxfer import _core

_ABOUT = {
    "raw": "elements as they are; converted where the two caches' types differ",
    "fp8_e4m3": "8-bit floats with a scale for every row",
    "fp8_e5m2": "the same with two bits of mantissa and a wider range",
    "int8": "8-bit integers: keys by channel, asymmetric, other planes with a scale for every row; "
    "more faithful than fp8_e4m3 of the same size",
    "auto": "int8 where the link is slow enough for it to pay, else raw",
    "tiered": "the most recent tokens and the first few as they are, the others in 8 bit: "
    "tiered(recent=1000, sinks=4, codec=int8)",
}
_SCALES = ("float32", "bfloat16", "e8m0")
_MAX_PANEL_TOKENS = 256
_MAX_TOKENS = (1 << 32) - 1
_TEXT = re.compile(r"\s*(\w+)\s*(?:\((.*)\))?\s*")
_OPTION = re.compile(r"\s*(\w+)\s*=\s*(\w+)\s*")


@dataclasses.dataclass(frozen=True)
class CodecInfo:
    """A codec that fetches can ask for."""

    name: str
    about: str
    """What it does, and what it is for."""


@dataclasses.dataclass(frozen=True)
class Codec:
    """An encoding on the wire, with its options.

    Parameters
    ----------
    name
        One of `codecs()`, but for ``tiered``, which `recent` and `sinks` make.
    panel_tokens
        Tokens whose keys share the scales of ``int8``, 1 to 256: fewer are more faithful, more are
        smaller. By default 64. Where a chunk (`Config.chunk_bytes` of both sides) does not hold a
        panel of so many tokens, with all its rows raw, it is halved until one does, and
        `Report.codec_why` says so.
    group
        Elements of a row that share a scale. By default the whole row, or 128 where it has more
        than 256. One that is longer than a row is the whole row.
    scale
        Format of the scales: ``"float32"``, ``"bfloat16"`` (the default), or for the fp8 codecs
        ``"e8m0"``, powers of two.
    recent
        Tokens at the end of the offer that travel as they are.
    sinks
        Tokens at the beginning of the request that travel as they are.

    Raises
    ------
    InvalidError
        An unknown name, a value out of range, or an option that the codec does not have.
    """

    name: str = "raw"
    panel_tokens: int | None = None
    group: int | None = None
    scale: str | None = None
    recent: int = 0
    sinks: int = 0

    def __post_init__(self) -> None:
        known = [name for name in _ABOUT if name != "tiered"]
        if self.name not in known:
            raise InvalidError(f"codec {self.name!r} is not known; there are {', '.join(known)}")
        self._check_number("panel_tokens", self.panel_tokens, 1, _MAX_PANEL_TOKENS)
        self._check_number("group", self.group, 0, (1 << 16) - 1)
        self._check_number("recent", self.recent, 0, _MAX_TOKENS)
        self._check_number("sinks", self.sinks, 0, _MAX_TOKENS)
        if self.scale is not None and self.scale not in _SCALES:
            raise InvalidError(
                f"codec {self.name}: scale {self.scale!r} is not known; there are "
                f"{', '.join(_SCALES)}"
            )
        if self.scale == "e8m0" and not self.name.startswith("fp8"):
            raise InvalidError(
                f"codec {self.name}: scale 'e8m0' is for fp8_e4m3 and fp8_e5m2; int8 has "
                "float32 and bfloat16"
            )
        given = [option for option, value in self._options() if value]
        if self.name == "raw" and given:
            raise InvalidError(
                f"codec raw has no options, but {', '.join(given)} was given: all tokens travel as "
                "they are"
            )

    def _check_number(self, option: str, value: object, low: int, high: int) -> None:
        if value is None and option in ("panel_tokens", "group"):
            return
        try:
            fits = not isinstance(value, bool) and low <= index(value) <= high  # type: ignore[arg-type]
        except TypeError:
            fits = False
        if not fits:
            raise InvalidError(
                f"codec {self.name}: {option} is {value!r}; it is an integer of {low} to {high}"
            )

    def _options(self) -> list[tuple[str, object]]:
        return [(f.name, getattr(self, f.name)) for f in dataclasses.fields(self)[1:]]

    @classmethod
    def parse(cls, text: str | Codec) -> Codec:
        """Return the codec that a text names, as settings and command lines write it.

        Parameters
        ----------
        text
            ``"int8"``, ``"fp8_e4m3(group=32, scale=e8m0)"``,
            ``"tiered(recent=1000, sinks=4, codec=int8)"``: what ``str()`` of a codec returns.

        Raises
        ------
        InvalidError
            It is not such a text; the message says what is wrong.
        """
        if isinstance(text, Codec):
            return text
        given: object = text  # settings and command lines are not typed
        found = _TEXT.fullmatch(given) if isinstance(given, str) else None
        if found is None:
            raise InvalidError(
                f"codec {text!r}: expected a name, or a name with options as "
                "tiered(recent=1000, sinks=4, codec=int8)"
            )
        name, arguments = found.groups()
        options: dict[str, str] = {}
        for argument in (arguments or "").split(",") if (arguments or "").strip() else []:
            option = _OPTION.fullmatch(argument)
            if option is None:
                raise InvalidError(f"codec {text!r}: {argument.strip()!r} is not option=value")
            if option[1] in options:
                raise InvalidError(f"codec {text!r}: {option[1]} is there twice")
            options[option[1]] = option[2]
        tiers = name == "tiered"
        allowed = ["panel_tokens", "group", "scale", *(["recent", "sinks", "codec"] * tiers)]
        for option_name in options:
            if option_name not in allowed:
                raise InvalidError(
                    f"codec {text!r} has no option {option_name!r}; there are {', '.join(allowed)}"
                )
        base = options.pop("codec", "int8") if tiers else name
        scale = options.pop("scale", None)
        numbers = {key: cls._number(text, key, value) for key, value in options.items()}
        if tiers:
            return tiered(codec=cls(base, scale=scale), **numbers)
        return cls(base, scale=scale, **numbers)

    @staticmethod
    def _number(text: str, option: str, value: str) -> int:
        try:
            return int(value)
        except ValueError:
            raise InvalidError(f"codec {text!r}: {option}={value} is not an integer") from None

    def __str__(self) -> str:
        tiers = bool(self.recent or self.sinks)
        options = [(name, value) for name, value in self._options() if value is not None]
        if tiers:
            options = [*options[-2:], ("codec", self.name), *options[:-2]]
        else:
            options = options[:-2]
        if not options:
            return self.name
        inside = ", ".join(f"{name}={value}" for name, value in options)
        return f"{'tiered' if tiers else self.name}({inside})"

    def core_spec(self, end: int) -> _core.CodecSpec:
        """Return it as the core takes it, for an offer that ends before token `end`."""
        from kvxfer import _core  # only here: importing kvxfer loads no native code

        return _core.CodecSpec(
            codec=self.name,
            panel_tokens=self.panel_tokens,
            group=self.group,
            scale=self.scale,
            raw_until=self.sinks,
            raw_from=max(self.sinks, end - self.recent) if self.recent else _MAX_TOKENS,
        )


def tiered(
    recent: int = 1000,
    sinks: int = 4,
    codec: str | Codec = "int8",
    *,
    panel_tokens: int | None = None,
    group: int | None = None,
) -> Codec:
    """Return a codec that leaves the most recent tokens and the first few as they are.

    Attention looks most at both. What lies between, the history, is encoded.

    Parameters
    ----------
    recent
        Tokens at the end of the offer.
    sinks
        Tokens at the beginning of the request, by their positions.
    codec
        For the tokens between, with whatever options it has.
    panel_tokens, group
        Options of the codec, where it has none of its own.

    Raises
    ------
    InvalidError
        `codec` is unknown, ``raw``, or tiered itself.

    Examples
    --------
    >>> decode.fetch(ticket, cache, blocks, codec=kvxfer.tiered(recent=1000, sinks=4))
    """
    base = Codec.parse(codec)
    if base.recent or base.sinks:
        raise InvalidError(f"codec {base} is tiered already")
    return dataclasses.replace(
        base,
        recent=recent,
        sinks=sinks,
        panel_tokens=base.panel_tokens if panel_tokens is None else panel_tokens,
        group=base.group if group is None else group,
    )


def codecs() -> dict[str, CodecInfo]:
    """Return what `Agent.fetch` and ``KVXFER_CODEC`` take, by name."""
    return {name: CodecInfo(name, about) for name, about in _ABOUT.items()}


@dataclasses.dataclass(frozen=True)
class CodecRates:
    """How fast one thread of this process handles a cache, in bytes of it a second."""

    pack: float
    unpack: float
    encode: float
    """With int8, which ``auto`` may choose."""
    decode: float


def codec_rates() -> CodecRates:
    """Return what ``auto`` compares with the link, measured at the first call of a process.

    That takes 50 to 200 milliseconds. An agent measures by itself before its first fetch with
    ``auto`` over a link that may be slower than memory; an engine that calls this while it starts
    spares that fetch the wait.
    """
    from kvxfer import _core

    return CodecRates(*_core.codec_rates())
