"""A pair of NIXL agents in two processes of their own, under the peers' interpreter."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Literal

from kvbench.child import BENCHES, Child
from kvbench.host import idle_cores
from kvbench.measure import Contender
from kvbench.memory import POISON, Pages

from baselines.host import DATA_SEED, DST_SEED, SRC_SEED, CheckError

HOW_TO_INSTALL = (
    "nixl: not installed (make bench-peers-setup, or: python3 -m venv .venv-peers && "
    ".venv-peers/bin/pip install torch==2.13.0 numpy && "
    ".venv-peers/bin/pip install --no-deps nixl nixl-cu12)"
)
PYTHON_VARIABLE = "KVBENCH_PEERS_PYTHON"

Operation = Literal["WRITE", "READ"]
OPERATIONS: tuple[Operation, ...] = ("WRITE", "READ")
Transport = Literal["posix", "tcp"]

# UCX offers shared memory for NIXL only with its error handling on; without a device it would
# stripe over other interfaces' addresses; its efa module crashes at exit beside a system libefa.
ENVIRONMENT: dict[Transport, dict[str, str | None]] = {
    "posix": {"UCX_TLS": "posix", "UCX_POSIX_ERROR_HANDLING": "y"},
    "tcp": {"UCX_TLS": "tcp", "UCX_POSIX_ERROR_HANDLING": None},
}
COMMON: dict[str, str | None] = {
    "UCX_NET_DEVICES": "lo",
    "UCX_MODULES": "^efa",
    "NIXL_LOG_LEVEL": "ERROR",
}


def peers_python() -> str | None:
    """The interpreter that has NIXL, or None."""
    named = os.environ.get(PYTHON_VARIABLE)
    path = Path(named) if named else BENCHES.parent / ".venv-peers" / "bin" / "python"
    has_nixl = any(path.parent.parent.glob("lib/python*/site-packages/nixl_cu12"))
    return str(path) if path.exists() and has_nixl else None


class NixlPair:
    """Two agents, each with a pool of `pool_bytes`; both poll while a transfer is under way.

    The target sleeps between transfers, so that it does not slow down whoever has the next turn:
    a favour, since in service it could not know when to poll.
    """

    def __init__(self, python: str, transport: Transport, pool_bytes: int, pages: Pages) -> None:
        self.name = f"nixl {transport}, no progress thread"
        self._children: list[Child] = []
        self._pool_bytes = pool_bytes
        script = str(BENCHES / "baselines" / "nixl_peer.py")
        try:
            for role in ("initiator", "target"):
                self._children.append(
                    Child(f"nixl {role}", [python, script], {**COMMON, **ENVIRONMENT[transport]})
                )
            self._initiator, self._target = self._children
            mine = self._initiator.ask(
                "start", name="initiator", pool_bytes=pool_bytes, pages=pages, seed=DATA_SEED
            )
            theirs = self._target.ask(
                "start", name="target", pool_bytes=pool_bytes, pages=pages, seed=None
            )
            self._address = theirs["address"]
            self.version = str(mine["version"])
            self._initiator.ask("meet", metadata=theirs["metadata"])
            self._target.ask("meet", metadata=mine["metadata"])
        except BaseException:
            self.close()
            raise

    @property
    def pids(self) -> tuple[int, int]:
        """Initiator and target."""
        return self._initiator.pid, self._target.pid

    def prepare(self, run_bytes: int, runs: int, operation: Operation = "WRITE") -> str:
        """Make a transfer, run it once and check every byte; returns its key."""
        key = f"{operation}-{run_bytes}-{runs}"
        self._initiator.ask(
            "prepare",
            key=key,
            operation=operation,
            run_bytes=run_bytes,
            runs=runs,
            local_seed=SRC_SEED,
            remote_seed=DST_SEED,
            remote_address=self._address,
        )
        self.check(key)
        return key

    def check(self, key: str) -> None:
        """Run a transfer once into poisoned memory and compare both sides' bytes."""
        operation, run_bytes, runs = key.split("-")
        shape = {"run_bytes": int(run_bytes), "runs": int(runs)}
        self._initiator.ask("refill", seed=DATA_SEED)
        before = self._initiator.ask("digest", **shape, seed=SRC_SEED)["digest"]
        self._target.ask("fill", value=POISON)
        if operation == "READ":
            # What is read has to be there first: the same transfer the other way puts it there.
            self.prepare(int(run_bytes), int(runs), "WRITE")
            self._initiator.ask("fill", value=POISON)
        self.transfer(key)
        sent, arrived = (
            side.ask("digest", **shape, seed=seed)["digest"]
            for side, seed in ((self._initiator, SRC_SEED), (self._target, DST_SEED))
        )
        if not before == sent == arrived:
            raise CheckError(f"{self.name}: the bytes of {key} differ")

    @contextmanager
    def polling(self) -> Iterator[None]:
        """The target makes progress within this context, and only there."""
        self._target.post("poll")
        try:
            yield
        finally:
            self._target.post("rest")
            self._target.receive()
            self._target.receive()

    def transfer(self, key: str, count: int = 1) -> list[float]:
        """Run a transfer `count` times; seconds of each, from post to done at the initiator."""
        with self.polling():
            seconds: list[float] = self._initiator.ask("go", key=key, count=count)["seconds"]
        return seconds

    def contender(self, key: str, name: str = "nixl", count: int = 1) -> Contender:
        """Its turn in an interleaved run, `count` transfers one after the other."""
        return Contender(name, lambda: self.transfer(key, count), self.pids, rival=True)

    def idle_cores(self, seconds: float) -> list[float]:
        """Processors that each side keeps busy while it serves and nothing is asked of it."""
        with self.polling():
            return idle_cores(self.pids, seconds)

    def close(self) -> None:
        """End both."""
        for child in self._children:
            child.close()

    def __enter__(self) -> NixlPair:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
