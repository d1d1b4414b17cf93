"""The demo: two processes, and a request's KV moved from one's cache into the other's.

``python -m kvxfer.demo`` needs NumPy and nothing else. It exits with 1 if a single byte differs.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kvxfer._help import manual
from kvxfer._numbers import positive
from kvxfer._progress import ProgressLine
from kvxfer.config import Config
from kvxfer.errors import Error

if TYPE_CHECKING:
    from kvxfer._demo_run import Result

_ROW = "{:<18} {:<9} {:>8} {:>8} {:>6} {:>9}  {:<5}  {}"
_HEADER = _ROW.format(
    "cache", "transport", "bytes", "seconds", "GB/s", "of memcpy", "exact", "path"
)
_MODELS = ("llama-3-8b", "llama-3-70b-tp8", "deepseek-r1")
_TRANSPORTS = ("shm", "tcp")


def _parser() -> argparse.ArgumentParser:
    parser = manual(
        "kvxfer demo",
        "Moves a request's KV cache between two processes that store it in different ways, over "
        "shared memory and TCP, and compares every byte with what NumPy computes. It takes about "
        "2 GiB of memory and some seconds. GB/s are 1e9 bytes a second.",
        status={0: "every byte was as it should be", 1: "a byte differed"},
        examples=[
            "kvxfer demo",
            "kvxfer demo --model deepseek-r1 --transport tcp --tokens 1000",
            "kvxfer demo --json",
        ],
    )
    parser.add_argument(
        "--model", action="append", choices=_MODELS, help="only this cache; may be repeated"
    )
    parser.add_argument(
        "--transport", action="append", choices=_TRANSPORTS, help="only this one; may be repeated"
    )
    parser.add_argument(
        "--tokens", type=positive, default=4096, metavar="N", help="of the request (default 4096)"
    )
    parser.add_argument(
        "--repeat", type=positive, default=3, metavar="N", help="timed fetches (default 3)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object a line")
    return parser


def _available_bytes() -> int | None:
    """Return how much memory the kernel thinks is to be had; None where it doesn't say."""
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) << 10
    except OSError:
        pass  # then the demo finds out by trying
    return None


def _row(result: Result) -> str:
    return _ROW.format(
        result.model,
        result.transport,
        f"{result.bytes / 2**20:.0f} MiB" if result.bytes >= 10 << 20 else f"{result.bytes}",
        f"{result.median_seconds:.4f}",
        f"{result.gbps:.2f}",
        f"{result.share_of_memcpy:.0%}",
        "NO" if result.differences else "yes",
        result.path,
    )


def _intro(tokens: int) -> str:
    return f"""\
Two processes, prefill-0 and decode-0, each with a paged KV cache: decode-0 fetches a request
of {tokens} tokens. The sides differ on purpose: prefill-0 has blocks of 16 tokens, stored head
by head, decode-0 blocks of 32, stored token by token (MLA has no heads: only the block size).
"""


def _closing(results: Sequence[Result]) -> str:
    wrong = [difference for result in results for difference in result.differences]
    if wrong:
        shown = "\n".join(f"  {difference}" for difference in wrong[:10])
        more = f"\n  and {len(wrong) - 10} more" if len(wrong) > 10 else ""
        return (
            f"\nBYTES DIFFER from what NumPy computes:\n{shown}{more}\n"
            "This must not happen. Please report it, with this output."
        )
    verified = ", with verification of every chunk" if Config().digest else ", without digests"
    short = results[0].short_tokens
    reasons = {result.transport: result.why for result in results}
    why = "\n".join(f"  {name:<11} because {reason}" for name, reason in reasons.items())
    return f"""
Every byte is what NumPy computes from the producer's cache, also of a second fetch of {short}
tokens; the rest of a last block is zero, and blocks that nobody asked for are as they were.
  seconds     median of fetch() to the end of wait(){verified}
  of memcpy   100% is one thread's memcpy of as many bytes, with nothing rearranged
  staged      through decode-0's staging arena; over shm the producer packs right into that
{why}

Next: README.md has the same in fifteen lines of your own code; --help has this demo's options."""


def _run(options: argparse.Namespace) -> int:
    # Here, for these need numpy.
    from kvxfer import _demo_kv as kv
    from kvxfer import _demo_run as demo

    models = options.model or _MODELS
    transports = options.transport or _TRANSPORTS
    needed = max(demo.needed_bytes(kv.MODELS[model], options.tokens) for model in models)
    available = _available_bytes()
    if available is not None and needed > available:
        raise demo.DemoError(
            f"this needs about {needed / 2**30:.1f} GiB of memory and {available / 2**30:.1f} GiB "
            "are available: choose fewer --tokens, or a --model with a smaller cache"
        )
    line = ProgressLine(sys.stdout, not options.json)
    if not options.json:
        print(_intro(options.tokens))
        print(_HEADER, flush=True)
    results = []
    try:
        for result in demo.run(models, transports, options.tokens, options.repeat, line):
            line.clear()
            print(json.dumps(result.record()) if options.json else _row(result), flush=True)
            results.append(result)
    finally:
        line.clear()
    if not options.json:
        print(_closing(results))
    return 1 if any(result.differences for result in results) else 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the demo; return the exit status."""
    options = _parser().parse_args(arguments)
    try:
        import numpy as np  # noqa: F401 - only whether it is there
    except ImportError:
        print(
            f"The demo needs NumPy. This installs it:\n  {sys.executable} -m pip install numpy",
            file=sys.stderr,
        )
        return 2
    from kvxfer._demo_run import DemoError

    try:
        return _run(options)
    except KeyboardInterrupt:
        print("Interrupted; the other process has ended too.", file=sys.stderr)
        return 130
    except (DemoError, Error) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except MemoryError:
        print("error: out of memory: choose fewer --tokens", file=sys.stderr)
        return 2
    except BrokenPipeError:
        # Whoever read our output has enough. What is still buffered must not raise again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


if __name__ == "__main__":
    sys.exit(main())
