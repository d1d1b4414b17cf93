"""``kvxfer quality``: what a codec costs a model.

It takes real K and V from a model's cache after a prompt, sends them through each codec, and
compares what the model then says with what it says with the cache as it was.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvxfer._help import manual
from kvxfer._numbers import positive
from kvxfer.codecs import Codec
from kvxfer.errors import Error

if TYPE_CHECKING:
    from kvxfer._quality_model import Model
    from kvxfer._quality_run import Passage

_CODECS = ("raw", "fp8_e4m3", "int8", "tiered(recent=256)")


class QualityError(Error):
    """Something that the command needs is missing or does not fit."""


def _parser() -> argparse.ArgumentParser:
    parser = manual(
        "kvxfer quality",
        "Measures what codecs cost a model, on K and V of its own for texts of yours: it prefills "
        "each text, sends the cache through a codec, and compares the model's answers with those "
        "that it gives on the cache as it was. Needs torch and transformers; nothing is "
        "downloaded.",
        status={0: "it was measured"},
        examples=[
            "kvxfer quality ./Qwen3-0.6B --prompts ./texts",
            "kvxfer quality ./Qwen3-0.6B --prompts book.txt --codec int8 --tokens 4096 --json",
        ],
    )
    parser.add_argument(
        "model",
        type=Path,
        metavar="MODEL",
        help="a Hugging Face folder: config.json, weights and tokenizer",
    )
    parser.add_argument(
        "--prompts", type=Path, required=True, help="a text file, or a folder of text files"
    )
    parser.add_argument(
        "--codec", action="append",
        help=f"measure this one; may be repeated (default {', '.join(_CODECS)})",
    )  # fmt: skip
    parser.add_argument(
        "--tokens", type=positive, default=1024, metavar="N", help="of a prompt (default 1024)"
    )
    parser.add_argument(
        "--continue", type=positive, default=64, metavar="M", dest="following",
        help="tokens of the text after the prompt, on which answers are compared (default 64)",
    )  # fmt: skip
    parser.add_argument(
        "--passages", type=positive, default=1, metavar="N",
        help="take up to this many passages from each file, evenly spaced (default 1)",
    )  # fmt: skip
    parser.add_argument(
        "--cache-dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16",
        help="what the caches of both sides hold (default bfloat16)",
    )  # fmt: skip
    parser.add_argument(
        "--compute-dtype", choices=("float32", "bfloat16"), default="float32",
        help="what the model computes in; bfloat16 is faster on some machines, but its rounding "
        "then is part of what is measured (default float32)",
    )  # fmt: skip
    parser.add_argument("--threads", type=positive, metavar="N", help="for the model's arithmetic")
    parser.add_argument("--layers", action="store_true", help="print figures for each layer too")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead")
    parser.add_argument("--plot", type=Path, metavar="OUT.png", help="draw it too")
    return parser


def _require(modules: Sequence[str], why: str) -> None:
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    if missing:
        raise QualityError(
            f"{why} needs {' and '.join(missing)}, which this Python does not have. This installs "
            f"what it needs:\n  {sys.executable} -m pip install 'kvxfer[quality]'"
        )


def _check_codec(codec: str) -> None:
    if Codec.parse(codec).name == "auto":
        raise QualityError("codec auto is raw or int8, as the link has it: measure those")


def _check(options: argparse.Namespace) -> None:
    """Refuse what can be refused before a model is loaded."""
    folder = options.model
    if not folder.is_dir():
        raise QualityError(f"no model in {folder}: there is no such folder")
    if not (folder / "config.json").is_file():
        raise QualityError(
            f"no model in {folder}: it has no config.json. Name a folder as save_pretrained() "
            "writes it: configuration, weights and tokenizer"
        )
    if options.plot is not None and not options.plot.absolute().parent.is_dir():
        raise QualityError(f"can't draw {options.plot}: there is no such folder")


def _load(options: argparse.Namespace) -> Model:
    import torch

    from kvxfer._quality_model import Model

    if options.threads is not None:
        torch.set_num_threads(options.threads)
    try:
        return Model(options.model, options.cache_dtype, options.compute_dtype)
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise QualityError(f"can't load the model in {options.model}: {error}") from error


def _passages(options: argparse.Namespace, model: Model, files: Sequence[Path]) -> list[Passage]:
    from kvxfer._quality_texts import cut

    limit = model.describe()["max_tokens"]
    if limit is not None and options.tokens + options.following > limit:
        raise QualityError(
            f"--tokens {options.tokens} and --continue {options.following} are more than the "
            f"{limit} tokens that this model can take"
        )
    found: list[Passage] = []
    short = []
    for path in files:
        pieces = cut(
            path, model.tokenize, model.prefix(), options.tokens, options.following,
            options.passages,
        )  # fmt: skip
        if not pieces:
            short.append(path.name)
        found += pieces
    needed = f"{options.tokens} + {options.following} tokens"
    if not found:
        raise QualityError(
            f"too short for {needed}: {', '.join(short)}. Give longer texts or fewer --tokens"
        )
    if short:
        print(f"left out, for they are shorter than {needed}: {', '.join(short)}", file=sys.stderr)
    return found


def _progress(text: str) -> None:
    if sys.stderr.isatty():
        width = shutil.get_terminal_size().columns - 1
        sys.stderr.write("\r\x1b[K" + text[:width])
        sys.stderr.flush()


def _settings(options: argparse.Namespace, passages: Sequence[Passage]) -> dict[str, Any]:
    return {
        "prompt_tokens": options.tokens,
        "following_tokens": options.following,
        "cache_dtype": options.cache_dtype,
        "compute_dtype": options.compute_dtype,
        "passages": [
            {"text": passage.text, "first_token": passage.first_token} for passage in passages
        ],
    }


def _run(options: argparse.Namespace) -> None:
    codecs = tuple(dict.fromkeys(options.codec or _CODECS))
    for codec in codecs:
        _check_codec(codec)
    _check(options)
    _require(("numpy", "torch", "transformers"), "kvxfer quality")
    if options.plot is not None:
        _require(("matplotlib",), "--plot")

    from kvxfer import _quality_report as report
    from kvxfer._quality_codec import RoundTrip
    from kvxfer._quality_run import measure
    from kvxfer._quality_texts import files_of

    files = files_of(options.prompts)
    _progress(f"loading {options.model}")
    model = _load(options)
    passages = _passages(options, model, files)
    try:
        with RoundTrip(options.cache_dtype) as round_trip:
            results = measure(model, passages, codecs, round_trip, _progress)
    finally:
        _progress("")
    about = {"name": options.model.resolve().name, **model.describe()}
    if options.json:
        record = report.record(about, _settings(options, passages), results)
        print(json.dumps(record, indent=1))
    else:
        print(
            f"{about['name']}: {about['layers']} layers, {about['attention_heads']} attention "
            f"heads, {about['kv_heads']} kv heads. {len(passages)} passages: "
            f"{options.tokens} tokens of prompt, {options.following} compared. The cache holds "
            f"{options.cache_dtype}, the model computes in {options.compute_dtype}.\n"
        )
        print(report.table(results))
        if options.layers:
            print("\n" + report.layer_table(results))
    if options.plot is not None:
        report.plot(results, about["name"], options.plot)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure; return the exit status."""
    options = _parser().parse_args(arguments)
    try:
        _run(options)
    except Error as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
