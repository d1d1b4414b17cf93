"""What a host says of itself: files under a root, and the answers of its libraries.

All that is read is remembered, so that it can be written to one JSON file and read again elsewhere.
"""

from __future__ import annotations

import functools
import gzip
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

from kvxfer.errors import InvalidError

_FORMAT = 1
_ANSWERS = "answers.json"
_PIECE = 1 << 16


class Tree:
    """A host that is read now, from its root or from a folder that its root is mounted at.

    Paths are absolute as on that host. What is absent or can't be read is None or empty.
    """

    def __init__(self, root: str = "/") -> None:
        real = os.path.realpath(root)
        self._root = "" if real == "/" else real
        self.live = real == "/"
        """Whether this process runs on the host, so that its libraries can be asked."""
        self.calls: dict[str, Any] = {}

    def text(self, path: str) -> str | None:
        """Return a file's content without the white space around it."""
        return cast("str | None", self._remember("text", path, lambda: self._read(path)))

    def number(self, path: str) -> int | None:
        """Return the integer, decimal or 0x..., that a file begins with."""
        words = (self.text(path) or "").split()
        try:
            return int(words[0], 0) if words else None
        except ValueError:
            return None

    def data(self, path: str) -> bytes:
        """Return the bytes of a file, without the zeros at its end."""

        def read() -> str:
            return self._bytes(path).rstrip(b"\0").hex()

        return bytes.fromhex(cast("str", self._remember("data", path, read)))

    def lines(self, path: str, pattern: str) -> list[str] | None:
        """Return the lines of a long file that a regular expression is found in, each once."""

        def read() -> list[str] | None:
            data = self._bytes(path)
            if not data:
                return None
            text = data.decode(errors="replace")
            found = (line for line in text.splitlines() if re.search(pattern, line))
            return list(dict.fromkeys(found))

        return cast("list[str] | None", self._remember(f"lines {pattern}", path, read))

    def names(self, path: str) -> list[str]:
        """Return what is in a folder."""

        def read() -> list[str]:
            try:
                return sorted(os.listdir(self._root + path), key=_natural)
            except OSError:
                return []

        return cast("list[str]", self._remember("names", path, read))

    def real(self, path: str) -> str | None:
        """Return where a path leads to, links followed."""

        def read() -> str | None:
            whole = os.path.realpath(self._root + path)
            inside = self.live or whole.startswith(self._root + "/")
            if not inside or not os.path.lexists(self._root + path):
                return None
            return whole if self.live else whole[len(self._root) :]

        return cast("str | None", self._remember("real", path, read))

    def usable(self, path: str) -> bool | None:
        """Return whether we may read and write a device; None where it is not there."""

        def read() -> bool | None:
            whole = self._root + path
            return os.access(whole, os.R_OK | os.W_OK) if os.path.exists(whole) else None

        return cast("bool | None", self._remember("usable", path, read))

    def answer(self, question: str, ask: Callable[[], object]) -> Any:  # noqa: ANN401 - JSON
        """Return what `ask` says, on a live host; else what was recorded, or None."""
        given = ask if self.live else functools.partial(self._given, question)
        return self._remember("answer", question, given)

    def write(self, path: str) -> None:
        """Write all that was read so far, for `recorded`."""
        body = json.dumps({"kvxfer_doctor": _FORMAT, "calls": self.calls}, indent=1, sort_keys=True)
        Path(path).write_text(body + "\n", encoding="utf-8")

    def _remember(self, kind: str, path: str, read: Callable[[], object]) -> object:
        key = f"{kind}:{path}"
        if key not in self.calls:
            self.calls[key] = read()
        return self.calls[key]

    def _read(self, path: str) -> str | None:
        try:
            data = self._open(path)
        except OSError:
            return None
        return data.decode(errors="replace").strip("\0 \t\r\n")

    def _bytes(self, path: str) -> bytes:
        try:
            return self._open(path)
        except (OSError, EOFError):
            return b""

    def _open(self, path: str) -> bytes:
        with open(self._root + path, "rb", buffering=0) as file:
            # Piece by piece: /proc/sys refuses large reads whatever the file's size.
            data = b"".join(iter(functools.partial(file.read, _PIECE), b""))
        return gzip.decompress(data) if path.endswith(".gz") else data

    def _given(self, question: str) -> object:
        try:
            answers = json.loads(Path(self._root, _ANSWERS).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        return answers.get(question) if isinstance(answers, dict) else None


class Recorded(Tree):
    """A host as `Tree.write` wrote it down."""

    def __init__(self, calls: dict[str, Any]) -> None:
        super().__init__("/")
        self.live = False
        self.calls = calls

    def _remember(self, kind: str, path: str, read: Callable[[], object]) -> object:
        empty: dict[str, object] = {"data": "", "names": []}
        return self.calls.get(f"{kind}:{path}", empty.get(kind))


def open_tree(path: str) -> Tree:
    """Return the host at a root folder, or in a file that ``--record`` wrote.

    Raises
    ------
    InvalidError
        Neither.
    """
    if os.path.isdir(path):
        return Tree(path)
    try:
        body = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InvalidError(
            f"{path!r} is no folder, and no recording either: {error}; kvxfer doctor --record FILE "
            "makes one"
        ) from error
    calls = body.get("calls") if isinstance(body, dict) else None
    if not isinstance(calls, dict) or body.get("kvxfer_doctor") != _FORMAT:
        raise InvalidError(
            f"{path!r} is no recording that this version reads: it lacks kvxfer_doctor={_FORMAT}"
        )
    return Recorded(calls)


def _natural(name: str) -> list[tuple[int, str]]:
    """Order mlx5_2 before mlx5_10, and PCI addresses, which are hexadecimal, as they are."""
    if ":" in name:
        return [(0, name)]
    return [(int(part), "") if part.isdigit() else (0, part) for part in re.split(r"(\d+)", name)]
