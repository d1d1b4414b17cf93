"""What may be shown on a terminal, and how much of it fits."""

from __future__ import annotations

import shutil
import sys


def columns(most: int) -> int:
    """Return how long lines of the output may be: `most`, or less on a narrower terminal."""
    return min(most, shutil.get_terminal_size().columns) if sys.stdout.isatty() else most


def printable(text: object) -> str:
    r"""Return a text that others have chosen, on one line and without control characters.

    Examples
    --------
    >>> printable("req-\x1b[2J\n7")
    'req-\\x1b[2J\\n7'
    """
    return "".join(
        letter if letter.isprintable() else letter.encode("unicode_escape").decode()
        for letter in str(text)
    )
