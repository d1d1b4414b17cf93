"""``kvxfer size``: how much KV a request has, and what links make of it."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import textwrap
from collections.abc import Sequence

from kvxfer._help import manual, suggest
from kvxfer._numbers import positive
from kvxfer.codecs import codecs
from kvxfer.errors import InvalidError
from kvxfer.sizing.builtin import CONFIGS

_ABOUT = """\
Says how many bytes of KV cache a request of a model has, by element type and codec, how long
links take to carry them from the prefill to the decode side, and up to which prefill rate that
time can be hidden by sending each layer as soon as it is computed."""
_MORE = """\
built-in models:
  {models}

Bytes are exact but for chunk headers (64 bytes in 100 KiB and more). Rates are nameplates: what a
link of yours carries, kvxfer bench measures; give that with --link."""


def _parser() -> argparse.ArgumentParser:
    parser = manual(
        "kvxfer size",
        _ABOUT,
        more=_MORE.format(models=_wrapped(list(CONFIGS))),
        status={0: "all is said"},
        examples=[
            "kvxfer size llama-3-70b --tokens 32k --tp 8",
            "kvxfer size ./my-model/config.json --codec int8 "
            "--codec 'tiered(recent=1000, codec=int8)'",
            "kvxfer size deepseek-r1 --link lab=3.8GB/s --prefill-rate 20000",
        ],
    )
    model = parser.add_argument(
        "model", nargs="?", metavar="MODEL", help="config.json, the folder it is in, or a name"
    )
    suggest(model, CONFIGS)
    parser.add_argument("--list", action="store_true", help="print the built-in names and exit")
    parser.add_argument(
        "--tokens",
        type=_tokens,
        default=32768,
        metavar="N",
        help="of the prompt; 1k are 1024 (default 32k)",
    )
    parser.add_argument(
        "--tp",
        type=positive,
        default=1,
        metavar="N",
        help="tensor-parallel degree (default 1); kv heads are replicated beyond their number",
    )
    parser.add_argument(
        "--links",
        type=positive,
        metavar="N",
        help="links that the ranks of an engine share (default: each has its own)",
    )
    parser.add_argument(
        "--dtype",
        action="append",
        metavar="TYPE",
        help="element type of the cache: bf16, fp16, fp8, ... (default: the model's, and fp8); "
        "may be repeated",
    )
    codec = parser.add_argument(
        "--codec",
        action="append",
        metavar="CODEC",
        help="encoding on the wire, with options if need be (default: raw, int8, fp8_e4m3); may be "
        "repeated",
    )
    suggest(codec, codecs())
    parser.add_argument(
        "--link",
        action="append",
        metavar="[NAME=]RATE",
        help="a link instead of the usual ones: lab=3.8GB/s, 50Gbit/s; may be repeated",
    )
    parser.add_argument(
        "--prefill-rate",
        type=_rate,
        metavar="TOKENS",
        help="tokens a second that an engine prefills: adds what is left of a transfer after it",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def _wrapped(names: list[str]) -> str:
    width = min(88, shutil.get_terminal_size().columns - 4)
    return "\n  ".join(textwrap.wrap(", ".join(names), width, break_on_hyphens=False))


def _tokens(text: str) -> int:
    thousands = text[-1:] in ("k", "K")
    digits = text[:-1] if thousands else text
    value = int(digits) << (10 if thousands else 0) if digits.isdecimal() else 0
    if not 1 <= value < 1 << 32:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of tokens, as 4096 or 32k")
    return value


def _rate(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of tokens a second")
    return value


def _run(options: argparse.Namespace) -> str:
    # Here, for these take their time to load, which --help need not.
    from kvxfer.codecs import Codec
    from kvxfer.sizing.estimate import estimates
    from kvxfer.sizing.links import NOMINAL, parse_link
    from kvxfer.sizing.models import element_name, find_model

    model = find_model(options.model)
    links = [parse_link(text) for text in options.link] if options.link else list(NOMINAL)
    rows = estimates(
        model,
        options.tokens,
        tp=options.tp,
        num_links=options.links,
        dtypes=[element_name(text) for text in options.dtype or []],
        codecs=[Codec.parse(text) for text in options.codec or []],
        links=links,
        prefill_rate=options.prefill_rate,
    )
    if options.json:
        record = {
            "model": model.name,
            "tokens": options.tokens,
            "tp": options.tp,
            "links": options.links or options.tp,
            "notes": list(model.notes),
            "rows": [row.record() for row in rows],
        }
        return json.dumps(record, indent=2)
    from kvxfer.sizing.report import report

    return report(model, options.tokens, options.tp, rows, options.prefill_rate)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return the exit status."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.list:
        sys.stdout.write("\n".join(CONFIGS) + "\n")
        return 0
    if options.model is None:
        parser.error("name a MODEL: a config.json, the folder it is in, or a built-in name")
    try:
        text = _run(options)
    except InvalidError as error:
        sys.stderr.write(f"kvxfer size: {error}\n")
        return 2
    sys.stdout.write(text + "\n")
    return 0
