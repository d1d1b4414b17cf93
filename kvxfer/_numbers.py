"""Sizes and counts as people write them on command lines."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Sequence
from typing import TypeVar

_T = TypeVar("_T")
_SIZE = re.compile(r"(\d+)\s*(?:([kmg])(?:i?b)?|b)?", re.IGNORECASE)
_COUNT = re.compile(r"(\d+(?:\.\d+)?)([km]?)", re.IGNORECASE)


def positive(text: str) -> int:
    """Return a whole number from 1 on."""
    if not text.strip().isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 on")
    return int(text)


def parse_bytes(text: str) -> int:
    """Return the bytes that ``16KiB``, ``16k`` or ``16384`` name: powers of 1024."""
    found = _SIZE.fullmatch(text.strip())
    if found is None or int(found[1]) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size, as 16KiB, 1M or 4096")
    return int(found[1]) << {"": 0, "k": 10, "m": 20, "g": 30}[(found[2] or "").lower()]


def parse_count(text: str) -> int:
    """Return the number that ``34k`` or ``34000`` names: powers of 1000."""
    found = _COUNT.fullmatch(text.strip())
    value = 0.0
    if found is not None:
        value = float(found[1]) * {"": 1, "k": 1000, "m": 1000000}[found[2].lower()]
    if value < 1 or value != int(value):
        raise argparse.ArgumentTypeError(f"{text!r} is not a count, as 128, 34k or 1M")
    return int(value)


def parse_seconds(text: str) -> float:
    """Return a positive number of seconds."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= 1e6:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds")
    return value


def listed(parse: Callable[[str], _T]) -> Callable[[str], list[_T]]:
    """Return a parser of values with commas between them; commas in parentheses are no borders."""

    def parse_list(text: str) -> list[_T]:
        return [parse(part.strip()) for part in _split(text)]

    return parse_list


def one_of(choices: Sequence[str]) -> Callable[[str], str]:
    """Return a parser that takes these words only."""

    def parse(text: str) -> str:
        if text not in choices:
            raise argparse.ArgumentTypeError(f"{text!r}: there are {', '.join(choices)}")
        return text

    return parse


def format_bytes(count: float) -> str:
    """Return ``256 MiB``, ``16 KiB``, ``512 B``."""
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= size:
            value = count / size
            return (
                f"{value:.0f} {unit}"
                if value >= 10 or value == int(value)
                else f"{value:.1f} {unit}"
            )
    return f"{count:.0f} B"


def _split(text: str) -> list[str]:
    parts, depth, begin = [], 0, 0
    for position, letter in enumerate(text):
        depth += (letter == "(") - (letter == ")")
        if letter == "," and depth == 0:
            parts.append(text[begin:position])
            begin = position + 1
    return [*parts, text[begin:]]
