"""What may be shown on a terminal."""

from __future__ import annotations


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
