"""ucx_perftest: what UCX itself reaches, without Python and without anything scattered."""

from __future__ import annotations

import os
import subprocess
import time

from kvbench.host import free_port

from baselines.peers import Perftest

TIMEOUT_S = 60
TRANSPORTS = {"tcp": {"UCX_TLS": "tcp"}, "shm": {"UCX_TLS": "posix"}}


class PerftestError(RuntimeError):
    """It failed, or printed what we can't read."""


def put_rate(perftest: Perftest, transport: str, message_bytes: int, count: int) -> float:
    """GB/s of one-sided puts of one buffer, between two processes.

    Below tens of megabytes the buffer stays in the caches, so that is no measure of moving memory.
    """
    environment = {
        **os.environ,
        "UCX_NET_DEVICES": "lo",
        "UCX_WARN_UNUSED_ENV_VARS": "n",
        **TRANSPORTS[transport],
    }
    if perftest.libraries:
        environment["LD_LIBRARY_PATH"] = perftest.libraries
    port = str(free_port())
    server = subprocess.Popen(
        [perftest.path, "-p", port],
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        time.sleep(0.4)  # it does not say when it listens
        shape = ["-s", str(message_bytes), "-n", str(count), "-w", "2"]
        done = subprocess.run(
            [perftest.path, "127.0.0.1", "-p", port, "-t", "ucp_put_bw", "-f", "-v", *shape],
            env=environment,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise PerftestError(f"it did not end within {TIMEOUT_S} s") from None
    finally:
        try:
            server.wait(2)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()
    rows = [line for line in done.stdout.splitlines() if line.count(",") >= 5]
    rows = [line for line in rows if line.strip()[:1].isdigit()]
    if done.returncode or not rows:
        said = (done.stderr or done.stdout).strip().splitlines()[-1:]
        raise PerftestError(f"status {done.returncode}: {''.join(said)}")
    return float(rows[-1].split(",")[5]) * (1 << 20) / 1e9  # the column is in MiB/s
