"""Two processes with UCXX, UCX's Python package; one sends a contiguous message to the other."""

from __future__ import annotations

from kvbench.child import BENCHES, Child
from kvbench.measure import Contender
from kvbench.memory import POISON, Pages

from baselines.host import DATA_SEED, CheckError

ENVIRONMENT: dict[str, str | None] = {
    "UCX_TLS": "tcp",
    "UCX_NET_DEVICES": "lo",
    "UCX_WARN_UNUSED_ENV_VARS": "n",
}


class UcxxPair:
    """A sender and a receiver of `nbytes`, over TCP."""

    def __init__(self, python: str, nbytes: int, pages: Pages) -> None:
        self._nbytes = nbytes
        self._children: list[Child] = []
        script = str(BENCHES / "baselines" / "ucxx_peer.py")
        try:
            for role in ("sender", "receiver"):
                self._children.append(Child(f"ucxx {role}", [python, script], ENVIRONMENT))
            self._sender, self._receiver = self._children
            mine = self._sender.ask("start", pool_bytes=nbytes, pages=pages, seed=DATA_SEED)
            self._receiver.ask("start", pool_bytes=nbytes, pages=pages, seed=None)
            self.name = f"UCXX {mine['version']} tcp, one contiguous message"
            port = self._sender.ask("listen")["port"]
            self._sender.post("accept")
            self._receiver.ask("connect", port=port)
            self._sender.receive()
            self.check()
        except BaseException:
            self.close()
            raise

    def run(self) -> float:
        """Seconds of one message at the receiver."""
        self._sender.post("send")
        seconds = float(self._receiver.ask("receive")["seconds"])
        self._sender.receive()
        return seconds

    def check(self) -> None:
        """Send once into poisoned memory and compare."""
        self._receiver.ask("fill", value=POISON)
        self.run()
        shape = {"run_bytes": self._nbytes, "runs": 1, "seed": 0}
        digests = {child.ask("digest", **shape)["digest"] for child in self._children}
        if len(digests) != 1:
            raise CheckError(f"{self.name}: the received bytes differ")

    def contender(self) -> Contender:
        """Its turn in an interleaved run."""
        pids = (self._sender.pid, self._receiver.pid)
        return Contender("ucxx", lambda: [self.run()], pids, rival=True)

    def close(self) -> None:
        """End both."""
        for child in self._children:
            child.close(2.0)
