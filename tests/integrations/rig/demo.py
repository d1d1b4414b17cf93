"""Serves a tiny model with one vLLM engine, and with a prefill and a decode engine, and compares.

Run by ``make demo-vllm``. All engines run on this machine's CPU.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from rig.engines import Server, prompt, running, start_engine, start_proxy
from rig.load import stream
from rig.model import write_model


def ask(server: Server, tokens: list[int], count: int) -> tuple[list[int], float]:
    """Return the tokens that a server generates, and after how many seconds the first came."""
    answer = stream(server.port, tokens, count)
    return answer.tokens, answer.ttft


def compare(
    single: Server, proxies: dict[str, Server], decode: Server, lengths: list[int], repeat: int
) -> bool:
    head = "".join(f"{name + ' TTFT':>18}" for name in proxies)
    print(f"{'prompt':>8} {'one engine TTFT':>16}{head}{'moved':>12}   first tokens")
    equal = True
    for length in lengths:
        times: dict[str, list[float]] = {name: [] for name in ("single", *proxies)}
        before = decode.metric("vllm:kvxfer_loaded_bytes_total")
        for number in range(repeat):
            tokens = prompt(length, number)
            wanted, seconds = ask(single, tokens, 8)
            times["single"].append(seconds)
            for at, (name, proxy) in enumerate(proxies.items()):
                # Another first token, so that no flow finds the other's prefix in a cache.
                mine = [3 + at, *tokens[1:]] if length > 1 else tokens
                if at or length > 1:
                    wanted, _ = ask(single, mine, 8)
                got, seconds = ask(proxy, mine, 8)
                times[name].append(seconds)
                equal &= got == wanted
        time.sleep(0.5)  # until the metrics are there
        moved = (decode.metric("vllm:kvxfer_loaded_bytes_total") - before) / repeat / len(proxies)
        medians = {name: statistics.median(found) * 1e3 for name, found in times.items()}
        columns = "".join(f"{medians[name]:>15.0f} ms" for name in proxies)
        print(
            f"{length:>8} {medians['single']:>13.0f} ms{columns}{moved / 1e6:>9.2f} MB   "
            f"{' '.join(map(str, wanted[:4]))}"
        )
    return equal


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--lengths", type=int, nargs="*", default=[32, 512, 2048])
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--dtype", default="float32")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        logs = Path(folder)
        model = write_model(logs / "model", dtype=options.dtype)
        shared: dict[str, Any] = {"dtype": options.dtype}
        print("starting three engines: one alone, one that prefills, one that decodes")
        began = time.monotonic()
        single = start_engine(model, logs / "single.log", core="0", **shared)
        p = start_engine(model, logs / "prefill.log", role="kv_producer", core="0", **shared)
        d = start_engine(
            model, logs / "decode.log", role="kv_consumer", core="1", block_size=64, **shared
        )
        proxies = {
            flow: start_proxy(logs / f"{flow}.log", p, d, flow) for flow in ("serial", "concurrent")
        }
        with running(single, p, d, *proxies.values()):
            print(f"started after {time.monotonic() - began:.0f} s")
            for server in (single, *proxies.values()):
                ask(server, prompt(40), 8)
            equal = compare(single, proxies, d, options.lengths, options.repeat)
            failed = d.metric("vllm:kvxfer_failures_total")
            loads = d.metric("vllm:kvxfer_loads_total")
        print(f"{loads:.0f} requests were loaded from the prefill engine, {failed:.0f} failed")
        if not equal or failed:
            raise SystemExit("the tokens of the pair are NOT those of the single engine")
        print("all tokens equal those of the single engine")


if __name__ == "__main__":
    main()
