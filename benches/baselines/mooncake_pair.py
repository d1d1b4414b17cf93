"""A pair of Mooncake transfer engines in two processes, over TCP."""

from __future__ import annotations

from kvbench.child import BENCHES, Child
from kvbench.measure import Contender
from kvbench.memory import POISON, Pages

from baselines.host import DATA_SEED, DST_SEED, SRC_SEED, CheckError

# By default a peer takes 1,024 transfers at a time, and refuses a batch of more.
ENVIRONMENT: dict[str, str | None] = {
    "MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER": "65535",
    "MC_TCP_MAX_PENDING_ADMISSIONS_PER_PEER": "65535",
    "MC_TCP_ADMISSION_TIMEOUT_MS": "60000",
    "MC_TCP_ENABLE_CONNECTION_POOL": "1",
    "MC_TCP_BIND_ADDRESS": "127.0.0.1",
    "GLOG_minloglevel": "2",
}


class MooncakePair:
    """Two engines, each with a pool of `pool_bytes`."""

    def __init__(self, python: str, pool_bytes: int, pages: Pages) -> None:
        self._children: list[Child] = []
        script = str(BENCHES / "baselines" / "mooncake_peer.py")
        try:
            for role in ("initiator", "target"):
                self._children.append(Child(f"mooncake {role}", [python, script], ENVIRONMENT))
            self._initiator, self._target = self._children
            mine = self._initiator.ask("start", pool_bytes=pool_bytes, pages=pages, seed=DATA_SEED)
            self._theirs = self._target.ask("start", pool_bytes=pool_bytes, pages=pages, seed=None)
            self.name = f"Mooncake {mine['version']} tcp, WRITE"
        except BaseException:
            self.close()
            raise

    def prepare(self, run_bytes: int, runs: int) -> str:
        """Make a transfer, run it once and check every byte; returns its key."""
        key = f"{run_bytes}-{runs}"
        self._initiator.ask(
            "prepare",
            key=key,
            operation="WRITE",
            peer=self._theirs["peer"],
            run_bytes=run_bytes,
            runs=runs,
            local_seed=SRC_SEED,
            remote_seed=DST_SEED,
            remote_address=self._theirs["address"],
        )
        self.check(key)
        return key

    def check(self, key: str) -> None:
        """Run a transfer once into poisoned memory and compare both sides' bytes."""
        run_bytes, runs = map(int, key.split("-"))
        self._target.ask("fill", value=POISON)
        self.transfer(key)
        sent, arrived = (
            side.ask("digest", run_bytes=run_bytes, runs=runs, seed=seed)["digest"]
            for side, seed in ((self._initiator, SRC_SEED), (self._target, DST_SEED))
        )
        if sent != arrived:
            raise CheckError(f"{self.name}: the bytes of {key} differ")

    def transfer(self, key: str, count: int = 1) -> list[float]:
        """Run a transfer `count` times; seconds of each."""
        seconds: list[float] = self._initiator.ask("go", key=key, count=count)["seconds"]
        return seconds

    def contender(self, key: str, name: str = "mooncake", count: int = 1) -> Contender:
        """Its turn in an interleaved run."""
        pids = (self._initiator.pid, self._target.pid)
        return Contender(name, lambda: self.transfer(key, count), pids, rival=True)

    def close(self) -> None:
        """End both."""
        for child in self._children:
            child.close()
