"""Links by name, and rates as people write them."""

from __future__ import annotations

import re
from dataclasses import dataclass

from kvxfer.errors import InvalidError


@dataclass(frozen=True)
class LinkRate:
    """A link in one direction."""

    name: str
    bytes_per_second: float


NOMINAL = (
    LinkRate("10 GbE", 10e9 / 8),
    LinkRate("25 Gbit/s", 25e9 / 8),
    LinkRate("100 Gbit/s", 100e9 / 8),
    LinkRate("200 Gbit/s", 200e9 / 8),
    LinkRate("400 Gbit/s", 400e9 / 8),
    LinkRate("NVLink 4", 450e9),
)
"""Nameplates. 400 Gbit/s carry 48 GB/s at best; what a link here carries, `kvxfer bench` tells."""

_RATE = re.compile(r"([0-9.]+(?:e[0-9]+)?)\s*([kMGT]?)(bit|b|bytes|B)?(?:/s|ps)?")
_FACTORS = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}


def parse_link(text: str) -> LinkRate:
    """Return the link that ``NAME=RATE`` or ``RATE`` says: ``3.8GB/s``, ``lab=25Gbit/s``.

    Raises
    ------
    InvalidError
        It is not such a text.
    """
    name, _, rate = text.rpartition("=")
    found = _RATE.fullmatch(rate.strip())
    try:
        value = float(found[1]) if found else 0.0
    except ValueError:
        value = 0.0
    if found is None or value <= 0:
        raise InvalidError(f"link {text!r}: write NAME=RATE, the rate as 3.8GB/s or 25Gbit/s")
    bits = found[3] in ("bit", "b")
    return LinkRate(name or rate.strip(), value * _FACTORS[found[2]] / (8 if bits else 1))
