"""One side of a NIXL pair, driven by JSON lines (kvbench/nixl.py is the other end of them).

Runs under the interpreter of .venv-peers: it needs nixl-cu12, torch (which nixl imports) and numpy.
Host memory, UCX back end, no progress thread: that one polls a core for ever on each side.
"""

from __future__ import annotations

import base64
import time
from importlib.metadata import version
from typing import Any

import numpy as np
import numpy.typing as npt
from kvbench.child import Reply, serve, stdin_ready
from kvbench.memory import Pages, offsets_of, scattered_slots

from baselines.pool_side import PoolSide

POLLS_PER_STDIN_LOOK = 32


class Side(PoolSide):
    """An agent with one registered pool. The initiator writes and reads, the target polls."""

    def __init__(self) -> None:
        super().__init__()
        self._agent: Any = None
        self._peer = ""
        self._handles: dict[str, Any] = {}
        self._kept: list[Any] = []

    def start(self, name: str, pool_bytes: int, pages: Pages, seed: int | None) -> Reply:
        """Make the agent and register the pool."""
        from nixl_cu12._api import (  # type: ignore[import-not-found]  # only in .venv-peers
            nixl_agent,
            nixl_agent_config,
        )

        self.make_pool(pool_bytes, pages, seed)
        config = nixl_agent_config(backends=["UCX"], enable_prog_thread=False)
        self._agent = nixl_agent(name, config)
        self._kept.append(
            self._agent.register_memory([(self.pool.address, pool_bytes, 0, "")], "DRAM")
        )
        return {
            "metadata": base64.b64encode(self._agent.get_agent_metadata()).decode(),
            "address": self.pool.address,
            "version": version("nixl-cu12"),
        }

    def meet(self, metadata: str) -> Reply:
        """Learn about the other side."""
        peer = self._agent.add_remote_agent(base64.b64decode(metadata))
        self._peer = peer.decode() if isinstance(peer, bytes) else peer
        return {}

    def prepare(
        self,
        key: str,
        operation: str,
        run_bytes: int,
        runs: int,
        local_seed: int,
        remote_seed: int,
        remote_address: int,
    ) -> Reply:
        """Make a reusable transfer of `runs` scattered runs; says what that cost."""
        local = self._descriptors(self.pool.address, run_bytes, runs, local_seed)
        remote = self._descriptors(remote_address, run_bytes, runs, remote_seed)
        indices = np.arange(runs, dtype=np.int32)
        began = time.perf_counter()
        mine = self._agent.prep_xfer_dlist("NIXL_INIT_AGENT", local, "DRAM")
        theirs = self._agent.prep_xfer_dlist(self._peer, remote, "DRAM")
        listed = time.perf_counter()
        self._handles[key] = self._agent.make_prepped_xfer(
            operation, mine, indices, theirs, indices
        )
        made = time.perf_counter()
        self._kept += [mine, theirs]
        return {"list_s": listed - began, "make_s": made - listed}

    def go(self, key: str, count: int) -> Reply:
        """Run a transfer `count` times, polling; seconds of each."""
        agent, handle = self._agent, self._handles[key]
        seconds = []
        for _ in range(count):
            began = time.perf_counter()
            state = agent.transfer(handle)
            while state == "PROC":
                state = agent.check_xfer_state(handle)
            seconds.append(time.perf_counter() - began)
            if state != "DONE":
                raise RuntimeError(f"transfer {key} ended as {state}")
        return {"seconds": seconds}

    def poll(self) -> Reply:
        """Make progress for the other side until the next command comes."""
        get = self._agent.get_new_notifs
        while not stdin_ready():
            for _ in range(POLLS_PER_STDIN_LOOK):
                get()
        return {}

    def rest(self) -> Reply:
        """Do nothing: to be asked for this ends poll()."""
        return {}

    def _descriptors(
        self, base: int, run_bytes: int, runs: int, seed: int
    ) -> npt.NDArray[np.uint64]:
        slots = scattered_slots(run_bytes, runs, self.pool.nbytes, seed)
        table = np.zeros((runs, 3), dtype=np.uint64)
        table[:, 0] = offsets_of(slots, run_bytes) + np.uint64(base)
        table[:, 1] = run_bytes
        return table


if __name__ == "__main__":
    side = Side()
    serve(
        {
            "start": side.start,
            "meet": side.meet,
            "prepare": side.prepare,
            "go": side.go,
            "poll": side.poll,
            "rest": side.rest,
            **side.handlers(),
        }
    )
