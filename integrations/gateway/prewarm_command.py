"""``kvxfer prewarm``: put common prefixes into decode engines' caches ahead of need."""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvxfer._help import manual
from kvxfer.errors import InvalidError

from .command import (
    ADMIN_KEY,
    ENGINE_KEY,
    add_engine_arguments,
    entries_of,
)

EVERY = 60.0  # seconds
MOST_SECONDS = 3600.0
"""For which the answer of a gateway is waited: it places all prefixes before it answers."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``kvxfer prewarm``."""
    parser.add_argument(
        "prefixes",
        metavar="PREFIXES",
        help="JSON lines, each a request's body with 'prompt' or 'messages'; - reads stdin",
    )
    parser.add_argument("--gateway", metavar="URL", help="a gateway, which knows its engines")
    add_engine_arguments(parser)
    parser.add_argument("--model", metavar="NAME", help="for prefixes that name none")
    parser.add_argument(
        "--keep",
        type=float,
        default=0.0,
        metavar="S",
        help="seconds to keep them there (default 0)",
    )
    parser.add_argument(
        "--every",
        type=float,
        default=EVERY,
        metavar="S",
        help=f"seconds after which they are asked for again (default {EVERY:.0f})",
    )
    parser.add_argument("--json", action="store_true", help="print the report as JSON")


def read_prefixes(text: str, model: str | None) -> list[dict[str, Any]]:
    """Return the prefixes in JSON lines.

    Raises
    ------
    InvalidError
        A line is none.
    """
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            prefix = json.loads(line)
        except ValueError as error:
            raise InvalidError(f"line {number} is no JSON: {error}") from error
        if not isinstance(prefix, dict) or ("prompt" in prefix) == ("messages" in prefix):
            raise InvalidError(f"line {number} is no object with either 'prompt' or 'messages'")
        found.append({**({"model": model} if model else {}), **prefix})
    if not found:
        raise InvalidError("there are no prefixes")
    return found


def ask_gateway(url: str, prefixes: list[dict[str, Any]], keep: float, every: float) -> Any:  # noqa: ANN401
    """Have a gateway place them; return its report."""
    import urllib.error  # these take their time to load
    import urllib.request
    from http.client import HTTPException

    body = {"prefixes": prefixes, "keep_seconds": keep, "every_seconds": every}
    headers = {"Content-Type": "application/json"}
    if os.environ.get(ADMIN_KEY):
        headers["Authorization"] = f"Bearer {os.environ[ADMIN_KEY]}"
    request = urllib.request.Request(
        url.rstrip("/") + "/admin/prewarm", json.dumps(body).encode(), headers
    )
    try:
        with urllib.request.urlopen(request, timeout=MOST_SECONDS) as answer:
            return json.load(answer)["prefixes"]
    except urllib.error.HTTPError as error:
        raise InvalidError(f"{url}: {error.code}: {error.read()[:500]!r}") from error
    except (OSError, HTTPException, ValueError, LookupError) as error:
        raise InvalidError(f"{url}: {error}") from error


def report_text(report: list[dict[str, Any]]) -> str:
    """Return a report for people."""
    lines = []
    for prefix in report:
        lines.append(f"{prefix['tokens']:>8} tokens  {prefix['prefix']}")
        for name, found in prefix["engines"].items():
            cached = found["cached_tokens"]
            told = "" if cached is None else f", {cached} tokens were there"
            lines.append(
                f"{'':>8} {name}: {found['state']}{told} {found.get('error', '')}".rstrip()
            )
    return "\n".join(lines)


async def _directly(
    options: argparse.Namespace, prefixes: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Place them without a gateway, and keep them as long as asked."""
    import asyncio

    from .gateway import Gateway
    from .prewarm import read_prefix
    from .settings import Flow, Role, Settings

    gateway = Gateway(
        Settings(
            engines=entries_of(options),
            engines_file=options.engines,
            flow=Flow(options.flow),
            engine_key=os.environ.get(ENGINE_KEY) or None,
            canary_interval=0.0,
        )
    )
    try:
        await gateway.start()
        if not gateway.pool.usable(Role.DECODE, None):
            raise InvalidError("no decode engine answers")
        report = await gateway.prewarmer.warm([read_prefix(one) for one in prefixes])
        until = time.monotonic() + options.keep
        while time.monotonic() < until:
            await asyncio.sleep(min(options.every, max(0.0, until - time.monotonic())))
            await gateway.prewarmer.round()
            report = gateway.prewarmer.report()
        return report
    finally:
        await gateway.stop()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return the exit status."""
    parser = manual(
        "kvxfer prewarm",
        "Puts common prefixes, such as system prompts, into decode engines' caches ahead of need: "
        "through a gateway, or with engines that are named.",
        more=f"The environment has {ADMIN_KEY} for --gateway, {ENGINE_KEY} for engines.",
        status={0: "all are there", 1: "a value or file is no good", 3: "some are not there"},
        examples=[
            "kvxfer prewarm prefixes.jsonl --gateway http://127.0.0.1:8000 --keep 3600",
            "kvxfer prewarm prefixes.jsonl --prefill http://p1:8100 --decode http://d1:8200",
        ],
    )
    add_arguments(parser)
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(message)s")
    try:
        direct = bool(options.prefill or options.decode or options.engines)
        if direct == (options.gateway is not None):
            raise InvalidError("give either --gateway, or the engines with --decode and --prefill")
        if options.every <= 0:
            raise InvalidError(f"--every is {options.every:g}; it has to be greater than 0")
        source = options.prefixes
        try:
            text = sys.stdin.read() if source == "-" else Path(source).read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise InvalidError(f"can't read the prefixes {source}: {error}") from error
        prefixes = read_prefixes(text, options.model)
        if direct:
            import asyncio

            report = asyncio.run(_directly(options, prefixes))
        else:
            report = ask_gateway(options.gateway, prefixes, options.keep, options.every)
    except InvalidError as error:
        sys.stderr.write(f"kvxfer prewarm: {error}\n")
        return 1
    except ImportError as error:
        if error.name != "aiohttp":
            raise
        sys.stderr.write("kvxfer prewarm: it needs aiohttp: pip install 'kvxfer[gateway]'\n")
        return 1
    sys.stdout.write((json.dumps(report, indent=2) if options.json else report_text(report)) + "\n")
    failed = any(
        found["state"] == "failed" for prefix in report for found in prefix["engines"].values()
    )
    return 3 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
