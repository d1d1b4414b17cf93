"""One line on the terminal that says what is going on."""

from __future__ import annotations

import shutil
from typing import TextIO


class ProgressLine:
    """Writes over itself. Nothing is written where there is no terminal, or none is wanted."""

    def __init__(self, stream: TextIO, wanted: bool = True) -> None:
        self._stream = stream
        self._on = wanted and stream.isatty()
        self._used = False

    def __call__(self, text: str) -> None:
        if not self._on:
            return
        width = shutil.get_terminal_size().columns - 1
        self._stream.write("\r\x1b[K" + text[:width])
        self._stream.flush()
        self._used = True

    def clear(self) -> None:
        if self._used:
            self._stream.write("\r\x1b[K")
            self._stream.flush()
            self._used = False
