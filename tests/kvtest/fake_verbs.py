"""RDMA adapters that exist in this process only, and fail on request: tests/verbs/fake_verbs.h."""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import kvxfer

if TYPE_CHECKING:
    from kvtest.fake_gpu import Gpus

DEVICES = ("fake0", "fake1")


def _path() -> Path | None:
    named = os.environ.get("KVXFER_FAKE_VERBS")
    built = Path(__file__).parents[2] / "build" / "release" / "libkvxfer_fake_verbs.so"
    path = Path(named) if named else built
    return path if path.exists() else None


def real_devices() -> list[str] | None:
    """Return the consumers' and the producers', where tests are to run over real adapters."""
    named = os.environ.get("KVXFER_TEST_VERBS")
    return named.split("/") if named else None


def use() -> None:
    """Let agents of this process find adapters; skip the test where no fake ones were built."""
    if real_devices() is not None:
        return
    if (reason := missing()) is not None:
        pytest.skip(reason)
    os.environ["KVXFER_VERBS_LIBRARY"] = str(_path())


def missing() -> str | None:
    about = kvxfer._core.build_info()["back_ends"]["verbs"]
    if about["state"] != "on":
        return f"this build has no verbs: {about['reason']}"
    if _path() is None:
        return "libkvxfer_fake_verbs.so is not built (make build-tests), nor in KVXFER_FAKE_VERBS"
    return None


@functools.cache
def library() -> ctypes.CDLL:
    found = ctypes.CDLL(str(_path()))
    found.fake_verbs_set_port.restype = ctypes.c_bool
    found.fake_verbs_bytes_sent.restype = ctypes.c_uint64
    found.fake_verbs_violations.restype = ctypes.c_uint64
    found.fake_verbs_objects.restype = ctypes.c_uint64
    found.fake_verbs_registrations.restype = ctypes.c_uint64
    found.fake_verbs_fetched_sends.restype = ctypes.c_uint64
    found.fake_verbs_delayed_gpu_writes.restype = ctypes.c_uint64
    found.fake_verbs_remote_keys.restype = ctypes.c_uint32
    return found


def set_port(device: str, active: bool) -> None:
    assert library().fake_verbs_set_port(device.encode(), 1, active)


def break_queue_pairs(device: str) -> None:
    library().fake_verbs_break_queue_pairs(device.encode(), True)


def revoke_remote_keys(device: str) -> None:
    """As if what is registered with the device were deregistered, for peers."""
    library().fake_verbs_revoke_remote_keys(device.encode())


def overrun_completion_queues(device: str) -> None:
    library().fake_verbs_overrun_completion_queues(device.encode())


def fail_device(device: str) -> None:
    library().fake_verbs_fail_device(device.encode())


def lose_acknowledgements(device: str, lose: bool) -> None:
    library().fake_verbs_lose_acknowledgements(device.encode(), lose)


def hold_sends(hold: bool) -> None:
    library().fake_verbs_hold_sends(hold)


@contextmanager
def held_registrations() -> Iterator[None]:
    """Let who registers memory wait until the end of the block."""
    library().fake_verbs_hold_registrations(True)
    try:
        yield
    finally:
        library().fake_verbs_hold_registrations(False)


def fail_calls(function: str, error: int, skip: int = 0, times: int = 1) -> None:
    library().fake_verbs_fail_calls(function.encode(), error, skip, times)


def lose_gpu_writes(lose: bool) -> None:
    """Let registrations of GPU memory look all right, and lead nowhere."""
    library().fake_verbs_lose_gpu_writes(lose)


def mask_offsets(mask: int) -> None:
    """Let registrations heed only these bits of where in dma-bufs memory begins."""
    library().fake_verbs_mask_offsets(ctypes.c_uint64(mask))


def land_gpu_writes() -> object:
    """Return what lets delayed writes land, for who flushes them: a function of ctypes."""
    return library().fake_verbs_land_gpu_writes


def delayed_gpu_writes() -> int:
    """Return how many are on their way."""
    return library().fake_verbs_delayed_gpu_writes()


@contextmanager
def delayed(gpus: Gpus) -> Iterator[None]:
    """Let adapters' writes into GPU memory not be there until they are flushed, or read back."""
    gpus.on_flush(land_gpu_writes())
    library().fake_verbs_delay_gpu_writes(True)
    try:
        yield
    finally:
        library().fake_verbs_delay_gpu_writes(False)
        library().fake_verbs_land_gpu_writes()
        gpus.on_flush(None)


def flip_writes(times: int) -> None:
    """Flip a bit in each of the next RDMA writes."""
    library().fake_verbs_flip_writes(times)


def set_peer_memory(find: object | None) -> None:
    """Have a peer-memory module, which asks this function of ctypes about addresses."""
    library().fake_verbs_set_peer_memory(find)


@contextmanager
def max_mr_size(size: int) -> Iterator[None]:
    """Let adapters that are opened in the block register no more than that at once."""
    library().fake_verbs_set_max_mr_size(ctypes.c_uint64(size))
    try:
        yield
    finally:
        library().fake_verbs_set_max_mr_size(ctypes.c_uint64((1 << 64) - 1))


def fetched_sends() -> int:
    """Return for how many messages, which are no writes, adapters have read memory so far."""
    return library().fake_verbs_fetched_sends()


def bytes_sent(device: str) -> int:
    return library().fake_verbs_bytes_sent(device.encode(), 1)


def violations() -> int:
    """Requests that a correct user never makes: keys, bounds, states."""
    return library().fake_verbs_violations()


def objects() -> int:
    """Contexts, queue pairs, registrations and so on that somebody holds."""
    return library().fake_verbs_objects()


def registrations() -> int:
    """Return how many there were so far."""
    return library().fake_verbs_registrations()


def remote_keys() -> set[int]:
    """Keys by which peers may write, of all agents of this process."""
    keys = (ctypes.c_uint32 * 256)()
    count = library().fake_verbs_remote_keys(keys, len(keys))
    assert count <= len(keys)
    return set(keys[:count])


@contextmanager
def no_faults_left() -> Iterator[None]:
    """Let what a block breaks be whole again behind it, and adapters have had nothing to refuse."""
    before = violations()
    try:
        yield
        assert violations() == before
    finally:
        library().fake_verbs_forget_faults()
        for device in DEVICES:
            set_port(device, True)
