"""Passages for ``kvxfer quality``, cut out of text files."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from kvxfer._quality_run import Passage
from kvxfer.errors import InvalidError


def files_of(prompts: Path) -> list[Path]:
    """Return the file, or a folder's files in the order of their names."""
    if prompts.is_file():
        return [prompts]
    if not prompts.is_dir():
        raise InvalidError(f"no prompts in {prompts}: there is no such file or folder")
    found = sorted(
        path for path in prompts.iterdir() if path.is_file() and not path.name.startswith(".")
    )
    if not found:
        raise InvalidError(f"no prompts in {prompts}: put text files there, or name one file")
    return found


def cut(
    path: Path,
    tokenize: Callable[[str], Sequence[int]],
    prefix: Sequence[int],
    prompt_tokens: int,
    following: int,
    passages: int,
) -> list[Passage]:
    """Cut up to so many passages that don't overlap from a file, at equal distances.

    Empty for a file too short for one. `prefix` is put before each passage and is part of its
    prompt.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise InvalidError(f"{path} is not text in UTF-8: {error}") from None
    tokens = tokenize(text)
    needed = prompt_tokens - len(prefix) + following
    count = min(passages, len(tokens) // needed)
    room = len(tokens) - needed
    found = []
    for number in range(count):
        begin = room * number // max(count - 1, 1)
        piece = [*prefix, *tokens[begin : begin + needed]]
        found.append(Passage(path.name, begin, piece[:prompt_tokens], piece[prompt_tokens:]))
    return found
