"""What the gateway costs: latency added, requests and streamed pieces a second on one core.

    python benches/bench_gateway.py [--json] [--quick]

Against engines that answer at once, beside a proxy built as vLLM's examples are (a client session
for each leg) and vllm-router, if it is installed. Whatever is measured has core 0 for itself, the
engines and the client have core 1. Answers are compared with the engine's own before anything is
timed. `value` is by the clock; `per_cpu_second` divides by the processor time that the contender
took instead: what a core that nobody else wants would do.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvbench import gateway_load as load
from kvbench.host import free_port

HERE = Path(__file__).resolve().parent
START_SECONDS = 60.0
ADDED_SECONDS, REQUESTS, PIECES = 0.002, 400.0, 20_000.0  # the bars
PACE = 0.010  # seconds between two pieces of a stream
PROMPT = list(range(100, 3100))  # longer than the threshold, so it takes both legs


class Contender:
    """A proxy as a process."""

    def __init__(self, name: str, command: list[str], core: int | None) -> None:
        self.name = name
        if core is not None:
            command = ["taskset", "-c", str(core), *command]
        self.process = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
        )

    def ready(self, port: int) -> None:
        """Wait until it answers."""
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline and self.process.poll() is None:
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2).close()
                return
            time.sleep(0.1)
        raise RuntimeError(f"{self.name} does not answer")

    def cpu_seconds(self) -> float:
        """Return the processor time of all its processes."""
        total, group = 0, os.getpgid(self.process.pid)
        for path in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError, ProcessLookupError):
                fields = path.read_text().rpartition(")")[2].split()
                if int(fields[2]) == group:
                    total += int(fields[11]) + int(fields[12])
        return total / os.sysconf("SC_CLK_TCK")

    def stop(self) -> None:
        """End it."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def commands(prefill: int, decode: int) -> Iterator[tuple[str, int, list[str], str]]:
    """Yield name, port, command and, instead of it, why there is none."""
    urls = [f"http://127.0.0.1:{port}" for port in (prefill, decode)]
    port = free_port()
    sides = ["--prefill", urls[0], "--decode", urls[1], "--port", str(port)]
    own = [sys.executable, "-m", "kvxfer.integrations.gateway.command", *sides]
    yield "gateway", port, [*own, "--canary-interval", "0", "--threshold", "100"], ""
    port = free_port()
    toy = [sys.executable, str(HERE / "kvbench" / "gateway_toy.py"), *sides[:4]]
    yield "session per request", port, [*toy, "--port", str(port)], ""
    router = shutil.which("vllm-router", path=str(Path(sys.executable).parent)) or shutil.which(
        "vllm-router"
    )
    if router is None:
        yield "vllm-router", 0, [], "vllm-router is not installed (pip install vllm-router)"
        return
    port, more = free_port(), free_port()
    command = [router, "--vllm-pd-disaggregation", "--prefill", urls[0], "--decode", urls[1]]
    command += ["--host", "127.0.0.1", "--port", str(port), "--policy", "round_robin"]
    yield "vllm-router", port, [*command, "--prometheus-port", str(more)], ""


def same(port: int, direct: int) -> None:
    """Raise unless a proxy's answers are those of the decode engine."""

    async def compare() -> None:
        for stream in (False, True):
            body = {"model": "m", "prompt": PROMPT, "max_tokens": 50, "stream": stream}
            answers = []
            for at in (port, direct):
                (connection,) = await load.connect(at, 1)
                answer = await asyncio.wait_for(connection.ask(load.request(at, body)), 30)
                answer.check()
                answers.append(answer.content())
                connection.transport.close()
            if stream and answers[0] != answers[1]:
                raise RuntimeError(f"another stream: {answers[0][:200]!r}")
            if not stream:
                first, second = (json.loads(one)["choices"] for one in answers)
                if first != second:
                    raise RuntimeError(f"another answer: {answers[0][:200]!r}")

    asyncio.run(compare())


class Bench:
    """Measures contenders in turns."""

    def __init__(self, quick: bool, prefill: int, decode: int) -> None:
        self._quick, self._prefill, self._decode = quick, prefill, decode
        self.count = 100 if quick else 400

    def added(self, port: int) -> float:
        """Return the median seconds that a request takes longer than its two legs alone."""
        count = self.count
        body = {"model": "m", "prompt": PROMPT, "max_tokens": 16}

        async def run() -> float:
            first = {**body, "max_tokens": 1, "kv_transfer_params": {"do_remote_decode": True}}
            legs = [
                await load.latencies(at, leg, count)
                for at, leg in ((self._prefill, first), (self._decode, body))
            ]
            through = await load.latencies(port, body, count)
            alone = sum(statistics.median(leg) for leg in legs)
            return statistics.median(through) - alone

        return asyncio.run(run())

    def requests(self, port: int) -> tuple[float, float]:
        """Return requests and seconds of 32 clients; prompts of 100 tokens, both legs."""
        count = 400 if self._quick else 2000
        body = {"model": "m", "prompt": PROMPT[:110], "max_tokens": 16}
        return count, asyncio.run(load.throughput(port, body, 32, count))

    def pieces(self, port: int) -> tuple[float, float]:
        """Return pieces and seconds of streams that together send a fifth more than the bar."""
        clients = round(1.2 * PIECES * PACE)
        each = 100 if self._quick else 400
        body = {"model": "m", "prompt": PROMPT[:110], "max_tokens": each}
        body |= {"stream": True, "user": str(PACE)}
        return asyncio.run(load.streams(port, body, clients))


def measured(bench: Bench, contender: Contender, port: int) -> dict[str, dict[str, float]]:
    """Return one repetition's figures by name."""
    before = contender.cpu_seconds()
    found = {"added latency, both legs": {"value": bench.added(port)}}
    found["added latency, both legs"]["cpu"] = (contender.cpu_seconds() - before) / bench.count
    for name, what in (("requests/s", bench.requests), ("streamed pieces/s", bench.pieces)):
        before = contender.cpu_seconds()
        count, seconds = what(port)
        used = contender.cpu_seconds() - before
        found[name] = {"value": count / seconds, "per_cpu_second": count / max(used, 0.01)}
    return found


def lines(
    name: str, runs: list[dict[str, dict[str, float]]], base: list[dict[str, dict[str, float]]]
) -> Iterator[dict[str, Any]]:
    """Yield what is printed of one contender; `base` is the gateway in the same repetitions."""
    bars = {
        "added latency, both legs": (ADDED_SECONDS, "s"),
        "requests/s": (REQUESTS, "1/s"),
        "streamed pieces/s": (PIECES, "1/s"),
    }
    for what, (bar, unit) in bars.items():
        values = [run[what]["value"] for run in runs]
        ratios = [
            run[what]["value"] / own[what]["value"] for run, own in zip(runs, base, strict=True)
        ]
        line: dict[str, Any] = {
            "name": what,
            "contender": name,
            "value": statistics.median(values),
            "unit": unit,
            "min": min(values),
            "max": max(values),
            "n": len(values),
            "ratio_to_gateway": statistics.median(ratios),
        }
        best = line["value"]
        if "cpu" in runs[0][what]:
            line["cpu_seconds"] = statistics.median(run[what]["cpu"] for run in runs)
        if "per_cpu_second" in runs[0][what]:
            per_cpu = [run[what]["per_cpu_second"] for run in runs]
            best = line["per_cpu_second"] = statistics.median(per_cpu)
        if name == "gateway":
            line["bar"] = bar
            line["met"] = best <= bar if unit == "s" else best >= bar
        yield line


def text(line: dict[str, Any]) -> str:
    """Return a line for people."""
    if "why" in line:
        return f"{line['contender']:<22} {line['why']}"
    if line["unit"] == "s":
        return (
            f"{line['contender']:<22} {line['name']:<26} {1e3 * line['value']:>10.2f} ms"
            f"{1e3 * line['cpu_seconds']:>11.2f} ms of processor time"
        )
    return (
        f"{line['contender']:<22} {line['name']:<26} {line['value']:>10.0f}   "
        f"{line['per_cpu_second']:>10.0f} a second of processor time"
    )


def main() -> int:
    """Run it; 1 when the gateway misses a bar."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    parser.add_argument("--quick", action="store_true", help="for a look, not for figures")
    parser.add_argument("--repeat", type=int, default=5)
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended before its time"))  # proxies end too
    cores = sorted(os.sched_getaffinity(0))
    apart = len(cores) > 1
    if apart:
        os.sched_setaffinity(0, {cores[1]})
    engines = subprocess.Popen(
        [sys.executable, str(HERE / "kvbench" / "gateway_engine.py")], stdout=subprocess.PIPE
    )
    running: dict[str, tuple[Contender, int]] = {}
    printed: list[dict[str, Any]] = []
    try:
        assert engines.stdout is not None
        prefill, decode = json.loads(engines.stdout.readline())
        for name, port, command, why in commands(prefill, decode):
            if why:
                printed.append({"contender": name, "why": why})
                continue
            contender = Contender(name, command, cores[0] if apart else None)
            try:
                contender.ready(port)
                same(port, decode)
            except (RuntimeError, OSError, TimeoutError) as error:
                contender.stop()
                if name == "gateway":
                    raise
                printed.append({"contender": name, "why": f"not measured: {error}"})
                continue
            running[name] = contender, port
        bench = Bench(options.quick, prefill, decode)
        runs: dict[str, list[dict[str, dict[str, float]]]] = {name: [] for name in running}
        for _ in range(1 if options.quick else options.repeat):
            for name, (contender, port) in running.items():
                runs[name].append(measured(bench, contender, port))
        for _, port in running.values():
            same(port, decode)
        printed[:0] = [
            line for name in running for line in lines(name, runs[name], runs["gateway"])
        ]
    finally:
        for contender, _ in running.values():
            contender.stop()
        engines.kill()
        engines.wait()
    for line in printed:
        print(json.dumps(line) if options.json else text(line))
    return 0 if all(line.get("met", True) for line in printed) else 1


if __name__ == "__main__":
    sys.exit(main())
