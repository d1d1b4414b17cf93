"""The process of one NIXL agent; `kvxfer.bench.nixl` tells it what to do, by JSON lines.

The initiator writes and reads, the target polls while a transfer is under way, and only then.
"""

from __future__ import annotations

import base64
import hashlib
import importlib
import importlib.util
import json
import os
import select
import time
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import numpy as np

from kvxfer.bench.nixl import MODULES

_POISON = 0xA5
_POLLS = 32  # between two looks at the input
_DRAM = "DRAM"

Fields = dict[str, Any]


class Side:
    """An agent of NIXL and a pool of memory, half of which takes part in a transfer."""

    def __init__(self) -> None:
        self._agent: Any = None
        self._pool = np.empty(0, np.uint8)
        self._registered: Any = None
        self._run_bytes = self._runs = 0
        self._peer = ""
        self._transfers: dict[str, Any] = {}
        self._kept: list[Any] = []

    def start(self, _: Fields) -> Fields:
        name = next(name for name in MODULES if importlib.util.find_spec(name))
        api = importlib.import_module(f"{name}._api")
        config = api.nixl_agent_config(backends=["UCX"], enable_prog_thread=False)
        self._agent = api.nixl_agent(f"bench-{os.getpid()}", config)
        return {"version": version(name.replace("_", "-"))}

    def pool(self, fields: Fields) -> Fields:
        """Make and register a pool of twice the runs."""
        for handle in self._transfers.values():
            self._agent.release_xfer_handle(handle)
        self._transfers.clear()
        for handle in self._kept:
            self._agent.release_dlist_handle(handle)
        self._kept.clear()
        if self._peer:
            self._agent.remove_remote_agent(self._peer)
        if self._registered is not None:
            self._agent.deregister_memory(self._registered)
        self._run_bytes, self._runs = int(fields["run_bytes"]), int(fields["runs"])
        self._pool = np.zeros(2 * self._run_bytes * self._runs, np.uint8)
        address = self._pool.ctypes.data
        self._registered = self._agent.register_memory([(address, self._pool.nbytes, 0, "")], _DRAM)
        metadata = base64.b64encode(self._agent.get_agent_metadata()).decode()
        return {"metadata": metadata, "address": address}

    def meet(self, fields: Fields) -> Fields:
        peer = self._agent.add_remote_agent(base64.b64decode(fields["metadata"]))
        self._peer = peer.decode() if isinstance(peer, bytes) else peer
        return {}

    def prepare(self, fields: Fields) -> Fields:
        indices = np.arange(self._runs, dtype=np.int32)
        mine = self._agent.prep_xfer_dlist(
            "NIXL_INIT_AGENT", self._descriptors(self._pool.ctypes.data, 11), _DRAM
        )
        theirs = self._agent.prep_xfer_dlist(
            self._peer, self._descriptors(int(fields["address"]), 22), _DRAM
        )
        self._transfers[fields["operation"]] = self._agent.make_prepped_xfer(
            fields["operation"], mine, indices, theirs, indices
        )
        self._kept += [mine, theirs]
        self._slots_seed = 11
        return {}

    def go(self, fields: Fields) -> Fields:
        agent, handle = self._agent, self._transfers[fields["operation"]]
        seconds = []
        for _ in range(int(fields["count"])):
            start = time.perf_counter()
            state = agent.transfer(handle)
            while state == "PROC":
                state = agent.check_xfer_state(handle)
            seconds.append(time.perf_counter() - start)
            if state != "DONE":
                raise RuntimeError(f"a transfer ended as {state}")
        return {"seconds": seconds}

    def poll(self, _: Fields) -> Fields:
        """Make progress for the other side until the next command comes."""
        while not select.select([0], [], [], 0)[0]:
            for _turn in range(_POLLS):
                self._agent.get_new_notifs()
        return {}

    def rest(self, _: Fields) -> Fields:
        """Do nothing: to be asked for this ends `poll`."""
        return {}

    def fill(self, _: Fields) -> Fields:
        words = self._pool.view(np.uint64)
        words[:] = np.random.SFC64([os.getpid()]).random_raw(words.size)
        return {}

    def poison(self, _: Fields) -> Fields:
        self._pool.fill(_POISON)
        return {}

    def digest(self, _: Fields) -> Fields:
        """Return a hash of the runs, in the order of the transfer."""
        rows = self._pool.reshape(-1, self._run_bytes)
        picked = rows[self._slots(self._slots_seed)]
        return {"digest": hashlib.blake2b(picked.tobytes()).hexdigest()}

    _slots_seed = 22  # of the target; who prepares transfers is the initiator

    def _slots(self, seed: int) -> Any:  # noqa: ANN401 - an array
        return np.random.default_rng(seed).permutation(2 * self._runs)[: self._runs]

    def _descriptors(self, base: int, seed: int) -> Any:  # noqa: ANN401 - an array
        table = np.zeros((self._runs, 3), dtype=np.uint64)
        table[:, 0] = self._slots(seed).astype(np.uint64) * np.uint64(self._run_bytes)
        table[:, 0] += np.uint64(base)
        table[:, 1] = self._run_bytes
        return table


def main() -> None:
    # What libraries print must not be taken for an answer.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    # Unbuffered, so that `poll` never misses a line that a buffer holds already.
    commands = os.fdopen(0, "rb", buffering=0, closefd=False)
    side = Side()
    handlers: dict[str, Callable[[Fields], Fields]] = {
        "start": side.start,
        "pool": side.pool,
        "meet": side.meet,
        "prepare": side.prepare,
        "go": side.go,
        "poll": side.poll,
        "rest": side.rest,
        "fill": side.fill,
        "poison": side.poison,
        "digest": side.digest,
    }
    while line := commands.readline():
        fields = json.loads(line)
        try:
            answer = handlers[fields["do"]](fields)
        except Exception as error:  # noqa: BLE001 - whatever it is, the other side decides
            answer = {"failed": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")
    os._exit(0)  # its teardown may end in SIGSEGV, of which nobody would learn anything


if __name__ == "__main__":
    main()
