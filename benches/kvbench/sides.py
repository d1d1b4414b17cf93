"""kvxfer's two sides as the benchmark drives them: the only module that knows its Python API.

The consumer is this process, the producer a child (kvxfer_producer.py), so that a fetch crosses
processes as it does in service.
"""

from __future__ import annotations

import os
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt
from baselines.host import DATA_SEED, DST_SEED, SRC_SEED, CheckError

from kvbench.child import python_child
from kvbench.host import idle_cores
from kvbench.measure import Contender, timed
from kvbench.memory import POISON, Pages, Pool, offsets_of, other_slots, scattered_slots
from kvbench.native import Native

TOKEN_BYTES = 1024  # 512 elements of two bytes, one plane: a block is one contiguous run
TIMEOUT_S = 30.0


def why_missing() -> str | None:
    """Why kvxfer cannot be measured, or None."""
    try:
        import kvxfer
    except ImportError as error:
        return f"kvxfer: {error} (make build)"
    if not hasattr(kvxfer, "Agent"):
        return "kvxfer: this build has no kvxfer.Agent (make build)"
    return None


def cache_array(pool: Pool, run_bytes: int) -> npt.NDArray[np.float16]:
    """The pool as [block, kv head, token, content], a block being one run."""
    tokens = run_bytes // TOKEN_BYTES
    return pool.bytes.view(np.float16).reshape(-1, 1, tokens, TOKEN_BYTES // 2)


def make_agent(
    name: str, transport: str, digest: bool, listen: str | None, devices: str | None = None
) -> Any:
    """An agent on one transport; `devices` are RDMA adapters."""
    import kvxfer

    config = kvxfer.Config(transport=transport, digest=digest, verbs_devices=devices)
    return kvxfer.Agent(name, listen=listen, config=config)


class Consumer:
    """A kvxfer agent here, another in a child, and caches whose blocks are runs of `run_bytes`.

    Parameters
    ----------
    pool_bytes
        Size of the cache on each side; the runs of a fetch lie at random blocks of it.
    devices
        RDMA adapters of the consumer and of the producer.
    """

    def __init__(
        self,
        native: Native,
        transport: str,
        run_bytes: int,
        pool_bytes: int,
        pages: Pages,
        digest: bool = True,
        devices: tuple[str | None, str | None] = (None, None),
    ) -> None:
        self._native = native
        self._transport = transport
        self._run_bytes = run_bytes
        self._pool = Pool(pool_bytes, pages)
        self._tickets: list[Any] = []
        self._agent: Any = None
        self._child = python_child("kvxfer producer", "kvbench.kvxfer_producer")
        try:
            self._child.ask(
                "start",
                transport=transport,
                digest=digest,
                run_bytes=run_bytes,
                pool_bytes=pool_bytes,
                pages=pages,
                seed=DATA_SEED,
                devices=devices[1],
            )
            self._agent = make_agent("bench-consumer", transport, digest, None, devices[0])
            self._cache = self._agent.register(self._describe())
        except BaseException:
            self.close()
            raise

    @property
    def pids(self) -> tuple[int, int]:
        """Producer and consumer."""
        return self._child.pid, os.getpid()

    def offer(self, runs: int, count: int = 1) -> None:
        """Have the producer make offers of `runs` runs for the next fetches; not timed."""
        tickets = self._child.ask("offer", runs=runs, seed=SRC_SEED, count=count)["tickets"]
        self._tickets = tickets[::-1]

    def fetch(self, runs: int) -> float:
        """Seconds of one fetch of the next offer, from the call to its end."""
        ticket = self._tickets.pop()
        blocks = self.blocks(runs)

        def work() -> None:
            self._agent.fetch(ticket, self._cache, blocks=blocks, timeout=TIMEOUT_S).wait()

        return timed(work)

    def blocks(self, runs: int) -> list[int]:
        """Blocks of ours that `runs` runs go to."""
        if self._blocks_of != runs:
            self._blocks = scattered_slots(
                self._run_bytes, runs, self._pool.nbytes, DST_SEED
            ).tolist()
            self._blocks_of = runs
        return self._blocks

    _blocks_of = 0
    _blocks: list[int] = []

    def check(self, runs: int) -> None:
        """Fetch once into poisoned memory; compare all blocks, the untouched ones too."""
        self._pool.fill(POISON)
        self.offer(runs)
        self.fetch(runs)
        expected = Pool(self._pool.nbytes)
        expected.fill_random(DATA_SEED)
        size, nbytes = self._run_bytes, self._pool.nbytes
        src = scattered_slots(size, runs, nbytes, SRC_SEED)
        dst = scattered_slots(size, runs, nbytes, DST_SEED)
        bad = self._native.scattered_mismatch(
            self._pool.address, offsets_of(dst, size), expected.address, offsets_of(src, size), size
        )
        if bad >= 0:
            raise CheckError(f"kvxfer {self._transport}: run {bad} of {runs} differs")
        rest = offsets_of(other_slots(dst, size, nbytes), size)
        bad = self._native.scattered_not_value(self._pool.address, rest, size, POISON)
        if bad >= 0:
            raise CheckError(
                f"kvxfer {self._transport}: a block that was not asked for was "
                f"written, at byte {rest[bad]}"
            )

    def report(self, runs: int) -> dict[str, object]:
        """What a fetch says about the path it took."""
        self.offer(runs)
        fetch = self._agent.fetch(
            self._tickets.pop(), self._cache, blocks=self.blocks(runs), timeout=TIMEOUT_S
        )
        fetch.wait()
        report = fetch.report
        return {"path": report.path, "transport": report.transport, "why": report.why}

    def contender(self, runs: int, name: str = "kvxfer", count: int = 1) -> Contender:
        """Its turn in an interleaved run, `count` fetches one after the other."""
        return Contender(
            name,
            lambda: [self.fetch(runs) for _ in range(count)],
            self.pids,
            lambda: self.offer(runs, count),
        )

    def idle_cores(self, seconds: float) -> list[float]:
        """Processors that each side keeps busy while connected and at rest."""
        return idle_cores(self.pids, seconds)

    def close(self) -> None:
        """End both agents."""
        try:
            if self._agent is not None:
                self._agent.close()
        finally:
            self._child.close()

    def _describe(self) -> Any:
        import kvxfer

        return kvxfer.Cache({"layer": cache_array(self._pool, self._run_bytes)}, axes="BHNC")

    def __enter__(self) -> Consumer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
