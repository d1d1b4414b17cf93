"""What disaggregation over kvxfer costs and gains in vLLM, beside NixlConnector and one engine.

    make vllm-tools
    .venv-vllm/bin/python benches/bench_vllm_pd.py [--json] [--peers nixl]

Two engines of vLLM's CPU build, each on a core of its own, with a tiny model whose weights are
random and of the right size. The same requests go to a single engine, to two engines of which each
does everything, and to pairs of a prefill and a decode engine. Tokens are compared before anything
is timed. Figures are medians; compare those of one run only.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import os
import statistics
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "integrations"))

from rig.engines import (
    Server,
    completion,
    free_port,
    prompt,
    running,
    start_engine,
    start_proxy,
    tokens,
)
from rig.model import write_model

Ask = Callable[[list[int], int], list[float]]
IDLE_SECONDS = 5


def stream(port: int, given: list[int], count: int) -> list[float]:
    """Return the seconds from the request to each token."""
    body = {
        "prompt": given,
        "max_tokens": count,
        "temperature": 0,
        "stream": True,
        "ignore_eos": True,
    }
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    times = []
    began = time.monotonic()
    with urllib.request.urlopen(request, timeout=300) as answer:
        for line in answer:
            if line.startswith(b"data: {"):
                times.append(time.monotonic() - began)
    return times


def first_token(ask: Ask, length: int, repeat: int) -> float:
    """Median TTFT in milliseconds, each time with a prompt that no cache knows."""
    found = [ask(prompt(length, f"{time.monotonic()}"), 2)[0] for _ in range(repeat)]
    return statistics.median(found) * 1e3


def under_load(ask: Ask, seconds: float, streams: int, length: int) -> dict[str, float]:
    """Gaps between the tokens of running decodes while long prompts arrive, and requests done."""
    gaps: list[float] = []
    done = 0
    stop = time.monotonic() + seconds
    lock = threading.Lock()

    def decode() -> None:
        while time.monotonic() < stop:
            times = ask(prompt(32, f"{time.monotonic()}"), 64)
            with lock:
                gaps.extend(b - a for a, b in itertools.pairwise(times))

    def arrive() -> None:
        nonlocal done
        while time.monotonic() < stop:
            ask(prompt(length, f"{time.monotonic()}"), 1)
            with lock:
                done += 1

    threads = [threading.Thread(target=decode) for _ in range(streams)]
    threads.append(threading.Thread(target=arrive))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    ordered = sorted(gaps)
    return {
        "itl_p50_ms": ordered[len(ordered) // 2] * 1e3,
        "itl_p99_ms": ordered[len(ordered) * 99 // 100] * 1e3,
        "long_prompts_per_s": done / seconds,
    }


def cpu_at_rest(*servers: Server) -> float:
    """Cores that the engines use while nobody asks them anything."""

    def used() -> float:
        total = 0
        for stat in Path("/proc").glob("[0-9]*/stat"):
            try:
                fields = stat.read_text().rsplit(")", 1)[1].split()
            except OSError:
                continue  # it has ended meanwhile
            if int(fields[2]) in {server.process.pid for server in servers}:  # process group
                total += int(fields[11]) + int(fields[12])
        return total / os.sysconf("SC_CLK_TCK")

    time.sleep(2)
    before = used()
    time.sleep(IDLE_SECONDS)
    return (used() - before) / IDLE_SECONDS


def check(single: Server, port: int, dtype: str) -> None:
    # In bfloat16 the pair computes the last token in a batch of another shape, which rounds apart.
    same = 8 if dtype == "float32" else 2
    for length in (40, 500):
        given = prompt(length, "check")
        wanted, got = (tokens(completion(each, given)) for each in (single.port, port))
        if got[:same] != wanted[:same]:
            raise SystemExit(
                f"port {port}: other tokens than the single engine's; nothing is timed"
            )


def measure(ask: Ask, options: argparse.Namespace) -> dict[str, Any]:
    found: dict[str, Any] = {
        f"ttft_{length}_ms": first_token(ask, length, options.repeat) for length in options.lengths
    }
    found |= under_load(ask, options.seconds, options.streams, max(options.lengths))
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--lengths", type=int, nargs="*", default=[512, 2048, 3500])
    parser.add_argument("--repeat", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=15, help="of load for the ITL")
    parser.add_argument("--streams", type=int, default=4, help="decodes that run under load")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--peers", nargs="*", default=["nixl"])
    options = parser.parse_args()
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        logs = Path(folder)
        model = write_model(logs / "model", dtype=options.dtype)

        def start(name: str, **more: Any) -> Server:
            return start_engine(model, logs / f"{name}.log", dtype=options.dtype, **more)

        with running(start("one", core="0"), start("two", core="1")) as (one, two):
            results["single"] = measure(lambda given, n: stream(one.port, given, n), options)
            turns = itertools.cycle([one.port, two.port])
            both = measure(lambda given, n: stream(next(turns), given, n), options)
            results["colocated"] = both
            for name in pairs(options.peers):
                p, d = start_pair(start, name)
                with running(p, d):
                    for flow in ("serial", "concurrent") if name == "kvxfer" else ("serial",):
                        proxy = start_proxy(logs / f"{name}-{flow}.log", p, d, flow)
                        with running(proxy):
                            check(one, proxy.port, options.dtype)
                            ask = lambda given, n, port=proxy.port: stream(port, given, n)  # noqa: E731
                            results[f"{name} {flow}"] = measure(ask, options)
                    results[f"{name} {flow}"]["cores_at_rest"] = cpu_at_rest(p, d)
    report(results, options)


def pairs(peers: list[str]) -> list[str]:
    missing = [peer for peer in peers if importlib.util.find_spec(peer) is None]
    for peer in missing:
        print(f"{peer} is not installed here and left out", file=sys.stderr)
    return ["kvxfer", *(peer for peer in peers if peer not in missing)]


def start_pair(start: Callable[..., Server], name: str) -> tuple[Server, Server]:
    if name == "kvxfer":
        return (
            start("kvxfer-p", role="kv_producer", core="0"),
            start("kvxfer-d", role="kv_consumer", core="1"),
        )
    made = [
        start(
            f"{name}-{role}",
            role=role,
            core=core,
            connector="NixlConnector",
            env={
                "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
                "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port()),
            },
        )
        for role, core in (("kv_producer", "0"), ("kv_consumer", "1"))
    ]
    return made[0], made[1]


def report(results: dict[str, Any], options: argparse.Namespace) -> None:
    single, colocated = results["single"], results["colocated"]
    for name, found in results.items():
        if name not in ("single", "colocated"):
            for length in options.lengths:
                key = f"ttft_{length}_ms"
                found[f"added_{key}"] = found[key] - single[key]
            found["itl_p99_of_colocated"] = found["itl_p99_ms"] / colocated["itl_p99_ms"]
    if options.json:
        print(json.dumps({"dtype": options.dtype, "results": results}, indent=2))
        return
    for name, found in results.items():
        print(name)
        for key, value in found.items():
            print(f"  {key:<24}{value:10.3f}")


if __name__ == "__main__":
    main()
