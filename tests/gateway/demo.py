"""Serves a mixed load with two engines that each do everything, and with a prefill and a decode
engine behind the gateway, and compares. Then the prefill engine is killed in the middle.

Run by ``make demo-gateway``. All engines run on this machine's CPU.
"""

from __future__ import annotations

import argparse
import itertools
import signal
import sys
import tempfile
import threading
import time
import urllib.request
from pathlib import Path
from typing import Any

from rig.engines import Server, free_port, prompt, running, start_engine
from rig.load import Answer, Ask, stream, under_load
from rig.model import write_model

from kvxfer.serving.prometheus import Samples, parse

LONG, SHORT, TOKENS, STREAMS, EVERY = 4096, 48, 200, 4, 1.5
BAR = 10.0
ROOM = ("--max-model-len", "6144")
DEEP = {"layers": 12, "heads": 2, "kv_heads": 2, "inner": 256}
"""As deep as models are, so that a step of decoding takes long enough to be held up by a prompt."""
ODD = 3
"""The first token of prompts by which engines are warmed: they share no prefix with the others."""


def start_gateway(log: Path, prefill: Server, decode: Server) -> Server:
    port = free_port()
    command = [sys.executable, "-m", "kvxfer.integrations.gateway.command", "--port", str(port)]
    command += ["--prefill", f"http://127.0.0.1:{prefill.port}"]
    command += ["--decode", f"http://127.0.0.1:{decode.port}"]
    return Server(command, port, log, {})


def metrics(gateway: Server) -> Samples:
    url = f"http://127.0.0.1:{gateway.port}/metrics"
    with urllib.request.urlopen(url, timeout=10) as answer:
        return parse(answer.read().decode())


def mixed(ask: Ask, seconds: float, seed: str) -> dict[str, Any]:
    return under_load(
        ask,
        lambda number: prompt(SHORT, f"{seed}/{number}"),
        lambda number: prompt(LONG, f"{seed}/{number}"),
        seconds=seconds,
        streams=STREAMS,
        count=TOKENS,
        every=EVERY,
    )


def warm(*servers: Server) -> None:
    """Have every engine do once what it will be asked for."""
    for server in servers:
        for length in (SHORT, LONG):
            stream(server.port, [ODD, *prompt(length, "warm")[1:]], 4)


def colocated(model: Path, logs: Path, seconds: float) -> tuple[dict[str, Any], list[list[int]]]:
    engines = [
        start_engine(model, logs / f"both{core}.log", core=str(core), options=ROOM)
        for core in range(2)
    ]
    with running(*engines):
        warm(*engines)
        turns = itertools.cycle(engines)
        lock = threading.Lock()

        def ask(tokens: list[int], count: int) -> Answer:
            with lock:
                engine = next(turns)
            return stream(engine.port, tokens, count)

        found = mixed(ask, seconds, "a")
        wanted = [stream(engines[0].port, prompt(n, "same"), 8).tokens for n in (SHORT, LONG)]
    return found, wanted


def apart(
    model: Path, logs: Path, seconds: float, wanted: list[list[int]]
) -> tuple[dict[str, Any], list[str]]:
    """Return what was measured, and what went wrong."""
    wrong = []
    prefill = start_engine(model, logs / "prefill.log", role="kv_producer", core="0", options=ROOM)
    decode = start_engine(model, logs / "decode.log", role="kv_consumer", core="1", options=ROOM)
    with running(prefill, decode):
        gateway = start_gateway(logs / "gateway.log", prefill, decode)
        with running(gateway):
            found = beside(gateway, prefill, decode, seconds, wanted, wrong)
            for line in gateway.lines(" ERROR "):
                print(f"    {line}")
    return found, wrong


def beside(
    gateway: Server,
    prefill: Server,
    decode: Server,
    seconds: float,
    wanted: list[list[int]],
    wrong: list[str],
) -> dict[str, Any]:
    def ask(tokens: list[int], count: int) -> Answer:
        return stream(gateway.port, tokens, count)

    warm(gateway)
    got = [ask(prompt(n, "same"), 8).tokens for n in (SHORT, LONG)]
    if got != wanted:
        wrong.append(f"tokens {got} instead of {wanted}")
    before = prefill.metric("vllm:request_success_total")
    found = mixed(ask, seconds, "a")
    asked = prefill.metric("vllm:request_success_total") - before
    counts = metrics(gateway)
    decided = {
        f"{one.labels['place']} ({one.labels['reason']})": int(one.value)
        for one in counts.of("kvxfer_gateway_decisions_total")
    }
    print(f"  where prompts went: {decided}")
    long = found["long_prompts"]
    print(f"  the prefill engine was asked {asked:.0f} times, for {long} long prompts")
    if asked > long + 2:  # and perhaps a canary or two
        wrong.append("short prompts went to the prefill engine")
    if counts.total("kvxfer_gateway_decode_reprefill_total"):
        wrong.append("KV did not reach the decode engine")
    print("killing the prefill engine in the middle of the load")
    timer = threading.Timer(seconds / 4, prefill.kill)
    timer.start()
    try:
        mixed(ask, seconds / 2, "b")  # raises what a request raises
    except Exception as error:  # noqa: BLE001 - whatever a client sees
        wrong.append(f"a request failed: {error!r}")
    timer.join()
    counts = metrics(gateway)
    local = counts.total("kvxfer_gateway_fallbacks_total") or 0
    none = counts.total("kvxfer_gateway_decisions_total", reason="no_prefill") or 0
    print(f"  no request failed; {local:.0f} fell back, {none:.0f} were sent elsewhere at once")
    if not local + none:
        wrong.append("nothing noticed that the prefill engine was gone")
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=30)
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended before its time"))  # engines end too
    with tempfile.TemporaryDirectory() as folder:
        logs = Path(folder)
        model = write_model(logs / "model", positions=8192, **DEEP)
        print(f"{STREAMS} streams of {TOKENS} tokens, and {LONG} tokens of prompt every {EVERY} s")
        began = time.monotonic()
        print("two engines that each do everything, in turns")
        first, wanted = colocated(model, logs, options.seconds)
        print("a prefill and a decode engine behind the gateway")
        second, wrong = apart(model, logs, options.seconds, wanted)
    print(f"{'':<34}{'two engines':>14}{'gateway':>14}")
    for name, unit in (("itl_p50_ms", "ms"), ("itl_p99_ms", "ms"), ("long_ttft_p50_ms", "ms")):
        print(f"{name:<34}{first[name]:>11.1f} {unit}{second[name]:>11.1f} {unit}")
    print(f"{'tokens in ' + format(options.seconds, 'g') + ' s':<34}", end="")
    print(f"{first['tokens']:>14}{second['tokens']:>14}")
    ratio = first["itl_p99_ms"] / second["itl_p99_ms"]
    more = second["tokens"] / first["tokens"]
    print(f"p99 between tokens: {ratio:.1f} times lower; {more:.2f} times the tokens a second")
    print(f"all took {time.monotonic() - began:.0f} s")
    if ratio < BAR:
        wrong.append(f"the 99th percentile is {ratio:.1f} times lower, not {BAR:g}")
    if wrong:
        raise SystemExit("; ".join(wrong))


if __name__ == "__main__":
    main()
