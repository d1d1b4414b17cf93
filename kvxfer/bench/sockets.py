"""What plain TCP sockets carry between the two sides: the limit that fetches over TCP have."""

from __future__ import annotations

import contextlib
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator

from kvxfer.bench.case import BenchError
from kvxfer.bench.channel import Channel
from kvxfer.config import Config
from kvxfer.handshake import Deadline, closed_on_fork, dial, join_address

_PIECE = 1 << 20
_TIMEOUT = 30.0
_MOST_STREAMS = 16
STREAMS = (1, 2, 4)
_TOKEN_BYTES = 32


def _shares(nbytes: int, streams: int) -> list[int]:
    return [nbytes // streams + (index < nbytes % streams) for index in range(streams)]


def _in_threads(jobs: list[Callable[[], None]]) -> None:
    """Run jobs at once, one of them here; raise what the first that failed raised."""
    failures: list[Exception] = []

    def guarded(job: Callable[[], None]) -> None:
        try:
            job()
        except OSError as error:
            failures.append(error)

    threads = [threading.Thread(target=guarded, args=(job,), daemon=True) for job in jobs[1:]]
    for thread in threads:
        thread.start()
    guarded(jobs[0])
    for thread in threads:
        thread.join()
    if failures:
        raise BenchError(f"plain sockets: {failures[0]}")


class SocketSender:
    """The serving side: sends as many bytes as it is asked for."""

    def __init__(self, host: str, streams: int) -> None:
        if not 1 <= streams <= _MOST_STREAMS:
            raise BenchError(f"{streams} streams; there can be 1 to {_MOST_STREAMS}")
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = closed_on_fork(socket.create_server((host, 0), family=family))
        self._listener.settimeout(_TIMEOUT)
        self.port = int(self._listener.getsockname()[1])
        self.token = secrets.token_hex(_TOKEN_BYTES // 2)
        self._streams = streams
        self._sockets: list[socket.socket] = []
        self._data = memoryview(bytearray(_PIECE))

    def send(self, nbytes: int) -> None:
        """Send `nbytes` over all streams together; the first call waits for the streams."""
        while len(self._sockets) < self._streams:
            sock, _ = self._listener.accept()
            sock.settimeout(_TIMEOUT)
            if sock.recv(_TOKEN_BYTES, socket.MSG_WAITALL) != self.token.encode():
                sock.close()  # not the other side
                continue
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._sockets.append(closed_on_fork(sock))
        shares = _shares(nbytes, self._streams)
        _in_threads(
            [
                lambda sock=sock, share=share: self._send_share(sock, share)  # type: ignore[misc]
                for sock, share in zip(self._sockets, shares, strict=True)
            ]
        )

    def _send_share(self, sock: socket.socket, left: int) -> None:
        while left > 0:
            sock.sendall(self._data[: min(left, _PIECE)])
            left -= _PIECE

    def close(self) -> None:
        self._listener.close()
        for sock in self._sockets:
            sock.close()


class SocketReceiver:
    """The running side: has the other send, and receives into one buffer a stream."""

    def __init__(self, channel: Channel, config: Config, streams: int) -> None:
        self._channel = channel
        self.streams = streams
        self._sockets: list[socket.socket] = []
        answer = channel.ask("sockets", streams=streams)
        # The other side's name, as we know it, with the port of the streams.
        address = join_address(*channel.remote(int(answer["port"])))
        try:
            for _ in range(streams):
                sock = dial(address, config, Deadline(_TIMEOUT))
                self._sockets.append(sock)
                sock.settimeout(_TIMEOUT)
                sock.sendall(str(answer["token"]).encode())
        except BaseException:
            self.close()
            raise
        self._buffers = [memoryview(bytearray(_PIECE)) for _ in range(streams)]

    def run(self, nbytes: int) -> float:
        """Return the seconds from asking for `nbytes` to having them."""
        shares = _shares(nbytes, self.streams)
        start = time.perf_counter()
        self._channel.send({"do": "send", "bytes": nbytes})
        _in_threads(
            [
                lambda sock=sock, buffer=buffer, share=share: _receive(sock, buffer, share)  # type: ignore[misc]
                for sock, buffer, share in zip(self._sockets, self._buffers, shares, strict=True)
            ]
        )
        seconds = time.perf_counter() - start
        self._channel.receive()
        return seconds

    def close(self) -> None:
        for sock in self._sockets:
            sock.close()


def _receive(sock: socket.socket, buffer: memoryview, left: int) -> None:
    while left > 0:
        got = sock.recv_into(buffer, min(left, len(buffer)))
        if got == 0:
            raise ConnectionError("a stream ended")
        left -= got


@contextlib.contextmanager
def best_sockets(channel: Channel, config: Config, nbytes: int) -> Iterator[SocketReceiver]:
    """Give the number of streams that is fastest here, of 1, 2 and 4."""
    rates: dict[int, float] = {}
    for streams in STREAMS:
        with contextlib.closing(SocketReceiver(channel, config, streams)) as receiver:
            receiver.run(nbytes)  # windows grow
            rates[streams] = min(receiver.run(nbytes) for _ in range(2))
    best = min(rates, key=lambda streams: rates[streams])
    with contextlib.closing(SocketReceiver(channel, config, best)) as receiver:
        receiver.run(nbytes)
        yield receiver
