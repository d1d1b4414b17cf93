"""What any transfer on one host can be measured by: memcpy and plain sockets."""

from __future__ import annotations

import os
import socket
import statistics
import struct
from types import TracebackType

from kvbench.child import python_child
from kvbench.measure import KIB, MIB, Contender, interleave, timed
from kvbench.memory import POISON, Offsets, Pages, Pool, offsets_of, scattered_slots
from kvbench.native import LIBRARY_VARIABLE, Native

DATA_SEED = 20240
SRC_SEED = 11  # which slots the runs are read from, the same for every contender
DST_SEED = 22
SOCKET_SEED = 77
SOCKET_TIMEOUT_S = 20


class CheckError(AssertionError):
    """Bytes arrived wrong: figures of such a run are worth nothing."""


class Memcpy:
    """One thread, one memcpy of `nbytes` contiguous bytes, cold to cold."""

    def __init__(self, native: Native, nbytes: int, pages: Pages) -> None:
        self._native = native
        self._nbytes = nbytes
        self.src = Pool(nbytes, pages)
        self.dst = Pool(nbytes, pages)
        self.src.fill_random(DATA_SEED)
        self.check()

    def run(self) -> float:
        """Seconds of one copy."""
        return timed(lambda: self._native.copy(self.dst.address, self.src.address, self._nbytes))

    def check(self) -> None:
        """Copy once and compare."""
        self.dst.fill(POISON)
        self.run()
        if not (self.src.bytes == self.dst.bytes).all():
            raise CheckError("memcpy: the copy differs")

    def contender(self) -> Contender:
        """Its turn in an interleaved run."""
        return Contender("memcpy", lambda: [self.run()], (os.getpid(),))


class ScatteredMemcpy:
    """One thread, one memcpy a run, runs at random slots of two pools twice their size."""

    def __init__(self, native: Native, nbytes: int, run_bytes: int, pages: Pages) -> None:
        self._native = native
        self.run_bytes = run_bytes
        self.runs = nbytes // run_bytes
        self.pool_bytes = 2 * nbytes
        self.src = Pool(self.pool_bytes, pages)
        self.dst = Pool(self.pool_bytes, pages)
        self.src.fill_random(DATA_SEED)
        self.src_offsets, self.dst_offsets = run_offsets(run_bytes, self.runs, self.pool_bytes)
        self.check()

    def run(self) -> float:
        """Seconds of one copy of all runs."""
        return timed(
            lambda: self._native.scattered_copy(
                self.dst.address,
                self.dst_offsets,
                self.src.address,
                self.src_offsets,
                self.run_bytes,
            )
        )

    def check(self) -> None:
        """Copy once and compare."""
        self.dst.fill(POISON)
        self.run()
        bad = self._native.scattered_mismatch(
            self.dst.address, self.dst_offsets, self.src.address, self.src_offsets, self.run_bytes
        )
        if bad >= 0:
            raise CheckError(f"scattered memcpy: run {bad} differs")

    def contender(self) -> Contender:
        """Its turn in an interleaved run."""
        return Contender("scattered", lambda: [self.run()], (os.getpid(),))


def run_offsets(run_bytes: int, runs: int, pool_bytes: int) -> tuple[Offsets, Offsets]:
    """Where the runs lie on the sending and on the receiving side."""
    return (
        offsets_of(scattered_slots(run_bytes, runs, pool_bytes, SRC_SEED), run_bytes),
        offsets_of(scattered_slots(run_bytes, runs, pool_bytes, DST_SEED), run_bytes),
    )


class Sockets:
    """Plain TCP over loopback between two processes: contiguous, a thread a stream, calls of 1 MiB.

    The receiver is this process. A run is: tell the sender to go, receive everything.
    """

    def __init__(self, native: Native, nbytes: int, pages: Pages, streams: int) -> None:
        self._native = native
        self._nbytes = nbytes
        self.streams = streams
        self.dst = Pool(nbytes, pages)
        self._sockets: list[socket.socket] = []
        self._child = python_child(
            "socket sender", "baselines.socket_sender", {LIBRARY_VARIABLE: native.path}
        )
        try:
            with socket.create_server(("127.0.0.1", 0), backlog=streams) as listener:
                listener.settimeout(SOCKET_TIMEOUT_S)
                self._child.post(
                    "start",
                    port=listener.getsockname()[1],
                    streams=streams,
                    nbytes=nbytes,
                    pages=pages,
                    seed=SOCKET_SEED,
                )
                for _ in range(streams):
                    self._sockets.append(prepared_socket(listener.accept()[0]))
            self._child.receive()
            self.check()
        except BaseException:
            self.close()
            raise

    def run(self) -> float:
        """Seconds from asking the sender to having everything."""
        fds = [s.fileno() for s in self._sockets]

        def work() -> None:
            self._child.post("send")
            self._native.recv_all(fds, self.dst.address, self._nbytes, MIB)

        seconds = timed(work)
        self._child.receive(SOCKET_TIMEOUT_S)
        return seconds

    def check(self) -> None:
        """Receive once and compare."""
        self.dst.fill(POISON)
        self.run()
        expected = Pool(self._nbytes)
        expected.fill_random(SOCKET_SEED)
        if not (self.dst.bytes == expected.bytes).all():
            raise CheckError("plain sockets: the received bytes differ")

    def contender(self) -> Contender:
        """Its turn in an interleaved run."""
        return Contender(
            f"sockets, {self.streams} streams", lambda: [self.run()], (self._child.pid, os.getpid())
        )

    def close(self) -> None:
        """End the sender."""
        for s in self._sockets:
            s.close()
        self._child.close()

    def __enter__(self) -> Sockets:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def best_streams(native: Native, nbytes: int, pages: Pages, repetitions: int = 5) -> int:
    """The number of streams with which plain sockets are fastest here."""
    candidates: list[Sockets] = []
    try:
        for streams in (1, 2, 4):
            candidates.append(Sockets(native, nbytes, pages, streams))
        tried = interleave([c.contender() for c in candidates], repetitions)
    finally:
        for candidate in candidates:
            candidate.close()
    medians = [statistics.median(s.seconds) for s in tried.series.values()]
    return candidates[medians.index(min(medians))].streams


def prepared_socket(s: socket.socket) -> socket.socket:
    """Blocking, undelayed, and with a time-out on every call."""
    s.setblocking(True)
    s.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    s.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", SOCKET_TIMEOUT_S, 0))
    s.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", SOCKET_TIMEOUT_S, 0))
    return s


def label(run_bytes: int) -> str:
    """`16k` for 16 KiB."""
    return f"{run_bytes // KIB}k"
