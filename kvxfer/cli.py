"""The command line: ``kvxfer COMMAND`` and ``python -m kvxfer COMMAND``.

A command is a module with ``main(arguments) -> exit status``. It is imported when it is asked for,
so that ``--help`` needs none of what the commands need.
"""

from __future__ import annotations

import argparse
import errno
import importlib
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Command:
    """What ``--help`` says of a command, and where it is."""

    module: str
    summary: str


COMMANDS = {
    "demo": Command("kvxfer.demo", "move a KV cache between two processes and check every byte"),
    "doctor": Command(
        "kvxfer.doctor.command", "whether this host is set up for transfers, and what would hurt"
    ),
    "size": Command("kvxfer.sizing.command", "how much KV a model has, and how long links take"),
    "bench": Command("kvxfer.bench.command", "measure what transfers reach, here or to a peer"),
    "trace": Command("kvxfer.trace", "show what happened in a transfer, and when"),
    "quality": Command("kvxfer.quality", "measure what a codec costs a model, on real K and V"),
    "plan": Command(
        "kvxfer.serving.plan_command", "how many engines of which kind a load needs, and why"
    ),
    "gateway": Command(
        "kvxfer.integrations.gateway.command",
        "one address for prefill and decode engines",
    ),
    "prewarm": Command(
        "kvxfer.integrations.gateway.prewarm_command",
        "put common prefixes into decode engines' caches ahead of need",
    ),
    "simulate": Command(
        "kvxfer.serving.simulate_command", "what a fleet does with a trace, by where it prefills"
    ),
    "completion": Command("kvxfer.completion", "have bash, zsh or fish complete what you type"),
}


def _parser() -> argparse.ArgumentParser:
    width = max(len(name) for name in COMMANDS)
    listed = "\n".join(f"  {name:<{width}}  {it.summary}" for name, it in COMMANDS.items())
    parser = argparse.ArgumentParser(
        prog="kvxfer",
        usage="kvxfer [--version] COMMAND [option ...]",
        description="Moves KV caches from engines that prefill to engines that decode.",
        epilog=f"commands:\n{listed}\n\nkvxfer COMMAND --help has a command's options.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="store_true", help="print the version and exit")
    parser.add_argument("command", nargs="?", metavar="COMMAND", help="one of the commands below")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; return the exit status."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # it was closed: as good as thrown away
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115 - until the process ends
    if "_ARGCOMPLETE" in os.environ:  # a shell asks how its command line may go on
        from kvxfer.completion import complete

        complete(COMMANDS)
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.version:
        from kvxfer import __version__

        print(f"kvxfer {__version__}")
        return 0
    if options.command is None:
        parser.print_help(sys.stderr)
        return 2
    if options.command == "help":
        return main([*options.arguments, "--help"])
    if options.command not in COMMANDS:
        parser.error(f"there is no command {options.command!r}; there are: {', '.join(COMMANDS)}")
    module = importlib.import_module(COMMANDS[options.command].module)
    try:
        status: int = module.main(options.arguments)
        sys.stdout.flush()
    except KeyboardInterrupt:
        print("Interrupted.", file=sys.stderr)
        return 130
    except OSError as error:
        if error.errno not in (errno.EPIPE, errno.ENOSPC) or error.filename is not None:
            raise
        # What is still buffered must not raise again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if error.errno == errno.EPIPE:
            return 141  # whoever read our output has enough
        print(f"kvxfer: the output can't be written: {error.strerror}", file=sys.stderr)
        return 2
    return status


if __name__ == "__main__":
    sys.exit(main())
