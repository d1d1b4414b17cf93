"""``kvxfer plan watch``: reads live metrics, and advises a ratio of engines as the load changes."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from kvxfer.errors import InvalidError
from kvxfer.serving.advice import Advice, Kinds, Limits, Memory, Why, advise
from kvxfer.serving.checks import positive
from kvxfer.serving.live import Fleet
from kvxfer.serving.prometheus import CONTENT_TYPE, Registry
from kvxfer.serving.setup_file import Setup, read_setup
from kvxfer.serving.sim import Role

_LIMITS = {
    "min_prefill": ("N", "prefill engines that there are at least"),
    "min_decode": ("N", "decode engines that there are at least"),
    "headroom": ("SHARE", "how busy engines are to be at most"),
    "consolidate": ("SHARE", "how busy the others may be when one is taken away"),
    "cooldown_up": ("S", "seconds after a change until more are advised"),
    "cooldown_down": ("S", "seconds after a change until fewer are advised"),
    "warmup": ("S", "seconds that are looked at before the first advice, and after a change"),
    "window": ("S", "seconds over which the load is averaged"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``kvxfer plan watch``."""
    parser.add_argument(
        "setup", metavar="SETUP", help="JSON file with engines, link and SLO, as for `kvxfer plan`"
    )
    parser.add_argument(
        "--prefill",
        action="append",
        default=[],
        metavar="URL",
        help="of a prefill engine; may be repeated",
    )
    parser.add_argument(
        "--decode",
        action="append",
        default=[],
        metavar="URL",
        help="of a decode engine; may be repeated",
    )
    parser.add_argument(
        "--gpus", type=int, required=True, metavar="N", help="how many there are at most"
    )
    parser.add_argument(
        "--interval",
        type=float,
        default=10.0,
        metavar="S",
        help="seconds between two looks (default 10)",
    )
    parser.add_argument(
        "--count", type=int, metavar="N", help="looks after which it ends (default: none)"
    )
    parser.add_argument(
        "--listen", metavar="HOST:PORT", help="serve the advice as metrics; port 0: any"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    defaults = {field.name: field.default for field in dataclasses.fields(Limits)}
    for name, (metavar, about) in _LIMITS.items():
        parser.add_argument(
            "--" + name.replace("_", "-"),
            type=int if metavar == "N" else float,
            default=defaults[name],
            metavar=metavar,
            help=f"{about} (default {defaults[name]:g})",
        )


class Exposition:
    """The advice as metrics, ``kvxfer_plan_...``."""

    def __init__(self) -> None:
        registry = self._registry = Registry("kvxfer_plan_")
        self._engines = registry.gauge("engines", "Healthy engines.", "role")
        self._advised = registry.gauge("advised_engines", "Engines that there should be.", "role")
        self._needed = registry.gauge("needed_engines", "Engines that the load keeps busy.", "role")
        self._ratio = registry.gauge("advised_ratio", "Prefill engines for each decode engine.")
        self._why = registry.gauge("reason", "1 for the reason of the advice.", "reason")
        self._looks = registry.counter("looks", "Looks at the engines.")
        self.text = registry.render()

    def update(self, advice: Advice, engines: tuple[int, int]) -> None:
        """Show an advice."""
        for role, now, wanted, needed in (
            ("prefill", engines[0], advice.prefill, advice.needed_prefill),
            ("decode", engines[1], advice.decode, advice.needed_decode),
        ):
            self._engines.set(role, to=now)
            self._advised.set(role, to=wanted)
            if needed is not None:
                self._needed.set(role, to=needed)
        self._ratio.set(to=advice.prefill / max(1, advice.decode))
        for why in Why:
            self._why.set(why.value, to=float(why is advice.why))
        self._looks.add()
        self.text = self._registry.render()


class Watch:
    """Looks, advises, remembers."""

    def __init__(self, setup: Setup, limits: Limits, fleet: Fleet) -> None:
        self._kinds = Kinds(setup.engine(Role.PREFILL), setup.engine(Role.DECODE))
        self._slo, self._limits, self._fleet = setup.slo, limits, fleet
        self._memory = Memory()

    def step(self, now: float) -> tuple[Advice, tuple[int, int]]:
        """Return the advice of the moment and how many engines there are."""
        load = self._fleet.look(now)
        engines = self._fleet.engines
        advice = advise(load, engines, self._kinds, self._slo, self._limits, self._memory, now)
        self._memory = advice.memory
        return advice, engines


@contextmanager
def listening(address: str | None, exposition: Exposition) -> Iterator[int | None]:
    """Serve the metrics meanwhile; yields the port."""
    if address is None:
        yield None
        return
    from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer  # slow to load

    host, _, port = address.rpartition(":")
    if not port.isdecimal() or int(port) > 65535:
        raise InvalidError(f"--listen is {address!r}; write HOST:PORT")

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:  # noqa: N802 - http.server's name
            found = self.path.partition("?")[0] == "/metrics"
            body = exposition.text.encode() if found else b"there is /metrics\n"
            self.send_response(200 if found else 404)
            self.send_header("Content-Type", CONTENT_TYPE if found else "text/plain")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002
            pass

    try:
        server = ThreadingHTTPServer((host.strip("[]") or "127.0.0.1", int(port)), Handler)
    except OSError as error:
        raise InvalidError(f"can't listen on {address}: {error}") from error
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def run(
    options: argparse.Namespace,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> int:
    """Watch until it is interrupted, or for as many looks as asked."""
    if not options.prefill or not options.decode:
        raise InvalidError("give the engines to watch with --prefill URL and --decode URL")
    for url in (*options.prefill, *options.decode):
        if not url.startswith(("http://", "https://")):
            raise InvalidError(f"{url!r} is no engine; write http://HOST:PORT")
    positive("--interval", options.interval)
    names = [field.name for field in dataclasses.fields(Limits)]
    limits = Limits(**{name: getattr(options, name) for name in names})
    watch = Watch(read_setup(options.setup), limits, Fleet(options.prefill, options.decode))
    exposition = Exposition()
    said = ""
    with listening(options.listen, exposition) as port:
        if port is not None:
            sys.stderr.write(f"metrics on port {port}\n")
        count = 0
        while options.count is None or count < options.count:
            if count:
                sleep(options.interval)
            count += 1
            advice, engines = watch.step(clock())
            exposition.update(advice, engines)
            line = line_of(advice, engines, options.json)
            if options.json or line != said:
                sys.stdout.write(line + "\n")
                sys.stdout.flush()
                said = line
    return 0


def line_of(advice: Advice, engines: tuple[int, int], as_json: bool) -> str:
    """Return an advice as a line."""
    if as_json:
        return json.dumps(
            {
                "engines": {"prefill": engines[0], "decode": engines[1]},
                "advised": {"prefill": advice.prefill, "decode": advice.decode},
                "needed": {"prefill": advice.needed_prefill, "decode": advice.needed_decode},
                "reason": advice.why.value,
            }
        )
    now, then = f"{engines[0]}P{engines[1]}D", f"{advice.prefill}P{advice.decode}D"
    change = f"{now} -> {then}" if now != then else f"{now} stays"
    return f"{change}: {advice.why.value}"
