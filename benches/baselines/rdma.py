"""What others reach over the same RDMA adapters, counted by the adapters themselves.

perftest and ucx_perftest know no time where the kernel does not tell the clock of the processor, as
in the rig. So they run until they are stopped, and the packets that an adapter sent are counted.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

PAYLOAD = 4096  # bytes of a full packet: sizes are multiples of it
STARTS_WITHIN_S = 30.0
COUNTED_S = 0.8


class RivalError(RuntimeError):
    """It did not start, or sent nothing."""


@dataclass(frozen=True)
class Rival:
    """A command that sends for as long as it lives.

    Parameters
    ----------
    server
        Started first; None where `client` is both.
    sends
        The adapter whose packets are counted.
    """

    server: Sequence[str] | None
    client: Sequence[str]
    sends: str
    environment: dict[str, str] = field(default_factory=dict)

    def rate(self) -> float:
        """GB/s while it runs."""
        with ExitStack() as stack:
            if self.server is not None:
                stack.enter_context(_running(self.server, self.environment))
                time.sleep(0.5)
            client = stack.enter_context(_running(self.client, self.environment))
            idle, deadline = _packets(self.sends), time.monotonic() + STARTS_WITHIN_S
            while _packets(self.sends) < idle + 2000:
                if client.poll() is not None or time.monotonic() > deadline:
                    raise RivalError(f"it sent nothing: {' '.join(self.client)}")
                time.sleep(0.02)
            before, begun = _packets(self.sends), time.monotonic()
            time.sleep(COUNTED_S)
            sent, seconds = _packets(self.sends) - before, time.monotonic() - begun
            if client.poll() is not None:
                raise RivalError(f"it ended while it was counted: {' '.join(self.client)}")
        return sent * PAYLOAD / seconds / 1e9


def perftest(
    size: int, queue_pairs: int, under_way: int, devices: tuple[str, str], host: str
) -> Rival | None:
    """ib_write_bw with so many writes under way on each queue pair; None where it is not there."""
    if shutil.which("ib_write_bw") is None:
        return None
    common = [
        *("ib_write_bw", "--CPU-freq", "--gid-index=1", f"--size={size}", "--run_infinitely"),
        *(f"--qp={queue_pairs}", f"--tx-depth={under_way}", f"--cq-mod={min(under_way, 32)}"),
    ]
    return Rival(
        [*common, f"--ib-dev={devices[0]}"], [*common, f"--ib-dev={devices[1]}", host], devices[1]
    )


def ucx_put(size: int, device: str) -> Rival | None:
    """ucx_perftest's puts over rc_verbs, in one process: two that poll on one processor starve."""
    if shutil.which("ucx_perftest") is None:
        return None
    environment = {
        "UCX_TLS": "rc_v",
        "UCX_NET_DEVICES": f"{device}:1",
        "UCX_IB_GID_INDEX": "0",  # its UD drops what comes over an IPv4-mapped GID of soft-RoCE
    }
    count = (1 << 40) // size
    command = [
        *("ucx_perftest", "-l", "-t", "ucp_put_bw"),
        *("-s", str(size), "-n", str(count), "-w", "1"),
    ]
    return Rival(None, command, device, environment)


def _packets(device: str) -> int:
    counters = Path("/sys/class/infiniband") / device / "ports/1/hw_counters"
    return int((counters / "sent_pkts").read_text())


@contextmanager
def _running(
    command: Sequence[str], environment: dict[str, str]
) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, **environment},
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()
