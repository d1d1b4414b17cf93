"""``kvxfer gateway``: one address in front of prefill and decode engines."""

from __future__ import annotations

import argparse
import dataclasses
import logging
import os
import signal
import sys
from collections.abc import Callable, Sequence
from typing import Literal

from kvxfer._help import manual
from kvxfer._numbers import format_bytes, parse_bytes
from kvxfer.errors import InvalidError

from .settings import Entry, Flow, Role, Settings

KEYS = "KVXFER_GATEWAY_KEYS"
ENGINE_KEY = "KVXFER_ENGINE_KEY"
ADMIN_KEY = "KVXFER_ADMIN_KEY"
_NUMBERS: tuple[tuple[str, Callable[[str], float], str], ...] = (
    ("prefill_rate", float, "tokens/s of one prefill engine; learnt if not given"),
    ("decode_rate", float, "tokens/s that a decode engine prefills; learnt if not given"),
    ("chunk_tokens", int, "max_num_batched_tokens of the decode engines"),
    ("max_inflight", int, "requests at a time for each decode engine"),
    ("max_queue", int, "requests that may wait"),
    ("queue_timeout", float, "seconds that they may wait"),
    ("max_body", parse_bytes, "of a request"),
    ("connect_timeout", float, "seconds until a connection to an engine is there"),
    ("prefill_timeout", float, "seconds for a prefill engine's answer"),
    ("first_byte_timeout", float, "seconds for a decode engine's first byte"),
    ("idle_timeout", float, "seconds between two pieces of an answer"),
    ("abort_grace", float, "seconds that a request whose client left stays with a decode engine"),
    ("watch_interval", float, "seconds between two looks at an engine"),
    ("health_timeout", float, "seconds that such a look may take"),
    ("breaker_failures", int, "failures in a row after which an engine is left alone"),
    ("breaker_cooldown", float, "seconds for which it is, doubled each time"),
    ("canary_interval", float, "seconds between two proofs that a pair moves KV; 0: none"),
    ("register_ttl", float, "seconds without a heartbeat after which an engine is drained"),
    ("drain_timeout", float, "seconds after which a draining engine is removed all the same"),
    ("block_tokens", int, "tokens of a block in the prefix index"),
    ("prefix_tokens", int, "most tokens remembered as cached, for each engine"),
)


def add_engine_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what says which engines there are, and how requests reach them."""
    for role in Role:
        parser.add_argument(
            f"--{role.value}",
            action="append",
            default=[],
            metavar="URL",
            help=f"of a {role.value} engine, as http://HOST:PORT; may be repeated",
        )
    parser.add_argument(
        "--engines", metavar="FILE", help="the engines as JSON, read again when it changes"
    )
    parser.add_argument(
        "--kv-events",
        action="append",
        default=[],
        metavar="URL=tcp://HOST:PORT",
        help="where the engine at URL publishes its KV events",
    )
    parser.add_argument(
        "--flow",
        choices=[flow.value for flow in Flow],
        default=Flow.SERIAL.value,
        help="whether the decode engine is asked after the prefill engine or at the same time "
        "(default serial)",
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``kvxfer gateway``."""
    add_engine_arguments(parser)
    parser.add_argument(
        "--host", default="127.0.0.1", help="address to listen on (default %(default)s)"
    )
    parser.add_argument(
        "--port",
        type=_port,
        default=8000,
        metavar="N",
        help="port to listen on; 0 picks one that is free (default %(default)s)",
    )
    parser.add_argument(
        "--setup", metavar="FILE", help="that of `kvxfer plan`: its slo, link and policy are used"
    )
    parser.add_argument(
        "--ttft", type=float, metavar="S", help="seconds to the first token that are promised"
    )
    parser.add_argument("--tpot", type=float, metavar="S", help="seconds a token that are promised")
    parser.add_argument(
        "--threshold",
        metavar="N",
        help="uncached tokens from which on prefill is remote, or `auto`",
    )
    parser.add_argument(
        "--link", type=float, metavar="BYTES/S", help="as measured; needs --kv-bytes"
    )
    parser.add_argument("--kv-bytes", type=float, metavar="N", help="of a token on the wire")
    parser.add_argument(
        "--tokenize",
        action="store_true",
        help="ask an engine for each prompt's tokens instead of estimating them",
    )
    for name, kind, about in _NUMBERS:
        default = getattr(Settings(), name)
        shown = "" if default is None else f" (default {_shown(default, kind)})"
        parser.add_argument(
            "--" + name.replace("_", "-"),
            type=kind,
            default=default,
            metavar={parse_bytes: "SIZE", int: "N"}.get(kind, "S" if "second" in about else "RATE"),
            help=about + shown,
        )
    parser.add_argument("--verbose", action="store_true", help="log each decision")


def settings_of(options: argparse.Namespace) -> Settings:
    """Return the settings that options and environment ask for.

    Raises
    ------
    InvalidError
        They make no sense.
    """
    settings = Settings(
        engines=entries_of(options),
        engines_file=options.engines,
        flow=Flow(options.flow),
        tokenize=options.tokenize,
        api_keys=frozenset(os.environ.get(KEYS, "").split()),
        engine_key=os.environ.get(ENGINE_KEY) or None,
        admin_key=os.environ.get(ADMIN_KEY) or None,
        **{name: getattr(options, name) for name, _, _ in _NUMBERS},
    )
    slo, policy, link = settings.slo, settings.policy, settings.link
    if options.setup is not None:
        from kvxfer.serving.setup_file import read_setup  # slow to load

        setup = read_setup(options.setup)
        slo, policy, link = setup.slo, setup.policy, setup.link
    given = {name: getattr(options, name) for name in ("ttft", "tpot")}
    slo = dataclasses.replace(slo, **{name: n for name, n in given.items() if n is not None})
    if options.threshold is not None:
        policy = dataclasses.replace(policy, threshold=_threshold(options.threshold))
    if (options.link is None) != (options.kv_bytes is None):
        raise InvalidError("--link and --kv-bytes say together what a transfer costs: give both")
    if options.link is not None:
        from kvxfer.serving import Link

        link = Link(options.link, options.kv_bytes)
    if not settings.engines and settings.engines_file is None and settings.admin_key is None:
        raise InvalidError(
            f"no engines: give --prefill and --decode, --engines FILE, or set {ADMIN_KEY} so that "
            "they can register"
        )
    return dataclasses.replace(settings, slo=slo, policy=policy, link=link)


def entries_of(options: argparse.Namespace) -> tuple[Entry, ...]:
    """Return the engines that the options name."""
    events = {}
    for text in options.kv_events:
        url, _, address = text.partition("=")
        events[url.rstrip("/")] = address
    entries = [
        Entry(url.rstrip("/"), role, events.pop(url.rstrip("/"), None))
        for role, urls in ((Role.PREFILL, options.prefill), (Role.DECODE, options.decode))
        for url in urls
    ]
    if events:
        raise InvalidError(f"--kv-events for {', '.join(events)}, which are not among the engines")
    return tuple(entries)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return the exit status."""
    parser = manual(
        "kvxfer gateway",
        "One address in front of prefill and decode engines: it takes requests as an engine does, "
        "has their prefill done where that is faster, and sends them on. Engines that fail are "
        "left alone, and tried again.",
        more=f"Keys are read from the environment: {KEYS} (those of clients, separated by "
        f"spaces), {ENGINE_KEY} (what the engines want), {ADMIN_KEY} (opens /admin).",
        status={0: "it was told to end", 1: "it could not start, or a setting is no good"},
        examples=[
            "kvxfer gateway --prefill http://p1:8100 --decode http://d1:8200",
            "kvxfer gateway --engines engines.json --host 0.0.0.0 --port 8000 --flow concurrent",
        ],
    )
    add_arguments(parser)
    options = parser.parse_args(arguments)
    logging.basicConfig(
        level=logging.DEBUG if options.verbose else logging.INFO,
        format="%(asctime)s %(levelname)s %(message)s",
    )
    import asyncio  # slow to load

    for noisy in ("asyncio", "aiohttp"):
        logging.getLogger(noisy).setLevel(logging.INFO)
    try:
        settings = settings_of(options)
        asyncio.run(_run(settings, options.host, options.port))
    except (InvalidError, OSError) as error:
        sys.stderr.write(f"kvxfer gateway: {error}\n")
        return 1
    except ImportError as error:
        if error.name != "aiohttp":
            raise
        sys.stderr.write("kvxfer gateway: it needs aiohttp: pip install 'kvxfer[gateway]'\n")
        return 1
    return 0


async def _run(settings: Settings, host: str, port: int) -> None:
    import asyncio

    from .app import serve

    runner, bound = await serve(settings, host, port)
    logging.getLogger("kvxfer.gateway").info("listening on http://%s:%d", host, bound)
    ended = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, ended.set)
    try:
        await ended.wait()
    finally:
        await runner.cleanup()


def _port(text: str) -> int:
    if not text.isdecimal() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is no port: 0 to 65535")
    return int(text)


def _shown(default: float, kind: Callable[[str], object]) -> str:
    if kind is parse_bytes:
        return format_bytes(default)
    return f"{default:.9g}"


def _threshold(text: str) -> int | Literal["auto"]:
    if text == "auto":
        return "auto"
    try:
        return int(text)
    except ValueError as error:
        raise InvalidError(f"--threshold is {text!r}; give tokens or 'auto'") from error


if __name__ == "__main__":
    sys.exit(main())
