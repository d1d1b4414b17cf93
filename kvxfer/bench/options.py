"""The command line of ``kvxfer bench``, and the cases it asks for."""

from __future__ import annotations

import argparse
import itertools
import math
from typing import Any

from kvxfer._help import help_texts, manual, suggest
from kvxfer._numbers import listed, one_of, parse_bytes, parse_count, parse_seconds
from kvxfer.bench.case import (
    ELEMENT_BYTES,
    MEMORIES,
    PATHS,
    TRANSPORTS,
    BenchError,
    Case,
    plain_case,
)
from kvxfer.codecs import codecs
from kvxfer.sizing.builtin import CONFIGS

DEFAULT_ADDRESS = "127.0.0.1:7710"
_WITHIN = 40.0  # seconds

_ABOUT = "Measures what transfers of KV caches reach, between two processes or two hosts."
_RUN_ABOUT = """\
Every option that takes a list runs all combinations. Lists have commas between their values; sizes
are 4096, 16KiB or 1M (powers of 1024), counts 128, 34k or 1M (powers of 1000)."""

_RUN_MORE = """\
Without --block, --blocks and --model two large transfers of 16 KiB blocks and two of one block run,
over shm and tcp.

GB/s are 1e9 bytes of KV a second, latencies microseconds. Nothing is left behind on either side,
however it ends."""
_STATUS = {
    0: "all was measured, and every byte was as it should be",
    1: "a byte was wrong",
    2: "something failed, or could not be had",
}
_EXAMPLES = (
    "{} --transport tcp --blocks 128,1k,8k,34k,112k --plot tcp.png",
    "{} --model llama-3-70b --tp 8 --tokens 32768 --codec raw,int8",
    "{} --in-flight 1,4 --threads 1,2 --json > figures.jsonl",
)


def parser() -> argparse.ArgumentParser:
    """Return the parser of all three commands."""
    top = manual(
        "kvxfer bench",
        _ABOUT,
        more="kvxfer bench COMMAND --help has a command's options.",
        status=_STATUS,
        examples=[
            "kvxfer bench local                      both sides on this host, in one command",
            "kvxfer bench serve 0.0.0.0:7710         on the one host (with KVXFER_SECRET on both)",
            "kvxfer bench run 10.0.0.5:7710          on the other",
        ],
    )
    commands = top.add_subparsers(dest="command", metavar="COMMAND", required=True)
    serve = commands.add_parser(
        "serve",
        help="have caches for the other side to fetch from",
        **help_texts(
            "Waits for `kvxfer bench run` and for `kvxfer doctor --peer`, and serves one after the "
            "other, until interrupted. Settings come from the environment: KVXFER_SECRET, "
            "KVXFER_INTERFACE and so on.",
            status={0: "it has served, with --once", 130: "it was interrupted, which is its end"},
            examples=(
                "kvxfer bench serve                                     for this host",
                "KVXFER_SECRET=... kvxfer bench serve 0.0.0.0:7710      for others",
            ),
        ),
    )
    serve.add_argument(
        "address",
        nargs="?",
        default=DEFAULT_ADDRESS,
        metavar="HOST:PORT",
        help=f"where to listen (default {DEFAULT_ADDRESS}); port 0 picks one that is free",
    )
    serve.add_argument("--once", action="store_true", help="end after the first")
    serve.add_argument("--patience", type=parse_seconds, default=None, help=argparse.SUPPRESS)
    run = commands.add_parser(
        "run",
        help="fetch from a serving side, check and time",
        **_run_help("Fetches from `kvxfer bench serve`, checks and times.", "run 10.0.0.5:7710"),
    )
    run.add_argument("address", metavar="HOST:PORT", help="where the other side listens")
    local = commands.add_parser(
        "local",
        help="both sides on this host",
        **_run_help("Starts the serving side itself, fetches, checks and times.", "local"),
    )
    for command in (run, local):
        _add_run_options(command)
    local.add_argument(
        "--no-rivals", action="store_true", help="leave NIXL out, though this Python has it"
    )
    return top


def _run_help(about: str, command: str) -> dict[str, Any]:
    return help_texts(
        f"{about}\n\n{_RUN_ABOUT}",
        more=_RUN_MORE,
        status=_STATUS,
        examples=[example.format(f"kvxfer bench {command}") for example in _EXAMPLES],
    )


def _add_run_options(command: argparse.ArgumentParser) -> None:
    what = command.add_argument_group("what to transfer")
    what.add_argument(
        "--block",
        type=listed(parse_bytes),
        metavar="SIZES",
        help="bytes of a block, each one contiguous run (default 16KiB)",
    )
    what.add_argument(
        "--blocks",
        type=listed(parse_count),
        metavar="COUNTS",
        help="blocks a transfer (default: as many as make 256 MiB)",
    )
    model = what.add_argument(
        "--model",
        type=listed(str),
        metavar="NAMES",
        help="a cache with this model's layers and heads, as llama-3-70b: a name of kvxfer size",
    )
    suggest(model, CONFIGS)
    what.add_argument(
        "--tp",
        type=listed(parse_count),
        default=[1],
        metavar="DEGREES",
        help="tensor parallelism: one rank's share of the model's heads (default 1)",
    )
    what.add_argument(
        "--tokens",
        type=listed(parse_count),
        metavar="COUNTS",
        help="tokens of the request, with --model (default 4096)",
    )
    what.add_argument(
        "--block-size",
        type=parse_count,
        default=16,
        metavar="N",
        help="tokens of a block, with --model (default 16)",
    )
    what.add_argument(
        "--dtype",
        choices=sorted(ELEMENT_BYTES),
        default="bfloat16",
        help="elements of the caches (default bfloat16)",
    )
    how = command.add_argument_group("how")
    transport = how.add_argument(
        "--transport",
        type=listed(one_of(TRANSPORTS)),
        metavar="NAMES",
        help=f"of {', '.join(TRANSPORTS)}; auto takes what agents would",
    )
    suggest(transport, TRANSPORTS)
    memory = how.add_argument(
        "--memory",
        type=listed(one_of(MEMORIES)),
        default=["host"],
        metavar="KINDS",
        help="host or gpu, on both sides (default host); the GPU is the first that "
        "CUDA_VISIBLE_DEVICES or HIP_VISIBLE_DEVICES leave",
    )
    suggest(memory, MEMORIES)
    codec = how.add_argument(
        "--codec",
        type=listed(str),
        default=["raw"],
        metavar="CODECS",
        help="encoding on the wire, as raw,int8,fp8_e4m3,auto or tiered(recent=1000)",
    )
    suggest(codec, codecs())
    path = how.add_argument(
        "--path",
        type=listed(one_of(PATHS)),
        default=["auto"],
        metavar="PATHS",
        help="staged, direct (into the blocks themselves, over RDMA; where that can't be it is "
        "staged, and says why), or auto, which chooses (default auto)",
    )
    suggest(path, PATHS)
    how.add_argument(
        "--in-flight",
        type=listed(parse_count),
        default=[1],
        metavar="COUNTS",
        help="fetches that are under way at once and share the transfer's blocks (default 1)",
    )
    how.add_argument(
        "--threads",
        type=listed(parse_count),
        default=[0],
        metavar="COUNTS",
        help="threads that pack and unpack, on each side (default: the agents' own)",
    )
    output = command.add_argument_group("measuring and output")
    output.add_argument(
        "--seconds",
        type=parse_seconds,
        default=1.5,
        metavar="S",
        help="about how long each case is timed (default 1.5)",
    )
    output.add_argument(
        "--within",
        type=parse_seconds,
        metavar="S",
        help="repeat less where all cases together would take longer than about this (default: "
        f"{_WITHIN:.0f} where neither sizes nor a model are given, else no limit)",
    )
    output.add_argument(
        "--no-verify", action="store_true", help="don't compare what arrived with what was sent"
    )
    output.add_argument(
        "--no-limits", action="store_true", help="don't measure memcpy and plain sockets beside it"
    )
    output.add_argument(
        "--json", action="store_true", help="JSON lines instead of a table: first the environment"
    )
    output.add_argument(
        "--plot", metavar="FILE", help="draw GB/s over size into FILE (.png, .svg or .pdf)"
    )


def within(options: argparse.Namespace) -> float:
    """Return the seconds that all cases together should take at most."""
    if options.within:
        return float(options.within)
    return math.inf if options.block or options.blocks or options.model else _WITHIN


def cases(options: argparse.Namespace) -> list[Case]:
    """Return what the command line asks for.

    Raises
    ------
    BenchError
        Options that don't go together.
    """
    if options.model and (options.block or options.blocks):
        raise BenchError("--model has blocks of its own: leave out --block and --blocks")
    if options.tokens and not options.model:
        raise BenchError("--tokens goes with --model; --blocks says how large other transfers are")
    if not options.model and options.tp != [1]:
        raise BenchError("--tp goes with --model")
    if options.model:
        return [
            _model_case(options, name, tp, tokens, settings)
            for name, tp, tokens in itertools.product(
                options.model, options.tp, options.tokens or [4096]
            )
            for settings in _settings(options, options.transport or ["auto"])
        ]
    transports = options.transport or ["shm", "tcp"]
    found = []
    for settings in _settings(options, transports):
        if not options.block and not options.blocks:
            shapes = [(16 << 10, 16 << 10), (64 << 10, 1)]
        else:
            shapes = [
                (block, count)
                for block in options.block or [16 << 10]
                for count in options.blocks or [max(1, (256 << 20) // block)]
            ]
        for block, count in shapes:
            if settings["in_flight"] > count:
                continue
            one = "_1block" if count == 1 else ""
            name = f"fetch_{settings['transport']}{one}"
            found.append(plain_case(name, block, count, **settings))
    if not found:
        raise BenchError("--in-flight: each fetch needs a block of its own; there are fewer blocks")
    # First what people look for, then the small.
    return found if options.block or options.blocks else sorted(found, key=lambda c: -c.bytes)


def _settings(options: argparse.Namespace, transports: list[str]) -> list[dict[str, Any]]:
    from kvxfer.codecs import Codec
    from kvxfer.errors import InvalidError

    for codec in options.codec:
        try:
            Codec.parse(codec)
        except InvalidError as error:
            raise BenchError(f"--codec: {error}") from None
    return [
        {
            "transport": transport,
            "memory": memory,
            "codec": codec,
            "path": path,
            "in_flight": in_flight,
            "threads": threads,
            "dtype": options.dtype,
        }
        for transport, memory, codec, path, in_flight, threads in itertools.product(
            transports,
            options.memory,
            options.codec,
            options.path,
            options.in_flight,
            options.threads,
        )
    ]


def _model_case(
    options: argparse.Namespace, name: str, tp: int, tokens: int, settings: dict[str, Any]
) -> Case:
    from kvxfer.errors import InvalidError
    from kvxfer.sizing.models import find_model

    try:
        model = find_model(name)
        groups = [group for group in model.groups if group.element is None]
        heads = groups[0].rank_heads(tp)
    except InvalidError as error:
        raise BenchError(f"--model: {error}") from None
    contents = {content for group in groups for _, content in group.planes}
    if len(groups) != 1 or len(contents) != 1:
        raise BenchError(
            f"--model {name}: its layers differ in shape or window, so engines keep several caches "
            "of it; bench measures one: choose a model whose layers are alike"
        )
    return Case(
        name=f"{model.name}{f' TP{tp}' if tp > 1 else ''}",
        layers=groups[0].count,
        planes=tuple(plane for plane, _ in groups[0].planes),
        heads=heads,
        content=contents.pop(),
        block_size=options.block_size,
        tokens=tokens,
        **settings,
    )
