"""Help texts of one form: what a command does, its options, exit status, examples."""

from __future__ import annotations

import argparse
import shutil
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

_USUAL = {2: "it was not understood, or could not be carried out", 130: "it was interrupted"}


def manual(
    prog: str,
    about: str,
    *,
    examples: Sequence[str],
    status: Mapping[int, str],
    more: str = "",
) -> argparse.ArgumentParser:
    """Return a parser whose help says all that a manual page would: see `help_texts`."""
    texts = help_texts(about, examples=examples, status=status, more=more)
    return argparse.ArgumentParser(prog=prog, **texts)


def help_texts(
    about: str, *, examples: Sequence[str], status: Mapping[int, str], more: str = ""
) -> dict[str, Any]:
    """Return those arguments of a parser that are its help.

    Parameters
    ----------
    about
        What the command does. A paragraph is filled unless one of its lines is indented.
    examples
        Command lines, with what they do where that is not plain.
    status
        What the exit status means; 2 and 130 need not be said.
    more
        What else there is to know, behind the options.
    """
    meanings = {**_USUAL, **status}
    sections = [
        *([_filled(more)] if more else []),
        "exit status:\n" + "\n".join(f"  {code:<3}  {meanings[code]}" for code in sorted(meanings)),
        "examples:\n" + "\n".join(f"  {line}" for line in examples),
    ]
    return {
        "description": _filled(about),
        "epilog": "\n\n".join(sections),
        "formatter_class": argparse.RawDescriptionHelpFormatter,
    }


def suggest(action: argparse.Action, words: Iterable[str]) -> None:
    """Have shells complete the values of an option with these words, also behind a comma."""

    def complete(prefix: str, **_: object) -> list[str]:
        before = prefix[: prefix.rfind(",") + 1]
        return [before + word for word in words]

    vars(action)["completer"] = complete  # argcomplete's


def _filled(text: str) -> str:
    paragraphs = textwrap.dedent(text).strip("\n").split("\n\n")
    width = min(88, shutil.get_terminal_size().columns - 2)  # argparse's own measure
    return "\n\n".join(
        paragraph if "\n  " in f"\n{paragraph}" else textwrap.fill(paragraph, width)
        for paragraph in paragraphs
    )
