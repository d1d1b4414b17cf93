"""What the tests of the direct path of caches on GPUs share."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import kvxfer
from kvtest import fake_verbs
from kvtest.agents import LONG, registered
from kvtest.caches import Geometry
from kvtest.fake_gpu import HOST, Gpus, look, made
from kvxfer import Status

PLACES = [(0, 1), (1, 1), (1, HOST), (HOST, 1)]
# Small, for kernels run as fibers.
SIDE = Geometry(layers=("a", "b", "c", "d"), content=64, num_blocks=6, heads=(0, 2))
TOKENS = SIDE.num_blocks * SIDE.block_size
BLOCKS = range(SIDE.num_blocks)
EXPORT = "cuMemGetHandleForAddressRange"
FLUSH = "cuFlushGPUDirectRDMAWrites"


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def moved(
    prefill: kvxfer.Agent,
    decode: kvxfer.Agent,
    here: int = 0,
    there: int = 1,
    side: Geometry = SIDE,
    **options: object,
) -> kvxfer.Report:
    """Fetch once from device to device, compare, and return the report."""
    with (
        made(side, here, seed=1) as source,
        made(side, there) as target,
        registered(prefill, source.cache),
        registered(decode, target.cache),
    ):
        blocks = range(side.num_blocks)
        with prefill.offer(source.cache, blocks, side.num_blocks * side.block_size) as offer:
            fetch = decode.fetch(offer.ticket, target.cache, blocks, timeout=LONG, **options)
            fetch.wait(LONG)
            assert look(target).same_as(source)
            assert offer.wait(LONG) is Status.OK
    return fetch.report


@contextlib.contextmanager
def peer_memory(gpus: Gpus) -> Iterator[None]:
    fake_verbs.set_peer_memory(gpus.peer_memory)
    try:
        yield
    finally:
        fake_verbs.set_peer_memory(None)


def over_hip(script: str, *arguments: str) -> str:
    """Run a script in a process of its own, which finds HIP and no CUDA; return what it prints."""
    library = os.environ["KVXFER_CUDA_LIBRARY"]
    names = {"CUDA": "libnone.so", "HIP": library, "HSA": library}
    environment = {f"KVXFER_{name}_LIBRARY": value for name, value in names.items()}
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments],
        env={**os.environ, **environment, "PYTHONPATH": str(Path(__file__).parents[1])},
        capture_output=True,
        text=True,
        timeout=LONG,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
