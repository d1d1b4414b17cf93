"""A link of a chosen rate between two processes: a network namespace, a veth pair and `tc`."""

from __future__ import annotations

import os
import shutil
import subprocess
from types import TracebackType

NEAR, FAR = "10.231.77.1", "10.231.77.2"


class ShapedError(RuntimeError):
    """The link cannot be made here."""


class ShapedLink:
    """What goes from the far end to this process is limited to `bits_per_second`.

    The far end is in a network namespace: a process gets there with `far_command`. Needs root, `ip`
    and `tc`; raises `ShapedError` where one is missing.
    """

    def __init__(self, bits_per_second: int) -> None:
        self._name = f"kvb{os.getpid()}"
        if os.geteuid() != 0:
            raise ShapedError("a network namespace needs root")
        for program in ("ip", "tc"):
            if shutil.which(program) is None:
                raise ShapedError(f"{program} is not installed (package iproute2)")
        near, far = f"{self._name}n", f"{self._name}f"
        inside = ["ip", "netns", "exec", self._name]
        # The token bucket must hold what a timer tick lets through: 1 ms here.
        shape = f"root tbf rate {bits_per_second} burst {bits_per_second // 8000} latency 20ms"
        try:
            _run("ip", "netns", "add", self._name)
            _run("ip", "link", "add", near, "type", "veth", "peer", "name", far)
            _run("ip", "link", "set", far, "netns", self._name)
            _run("ip", "addr", "add", f"{NEAR}/24", "dev", near)
            _run("ip", "link", "set", near, "up")
            _run(*inside, "ip", "addr", "add", f"{FAR}/24", "dev", far)
            _run(*inside, "ip", "link", "set", far, "up")
            _run(*inside, "ip", "link", "set", "lo", "up")
            _run(*inside, "tc", "qdisc", "add", "dev", far, *shape.split())
        except BaseException:
            self.close()
            raise

    @property
    def far_command(self) -> list[str]:
        """What to put before a command to run it at the far end."""
        return ["ip", "netns", "exec", self._name]

    def close(self) -> None:
        """Remove all of it; the veth pair goes with the namespace."""
        subprocess.run(["ip", "netns", "del", self._name], capture_output=True, check=False)

    def __enter__(self) -> ShapedLink:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    if done.returncode != 0:
        raise ShapedError(f"{' '.join(command)}: {done.stderr.strip() or done.returncode}")
