"""What `kvxfer size` says, as numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvxfer.codecs import Codec
from kvxfer.serving.cost_model import Link
from kvxfer.sizing.links import LinkRate
from kvxfer.sizing.models import Model
from kvxfer.sizing.wire import request_bytes

_USUAL_CODECS = ("raw", "int8", "fp8_e4m3")
_EIGHT_BIT = "float8_e4m3fn"


@dataclass(frozen=True)
class Passage:
    """A request over one link, or as many as the engine has."""

    link: LinkRate
    seconds: float
    hidden_up_to: float
    """Tokens a second of prefill, per engine, beyond which sending layer by layer falls behind."""
    exposed: float | None
    """Seconds that are left when the prefill ends, where its rate was given."""


@dataclass(frozen=True)
class Estimate:
    """A request with one element type and one codec."""

    dtype: str
    codec: Codec
    tokens: int
    rank_bytes: int
    ranks: int
    share: float
    """Of the bytes of raw elements of that type."""
    passages: tuple[Passage, ...]

    @property
    def label(self) -> str:
        return f"{self.dtype}, {self.codec}"

    @property
    def bytes_per_token(self) -> float:
        return self.rank_bytes / self.tokens

    def record(self) -> dict[str, object]:
        """Return the object that ``--json`` prints."""
        return {
            "dtype": self.dtype,
            "codec": str(self.codec),
            "bytes_per_token_and_rank": self.bytes_per_token,
            "bytes_per_rank": self.rank_bytes,
            "bytes_all_ranks": self.rank_bytes * self.ranks,
            "share_of_raw": self.share,
            "links": [
                {
                    "name": passage.link.name,
                    "bytes_per_second": passage.link.bytes_per_second,
                    "seconds": passage.seconds,
                    "hidden_up_to_tokens_per_second": passage.hidden_up_to,
                    "seconds_after_prefill": passage.exposed,
                }
                for passage in self.passages
            ],
        }


def estimates(
    model: Model,
    tokens: int,
    *,
    tp: int,
    num_links: int | None,
    dtypes: Sequence[str],
    codecs: Sequence[Codec],
    links: Sequence[LinkRate],
    prefill_rate: float | None,
) -> list[Estimate]:
    """Return an estimate for each element type and codec.

    Left empty, `dtypes` are the model's own and, with codec raw, an 8-bit cache; and `codecs` those
    that the element type allows. `num_links` is how many links all ranks share, one each if None.

    Raises
    ------
    InvalidError
        A codec that can't encode the element type, or heads that can't be shared out.
    """
    found = []
    for dtype in dtypes or dict.fromkeys((model.dtype, _EIGHT_BIT)):
        own = bool(dtypes) or dtype == model.dtype
        chosen = codecs if own and codecs else [Codec(name) for name in _USUAL_CODECS]
        if not codecs or not own:
            coded = own and not dtype.startswith("float8") and dtype != "uint8"
            chosen = [codec for codec in chosen if coded or codec.name == "raw"]
        raw = request_bytes(model, Codec("raw"), dtype, tokens, tp)
        for codec in chosen:
            size = request_bytes(model, codec, dtype, tokens, tp)
            passages = tuple(
                _passage(model, link, size * tp / (num_links or tp), tokens, prefill_rate)
                for link in links
            )
            found.append(Estimate(dtype, codec, tokens, size, tp, size / raw, passages))
    return found


def _passage(
    model: Model, rate: LinkRate, link_bytes: float, tokens: int, prefill_rate: float | None
) -> Passage:
    link = Link(rate.bytes_per_second, link_bytes / tokens, layers=model.layers)
    exposed = None if prefill_rate is None else link.exposed(tokens, tokens / prefill_rate)
    return Passage(rate, link_bytes / rate.bytes_per_second, link.tokens_per_second, exposed)
