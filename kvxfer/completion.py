"""``kvxfer completion SHELL``, and what a shell gets when it asks how a command line may go on.

argcomplete does the work. Commands are completed from the parsers that they make themselves, so
what can be completed is what can be given.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Mapping, Sequence
from typing import NoReturn, Protocol

from kvxfer._help import manual

_SHELLS = ("bash", "zsh", "fish")
_ABOUT = """\
Prints what makes a shell complete commands, options and their values. Put it where the shell reads
it at its start. Needs argcomplete."""
_EXAMPLES = (
    "echo 'eval \"$(kvxfer completion bash)\"' >> ~/.bashrc",
    "echo 'eval \"$(kvxfer completion zsh)\"' >> ~/.zshrc",
    "kvxfer completion fish > ~/.config/fish/completions/kvxfer.fish",
)


class _Command(Protocol):
    @property
    def module(self) -> str: ...


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return the exit status."""
    parser = manual(
        "kvxfer completion",
        _ABOUT,
        status={0: "it was printed", 2: "argcomplete is missing, or the shell is not known"},
        examples=_EXAMPLES,
    )
    parser.add_argument("shell", choices=_SHELLS, help="the shell that will complete")
    options = parser.parse_args(arguments)
    try:
        from argcomplete import shell_integration
    except ImportError:
        sys.stderr.write(
            f"kvxfer completion: it needs argcomplete. This installs it:\n  {sys.executable} -m "
            "pip install 'kvxfer[completion]'\n"
        )
        return 2
    sys.stdout.write(shell_integration.shellcode(["kvxfer"], shell=options.shell) + "\n")
    return 0


def complete(commands: Mapping[str, _Command]) -> NoReturn:
    """Tell the shell that started us how its command line may go on, and end the process."""
    try:
        _complete(commands)
    except Exception:  # noqa: BLE001 - a shell that gets no answer completes nothing, which is fine
        pass
    os._exit(1)


def _complete(commands: Mapping[str, _Command]) -> None:
    import argcomplete
    from argcomplete.lexers import split_line

    words: list[str] = split_line(os.environ["COMP_LINE"], int(os.environ["COMP_POINT"]))[3]

    def answer(parser: argparse.ArgumentParser, given: Sequence[str]) -> None:
        # How many words stand before those that the parser is for.
        os.environ["_ARGCOMPLETE"] = str(len(words) - len(given))
        argcomplete.autocomplete(parser)

    if len(words) == 1:
        parser = argparse.ArgumentParser()
        parser.add_argument("--version", action="store_true")
        parser.add_argument("command", choices=list(commands))
        answer(parser, [])
        return

    def parse_args(self: argparse.ArgumentParser, args: Sequence[str], *_: object) -> NoReturn:
        answer(self, args)
        raise AssertionError("argcomplete ends the process")

    argparse.ArgumentParser.parse_args = parse_args  # type: ignore[method-assign,assignment]
    importlib.import_module(commands[words[1]].module).main(words[2:])
