"""What disaggregation over kvxfer costs and gains in vLLM, beside its NIXL and Mooncake connectors.

    make vllm-tools
    .venv-vllm/bin/pip install --no-deps nixl nixl-cu12 mooncake-transfer-engine-non-cuda
    .venv-vllm/bin/python benches/bench_vllm_pd.py [--json] [--parts ttft load rate rest]

Engines of vLLM's CPU build, each on a core of its own, with a model of four layers whose weights
are random and of the right size: one alone, two of which each does everything, and for each
connector one that prefills and one that decodes. Tokens and logprobs are compared before anything
is timed. Then all get the same requests, in turns; engines that busy-wait are stopped while it is
not theirs. Figures are medians; compare those of one run only.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from signal import SIGCONT, SIGSTOP
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "integrations"))

from rig.engines import Server, completion, free_port, prompt, start_engine, start_proxy
from rig.load import Answer, Ask, disagreement, requests_per_second, stream, under_load
from rig.model import write_model

PARTS = ("ttft", "load", "rate", "rest")
CONNECTORS = {"kvxfer": "KvxferConnector", "nixl": "NixlConnector", "mooncake": "MooncakeConnector"}
MOVED = {"nixl": "vllm:nixl_bytes_transferred_sum", "kvxfer": "vllm:kvxfer_loaded_bytes_total"}
# Two bfloat16 runs of one engine differ by less: with and without a prefix in its cache.
TOLERANCE = 0.15
REST_SECONDS = 5


@dataclass
class System:
    """What requests are sent to."""

    name: str
    ask: Ask
    engines: tuple[Server, ...]
    busy: bool = False
    """Whether the engines use CPU at rest, and have to be stopped while others are timed."""
    moved: tuple[set[int], set[int]] | None = None
    """Cores for the workers' main threads, and for their others."""

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        if not self.busy:
            yield
            return
        for engine in self.engines:
            engine.signal(SIGCONT)
        try:
            yield
        finally:
            for engine in self.engines:
                engine.signal(SIGSTOP)


@dataclass
class Bench:
    options: argparse.Namespace
    model: Path
    logs: Path
    servers: list[Server] = field(default_factory=list)

    def say(self, part: str, system: str, **found: Any) -> None:
        if self.options.json:
            found = {
                key: round(value, 4) if isinstance(value, float) else value
                for key, value in found.items()
            }
            print(json.dumps({"part": part, "system": system, **found}), flush=True)
            return
        figures = (
            f"{key} {value:.3f}" if isinstance(value, float) else f"{key} {value}"
            for key, value in found.items()
            if not isinstance(value, list)
        )
        print(f"{part:<6}{system:<20}{', '.join(figures)}", flush=True)

    # --- servers ---

    def start(self, name: str, core: str, **more: Any) -> Server:
        server = start_engine(
            self.model,
            self.logs / f"{name}.log",
            core=core,
            dtype="bfloat16",
            max_len=max(self.options.lengths) + 512,
            **more,
        )
        self.servers.append(server)
        return server

    def start_pair(self, peer: str) -> tuple[Server, Server]:
        pair = []
        for role, core in (("kv_producer", "0"), ("kv_consumer", "1")):
            env = {
                "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
                "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port()),
                "UCX_NET_DEVICES": "lo",
                "UCX_MODULES": "^efa",  # a process that has loaded it dies at exit
                "VLLM_MOONCAKE_BOOTSTRAP_PORT": str(free_port()),
            }
            pair.append(
                self.start(
                    f"{peer}-{role}",
                    core,
                    role=role,
                    connector=CONNECTORS[peer],
                    extra={"mooncake_protocol": "tcp"} if peer == "mooncake" else None,
                    env={} if peer == "kvxfer" else env,
                )
            )
        return pair[0], pair[1]

    def systems(self) -> Iterator[System]:
        """Start all, two at a time; the first system is the engine alone."""
        first = ("single", "second") if {"load", "rate"} & {*self.options.parts} else ("single",)
        engines = [self.start(name, str(core)) for core, name in enumerate(first)]
        for engine in engines:
            engine.wait_ready()
        single = engines[0]
        yield System("single", lambda given, n: stream(single.port, given, n), (single,))
        if len(engines) > 1:
            turns = itertools.cycle([engine.port for engine in engines])
            yield System(
                "colocated", lambda given, n: stream(next(turns), given, n), tuple(engines)
            )
        for peer in ("kvxfer", *self.options.peers):
            yield from self.disaggregated(peer)

    def disaggregated(self, peer: str) -> Iterator[System]:
        pair = self.start_pair(peer)
        try:
            for engine in pair:
                engine.wait_ready()
        except RuntimeError as error:
            if peer == "kvxfer":
                raise
            self.say("start", peer, failed=reason(pair) or str(error))
            for engine in pair:
                engine.kill()
            return
        for flow in ("serial", "concurrent") if peer == "kvxfer" else ("serial",):
            proxy = start_proxy(self.logs / f"{peer}-{flow}.log", *pair, flow)
            self.servers.append(proxy)
            proxy.wait_ready()

            def ask(given: list[int], n: int, port: int = proxy.port) -> Answer:
                return stream(port, given, n)

            name = f"{peer} {flow}"
            system = System(name, ask, pair, busy=peer != "kvxfer")
            with system.turn():
                self.check(name, proxy.port, pair[1], MOVED.get(peer))
            yield system
        if peer != "kvxfer":
            yield System(f"{peer} moved", ask, pair, busy=True, moved=({0}, {1}))

    def check(self, name: str, port: int, decode: Server, metric: str | None) -> None:
        """Compare with the single engine; nothing is timed where something differs."""
        before = decode.metric(metric) if metric else 0
        for length in (40, *self.options.lengths):
            given = prompt(length, f"check {name}")
            wanted, got = (completion(each, given) for each in (self.servers[0].port, port))
            if difference := disagreement(wanted, got, TOLERANCE):
                raise SystemExit(f"{name}, {length} tokens: {difference}; nothing is timed")
        time.sleep(1)  # until the metrics are there
        moved = (decode.metric(metric) if metric else 0) - before
        if metric and not moved:
            raise SystemExit(f"{name}: no byte was transferred; nothing is timed")
        self.say("check", name, equal=True, moved_mb=moved / 1e6)

    # --- what is measured ---

    def ttft(self, systems: list[System]) -> None:
        """TTFT, and what it is above the single engine's in the same round."""
        systems = [system for system in systems if system.name != "colocated"]
        found: dict[tuple[str, int], list[float]] = {}
        for round_ in range(self.options.repeat):
            for length in self.options.lengths:
                for at, system in enumerate(systems):
                    with system.turn(), placed(system):
                        system.ask(self.fresh(32, at, round_, length), 2)
                        answer = system.ask(self.fresh(length, at, round_), 2)
                    found.setdefault((system.name, length), []).append(answer.ttft * 1e3)
        for length in self.options.lengths:
            alone = found["single", length]
            for system in systems:
                times = found[system.name, length]
                added = [a - b for a, b in zip(times, alone, strict=True)]
                self.say(
                    "ttft",
                    system.name,
                    tokens=length,
                    ttft_ms=statistics.median(times),
                    added_ms=statistics.median(added),
                    all_ms=[round(each, 1) for each in times],
                )

    @staticmethod
    def fresh(length: int, system: int, *seed: object) -> list[int]:
        """The same prompt for all systems but for its first token: no cache knows it."""
        return [3 + system, *prompt(length, seed)[1:]]

    def load(self, systems: list[System]) -> None:
        """Gaps between tokens while long prompts arrive."""
        options = self.options
        p99: dict[str, float] = {}
        for at, system in enumerate(systems):
            if system.name == "single" or system.moved is not None:
                continue
            with system.turn():
                found = under_load(
                    system.ask,
                    lambda seed, at=at: self.fresh(32, at, "short", seed),
                    lambda seed, at=at: self.fresh(options.long, at, "long", seed),
                    seconds=options.seconds,
                    streams=options.streams,
                    count=64,
                    every=options.every,
                )
            p99[system.name] = found["itl_p99_ms"]
            found["p99_of_colocated"] = found["itl_p99_ms"] / p99["colocated"]
            self.say("load", system.name, **found)

    def rate(self, systems: list[System]) -> None:
        options = self.options
        for at, system in enumerate(systems):
            if system.name == "single" or system.moved is not None:
                continue
            prompts = [self.fresh(512, at, "rate", seed) for seed in range(options.requests)]
            with system.turn():
                rate = requests_per_second(system.ask, prompts, 32, 2 * options.streams)
            self.say("rate", system.name, requests_per_s=rate)

    def rest(self, systems: list[System]) -> None:
        """CPU used while nobody asks for anything."""
        seen = set()
        for system in systems:
            peer = system.name.partition(" ")[0]
            if peer in seen or system.name == "colocated":
                continue
            seen.add(peer)
            with system.turn():
                time.sleep(2)
                before = [cpu_seconds(engine) for engine in system.engines]
                time.sleep(REST_SECONDS)
                used = [
                    (cpu_seconds(engine) - was) / REST_SECONDS
                    for engine, was in zip(system.engines, before, strict=True)
                ]
            names = ("cores",) if len(used) == 1 else ("prefill_cores", "decode_cores")
            self.say("rest", peer, **dict(zip(names, used, strict=True)))


def reason(servers: tuple[Server, ...]) -> str:
    """Return the worker's own last word, rather than what followed from it."""
    for server in servers:
        lines = [line for line in server.lines("Error: ") if "pid=" in line and "Worker" in line]
        if lines:
            return lines[0].partition("] ")[2].strip()
    return ""


def processes(server: Server) -> Iterator[tuple[Path, list[str]]]:
    """Yield /proc entry and fields, from the state on, of each of a server's processes."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rsplit(")", 1)[1].split()
        except OSError:
            continue  # it has ended meanwhile
        if int(fields[2]) == server.process.pid:  # process group
            yield stat.parent, fields


def cpu_seconds(server: Server) -> float:
    ticks = sum(int(fields[11]) + int(fields[12]) for _, fields in processes(server))
    return ticks / os.sysconf("SC_CLK_TCK")


@contextlib.contextmanager
def placed(system: System) -> Iterator[None]:
    """Give workers the best cores: their main threads compute, others may busy-wait."""
    if system.moved is None:
        yield
        return
    before: dict[int, set[int]] = {}
    for server in system.engines:
        for process, _ in processes(server):
            if "Worker" not in (process / "comm").read_text():
                continue
            for task in (process / "task").iterdir():
                thread = int(task.name)
                before[thread] = os.sched_getaffinity(thread)
                main = thread == int(process.name)
                os.sched_setaffinity(thread, system.moved[0 if main else 1])
    try:
        yield
    finally:
        for thread, cores in before.items():
            with contextlib.suppress(ProcessLookupError):
                os.sched_setaffinity(thread, cores)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", action="store_true", help="a line for each figure")
    parser.add_argument("--parts", nargs="*", choices=PARTS, default=list(PARTS))
    parser.add_argument("--peers", nargs="*", default=["nixl", "mooncake"])
    parser.add_argument("--lengths", type=int, nargs="*", default=[512, 2048, 8192])
    parser.add_argument("--repeat", type=int, default=5, help="rounds of the TTFT part")
    parser.add_argument("--seconds", type=float, default=15, help="of load")
    parser.add_argument("--streams", type=int, default=4, help="decodes that run under load")
    parser.add_argument("--long", type=int, default=2048, help="tokens of prompts that arrive")
    parser.add_argument("--every", type=float, default=0.5, help="seconds between them")
    parser.add_argument("--requests", type=int, default=48, help="of the rate part")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        logs = Path(folder)
        positions = max(options.lengths) + 512
        model = write_model(logs / "model", dtype="bfloat16", positions=positions)
        bench = Bench(options, model, logs)
        try:
            systems = list(bench.systems())
            for part in PARTS:
                if part in options.parts:
                    getattr(bench, part)(systems)
        finally:
            for server in bench.servers:
                server.kill()


if __name__ == "__main__":
    main()
