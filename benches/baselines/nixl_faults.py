"""What a pull of KV does when the other side dies, falls silent, or reuses blocks: NIXL, kvxfer.

``python benches/baselines/nixl_faults.py kvxfer`` runs under the interpreter of .venv, ``... nixl``
under that of .venv-peers. Over TCP on one host, the decode side reads 256 MiB of the prefill side's
memory in pieces of 64 KiB; NIXL as READ, which is how vLLM's NixlConnector uses it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

PIECE = 64 << 10
PIECES = 4096
SIZE = PIECE * PIECES
TOKENS = 16  # of a piece, which is a block
PATIENCE = 30.0  # seconds after which a transfer that has not ended is called hanging
OLD, NEW = 0x11, 0x22  # the first request's bytes, and those of the next in the same blocks

Outcome = dict[str, Any]


class Prefill:
    """The prefill side, in a process of its own: says lines of JSON, gets lines of words."""

    def __init__(self, engine: str, port: int) -> None:
        self.process = subprocess.Popen(
            [sys.executable, __file__, engine, "--prefill", str(port)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.said = self.hear()

    def hear(self) -> Outcome:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise EOFError(f"the prefill side ended with status {self.process.wait()}")
        return dict(json.loads(line))

    def ask(self, word: str) -> Outcome:
        assert self.process.stdin is not None
        self.process.stdin.write(word + "\n")
        self.process.stdin.flush()
        return self.hear()

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()


@contextlib.contextmanager
def prefill(engine: str, port: int) -> Iterator[Prefill]:
    side = Prefill(engine, port)
    try:
        yield side
    finally:
        side.kill()


def what_it_got(memory: np.ndarray) -> str:
    old, new = int((memory == OLD).sum()), int((memory == NEW).sum())
    return f"{old / SIZE:.0%} of the first request, {new / SIZE:.0%} of the next"


def prefill_nixl(memory: np.ndarray) -> tuple[Outcome, Callable[[], None], Any]:
    from nixl_cu12._api import (  # type: ignore[import-not-found]  # only in .venv-peers
        nixl_agent,
        nixl_agent_config,
    )

    agent = nixl_agent("prefill", nixl_agent_config(backends=["UCX"], enable_prog_thread=True))
    agent.register_memory([(memory.ctypes.data, SIZE, 0, "")], "DRAM")
    said = {"metadata": agent.get_agent_metadata().hex(), "base": memory.ctypes.data}
    return said, lambda: None, agent  # it is not told when blocks are free


def prefill_kvxfer(memory: np.ndarray, port: int) -> tuple[Outcome, Callable[[], None], Any]:
    import kvxfer

    agent = kvxfer.Agent("prefill", listen=f"127.0.0.1:{port}", transport="tcp")
    cache = kvxfer_cache(memory)
    agent.register(cache)
    offer = agent.offer(cache, range(PIECES), PIECES * TOKENS)
    address = int(agent.address.rpartition(":")[2])
    return {"ticket": offer.ticket, "port": address}, offer.release, agent


def serve(engine: str, port: int) -> None:
    memory = np.full(SIZE, OLD, np.uint8)
    said, release, agent = (
        prefill_nixl(memory) if engine == "nixl" else prefill_kvxfer(memory, port)
    )
    print(json.dumps(said), flush=True)
    for word in sys.stdin:
        assert word == "reuse\n"
        release()
        memory[:] = NEW
        print("{}", flush=True)
    del agent


class Nixl:
    """The decode side over NIXL."""

    def __init__(self) -> None:
        from nixl_cu12._api import (  # type: ignore[import-not-found]  # only in .venv-peers
            nixl_agent,
            nixl_agent_config,
        )

        self.memory = np.zeros(SIZE, np.uint8)
        self._agent = nixl_agent(
            "decode", nixl_agent_config(backends=["UCX"], enable_prog_thread=True)
        )
        self._agent.register_memory([(self.memory.ctypes.data, SIZE, 0, "")], "DRAM")

    def meet(self, side: Prefill) -> None:
        self._agent.add_remote_agent(bytes.fromhex(side.said["metadata"]))

    def forget(self) -> None:
        self._agent.remove_remote_agent("prefill")

    def begin(self, said: Outcome) -> Callable[[], str | None]:
        """Begin to read; what comes back says how it ended, once it has."""
        at = np.arange(PIECES, dtype=np.uint64) * np.uint64(PIECE)
        sides = []
        for name, base in (
            ("NIXL_INIT_AGENT", self.memory.ctypes.data),
            ("prefill", said["base"]),
        ):
            table = np.zeros((PIECES, 3), np.uint64)
            table[:, 0], table[:, 1] = at + np.uint64(base), PIECE
            sides.append(self._agent.prep_xfer_dlist(name, table, "DRAM"))
        indices = np.arange(PIECES, dtype=np.int32)
        handle = self._agent.make_prepped_xfer("READ", sides[0], indices, sides[1], indices)
        state = self._agent.transfer(handle)

        def ended() -> str | None:
            nonlocal state
            if state == "PROC":
                state = self._agent.check_xfer_state(handle)
            return None if state == "PROC" else str(state)

        return ended


class Kvxfer:
    """The decode side over kvxfer."""

    def __init__(self) -> None:
        import kvxfer

        self.memory = np.zeros(SIZE, np.uint8)
        self._agent = kvxfer.Agent("decode", transport="tcp")
        self._cache = kvxfer_cache(self.memory)
        self._agent.register(self._cache)

    def meet(self, side: Prefill) -> None:
        """The ticket says where it is."""

    def forget(self) -> None:
        """Nothing has to be done about a peer that has restarted."""

    def begin(self, said: Outcome) -> Callable[[], str | None]:
        fetch = self._agent.fetch(said["ticket"], self._cache, range(PIECES), timeout=2 * PATIENCE)
        return lambda: fetch.status.value if fetch.done and fetch.status else None


def kvxfer_cache(memory: np.ndarray) -> Any:  # noqa: ANN401 - kvxfer is not in .venv-peers
    import kvxfer

    blocks = memory.view(np.float16).reshape(PIECES, 2, 8, TOKENS, 128)
    return kvxfer.Cache({"layer": blocks}, axes="BPHNC", planes=("k", "v"))


class Trial:
    """The faults, done to one of the two."""

    def __init__(self, engine: str) -> None:
        self._engine = engine
        self._decode: Nixl | Kvxfer = Nixl() if engine == "nixl" else Kvxfer()

    def run(self, rounds: int) -> Outcome:
        with prefill(self._engine, 0) as side:
            self._decode.meet(side)
            reused = self._reused(side)
        return {
            "blocks reused before the read": reused,
            "killed in the middle": self._killed(rounds),
            **self._restarted(),
            "silent in the middle": self._silent(),
        }

    def _read(self, said: Outcome, during: Callable[[], None] = lambda: None) -> Outcome:
        """Read everything. Seconds count from the end of what is done meanwhile."""
        self._decode.memory[:] = 0
        began = time.monotonic()
        try:
            ended = self._decode.begin(said)
            during()
            began = time.monotonic()
            while (how := ended()) is None:
                if time.monotonic() > began + PATIENCE:
                    how = f"nothing within {PATIENCE:.0f} s"
                    break
                time.sleep(0.001)
        except Exception as error:  # noqa: BLE001 - whatever it raises is what it does
            how = f"{type(error).__name__}: {error}"[:200]
        seconds = round(time.monotonic() - began, 3)
        return {"ended": how, "seconds": seconds, "memory": what_it_got(self._decode.memory)}

    def _reused(self, side: Prefill) -> Outcome:
        whole = self._read(side.said)
        assert whole["memory"].startswith("100% of the first"), whole
        side.ask("reuse")
        return self._read(side.said)

    def _killed(self, rounds: int) -> Outcome:
        found = []
        for _ in range(rounds):
            self._decode.forget()
            with prefill(self._engine, 0) as side:
                self._decode.meet(side)
                found.append(self._read(side.said, lambda side=side: self._kill_soon(side)))
        seconds = [one["seconds"] for one in found]
        return {
            "ended": sorted({one["ended"] for one in found}),
            "median seconds": statistics.median(seconds),
            "most seconds": max(seconds),
            "memory": [one["memory"] for one in found],
        }

    def _kill_soon(self, side: Prefill) -> None:
        self._first_bytes()
        side.kill()

    def _first_bytes(self) -> None:
        while not self._decode.memory.any():
            time.sleep(0.0005)

    def _silent(self) -> Outcome:
        """Stop it, as a host that hangs or a network that is cut would."""

        def stop() -> None:
            self._first_bytes()
            side.process.send_signal(signal.SIGSTOP)

        self._decode.forget()
        with prefill(self._engine, 0) as side:
            self._decode.meet(side)
            return self._read(side.said, stop)

    def _restarted(self) -> Outcome:
        self._decode.forget()
        with prefill(self._engine, 0) as side:
            self._decode.meet(side)
            old, port = side.said, side.said.get("port", 0)
            self._read(old)
        with prefill(self._engine, port) as side:
            stale = self._read(old)
            self._decode.forget()
            self._decode.meet(side)
            again = self._read(side.said)
        return {
            "restarted, read with what was known before": stale,
            "restarted, read with what the new one says": again,
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("engine", choices=["nixl", "kvxfer"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prefill", type=int, metavar="PORT", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.prefill is not None:
        serve(arguments.engine, arguments.prefill)
        return
    print(json.dumps(Trial(arguments.engine).run(arguments.rounds), indent=2))


if __name__ == "__main__":
    main()
