"""``kvxfer bench``: what transfers reach, between two processes or two hosts."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import TYPE_CHECKING

from kvxfer._progress import ProgressLine
from kvxfer.bench import options as command_line
from kvxfer.bench.case import BenchError, Case, WrongBytesError
from kvxfer.bench.options import DEFAULT_ADDRESS

if TYPE_CHECKING:
    from kvxfer.bench.nixl import NixlPairs
    from kvxfer.bench.result import Result

_START_TIMEOUT = 30.0  # seconds until the serving side of `local` listens, and until it is used

_CERTIFICATES = ("KVXFER_TLS_CERT", "KVXFER_TLS_KEY", "KVXFER_TLS_CA")
_RIVAL_LIMIT = 1.2  # of the time that all should take: then nothing of a rival is waited for


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return the exit status."""
    options = command_line.parser().parse_args(arguments)
    try:
        import numpy as np  # noqa: F401 - only whether it is there
    except ImportError:
        print(
            f"kvxfer bench needs NumPy. This installs it:\n  {sys.executable} -m pip install numpy",
            file=sys.stderr,
        )
        return 2
    from kvxfer.errors import Error

    _end_as_interrupted()
    try:
        if options.command == "serve":
            return _serve(options)
        cases = command_line.cases(options)
        if options.command == "run":
            return _run(options, cases, options.address)
        for name in _CERTIFICATES:  # they are for other names than 127.0.0.1
            os.environ.pop(name, None)
        with _local_server() as address:
            return _run(options, cases, address)
    except KeyboardInterrupt:
        print("Interrupted; nothing is left behind.", file=sys.stderr)
        return 130
    except WrongBytesError as error:
        print(f"WRONG BYTES: {error}\nThis must not happen. Please report it.", file=sys.stderr)
        return 1
    except (BenchError, Error) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except MemoryError:
        print("error: out of memory: choose fewer blocks or tokens", file=sys.stderr)
        return 2


def _end_as_interrupted() -> None:
    """Have SIGTERM clean up as Ctrl-C does."""

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, interrupt)


def _serve(options: argparse.Namespace) -> int:
    from kvxfer.bench.channel import is_loopback
    from kvxfer.bench.serve import Server
    from kvxfer.config import Config
    from kvxfer.handshake import split_address

    def say(text: str) -> None:
        print(text, flush=True)

    server = Server(options.address, Config(), say)
    say(f"listening on {server.address}")
    if is_loopback(split_address(server.address)[0]) and not options.once:
        say(
            "This host only. For others: kvxfer bench serve 0.0.0.0:7710, with the same "
            "KVXFER_SECRET on both sides."
        )
    if not options.once:
        say(f"Now, on the other side: kvxfer bench run {server.address}\nCtrl-C ends this.")
    if not server.run(options.once, options.patience):
        raise BenchError(f"nobody came within {options.patience:.0f} s")
    return 0


@contextlib.contextmanager
def _local_server() -> Iterator[str]:
    """Run the serving side in a process of its own; give its address."""
    # It ends when our connection does, or when there is none in time, so it never outlives us.
    interrupts: list[int] = []
    handler = signal.signal(signal.SIGINT, lambda number, _: interrupts.append(number))
    command = [sys.executable, "-m", "kvxfer.cli", "bench", "serve", "127.0.0.1:0", "--once"]
    try:
        process = subprocess.Popen(
            [*command, "--patience", str(_START_TIMEOUT)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # Ctrl-C is for us, who then end it
        )
    finally:
        signal.signal(signal.SIGINT, handler)
    try:
        if interrupts:
            raise KeyboardInterrupt
        assert process.stdout is not None
        word, _, address = process.stdout.readline().rpartition(" ")
        if word != "listening on":
            raise BenchError("the serving side did not start; what it said is above")
        # Its other lines are read, so that it never waits for us.
        reader = threading.Thread(target=process.stdout.read, daemon=True)
        reader.start()
        yield address.strip()
    finally:
        try:
            process.wait(2.0)  # it ends with its connection
        except subprocess.TimeoutExpired:
            process.kill()  # which leaves nothing behind either, and no word in between of ours
            process.wait()


def _run(options: argparse.Namespace, cases: Sequence[Case], address: str) -> int:
    # Here, for these need numpy.
    from kvxfer import __version__
    from kvxfer.bench import plot, report
    from kvxfer.bench.channel import connect
    from kvxfer.bench.nixl import NixlPairs, nixl_missing
    from kvxfer.bench.result import failed
    from kvxfer.bench.run import Choices, Runner
    from kvxfer.bench.stamp import stamp
    from kvxfer.config import Config

    if options.plot:
        plot.check_plot(options.plot)
    config = Config()
    within = command_line.within(options)
    progress = ProgressLine(sys.stderr if options.json else sys.stdout)
    results: list[Result] = []
    rivals = ""
    with contextlib.ExitStack() as stack:
        channel = stack.enter_context(contextlib.closing(connect(address, config)))
        nixl: NixlPairs | None = None
        if options.command == "local" and not options.no_rivals:
            if missing := nixl_missing():
                rivals = f"NIXL is not compared with: {missing}"
            else:
                end = time.monotonic() + within * _RIVAL_LIMIT
                nixl = stack.enter_context(contextlib.closing(NixlPairs(end)))
        choices = Choices(options.seconds, not options.no_verify, not options.no_limits, within)
        runner = Runner(channel, config, choices, nixl, progress)
        stack.enter_context(contextlib.closing(runner))
        stack.callback(progress.clear)
        mine = stamp()
        table = report.Table(cases)
        if options.json:
            print(report.environment(address, mine, runner.other_stamp), flush=True)
        else:
            print(report.machine("running", mine))
            print(f"{report.machine('serving', runner.other_stamp)}, at {address}")
            print(f"{rivals}\n" if rivals else "")
            print(table.header(), flush=True)
        for result in runner.run(cases):
            progress.clear()
            shown = json.dumps(result.record()) if options.json else table.row(result)
            print(shown, flush=True)
            results.append(result)
    if options.plot:
        plot.plot(results, options.plot, f"kvxfer {__version__}, {mine['cpu']}")
    if not options.json and (legend := report.legend(results)):
        print(f"\n{legend}")
    return 2 if failed(results) else 0


__all__ = ["DEFAULT_ADDRESS", "main"]
