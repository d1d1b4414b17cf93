"""Shows that layers are sent while later ones are computed, with two real engines.

    PYTHONPATH=tests/integrations .venv-vllm/bin/python -m rig.overlap

One long prompt goes through the concurrent flow. The table says when the prefill engine had written
each layer, and how much the decode engine had received and verified by then.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rig import tracing
from rig.engines import Server, prompt, running, start_engine, start_proxy
from rig.load import stream
from rig.model import write_model


@dataclass
class Overlap:
    """The last step of one prefill, in seconds from its first hook."""

    layers: list[float]
    """When each was written."""
    received: list[tuple[float, int]]
    """When the decode side had verified how many bytes in all."""

    def by(self, seconds: float) -> int:
        return max((total for at, total in self.received if at <= seconds), default=0)

    @property
    def total(self) -> int:
        return self.received[-1][1] if self.received else 0

    @property
    def early(self) -> float:
        """The share that had arrived when the last layer was written."""
        return self.by(self.layers[-1]) / self.total if self.total else 0.0

    def table(self) -> str:
        end = self.received[-1][0] if self.received else 0.0
        rows = [(f"layer {number} written", at) for number, at in enumerate(self.layers)]
        rows.append(("all received", end))
        lines = [f"{'':<18}{'ms':>8}{'received by then':>18}{'MB':>8}"]
        for what, at in rows:
            share = self.by(at) / self.total if self.total else 0.0
            lines.append(f"{what:<18}{at * 1e3:>8.1f}{share:>17.0%} {self.by(at) / 1e6:>8.2f}")
        return "\n".join(lines)


def start_traced(model: Path, logs: Path, name: str, **more: Any) -> Server:
    return start_engine(
        model,
        logs / f"{name}.log",
        module="rig.tracing",
        env={tracing.FILE: str(logs / f"{name}.trace")},
        **more,
    )


def events(logs: Path, name: str, since: float) -> list[dict[str, Any]]:
    lines = (logs / f"{name}.trace").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["at"] > since]


def read(logs: Path, prefill: str, decode: str, since: float) -> Overlap:
    """Return what happened after `since`, on the clock of `time.monotonic`."""
    there = events(logs, prefill, since)
    begin = next(e["at"] for e in there if e["what"] == "offer" and e["early"])
    layers = [e["at"] - begin for e in there if e["what"] == "layer" and e["at"] > begin]
    received, total = [], 0
    for event in events(logs, decode, since):
        if event["what"] == "received":
            total += event["bytes"]
            received.append((event["at"] - begin, total))
    return Overlap(layers, received)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--length", type=int, default=4096, help="tokens of the prompt")
    parser.add_argument("--dtype", default="bfloat16")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        logs = Path(folder)
        model = write_model(logs / "model", dtype=options.dtype, positions=options.length + 512)
        shared: dict[str, Any] = {"dtype": options.dtype, "max_len": options.length + 512}
        p = start_traced(model, logs, "p", role="kv_producer", core="0", **shared)
        d = start_traced(model, logs, "d", role="kv_consumer", core="1", **shared)
        proxy = start_proxy(logs / "proxy.log", p, d, "concurrent")
        with running(p, d, proxy):
            for warm in range(2):  # the first goes serially
                stream(proxy.port, prompt(64, f"warm {warm}"), 2)
            since = time.monotonic()
            answer = stream(proxy.port, prompt(options.length, "long"), 2)
            time.sleep(0.2)
            overlap = read(logs, "p", "d", since)
    print(f"{options.length} tokens, {options.dtype}; first token after {answer.ttft * 1e3:.0f} ms")
    print(overlap.table())
    print(f"{overlap.early:.0%} had arrived when the last layer was written")


if __name__ == "__main__":
    main()
