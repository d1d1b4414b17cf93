"""The sending process of the plain-sockets baseline."""

from __future__ import annotations

import socket

from kvbench.child import Reply, serve
from kvbench.measure import MIB
from kvbench.memory import Pages, Pool
from kvbench.native import Native

from baselines.host import SOCKET_TIMEOUT_S, prepared_socket


class _Sender:
    def __init__(self) -> None:
        self._native = Native()
        self._sockets: list[socket.socket] = []
        self._src = Pool(0)

    def start(self, port: int, streams: int, nbytes: int, pages: Pages, seed: int) -> Reply:
        self._src = Pool(nbytes, pages)
        self._src.fill_random(seed)
        for _ in range(streams):
            connection = socket.create_connection(("127.0.0.1", port), SOCKET_TIMEOUT_S)
            self._sockets.append(prepared_socket(connection))
        return {}

    def send(self) -> Reply:
        self._native.send_all(
            [s.fileno() for s in self._sockets], self._src.address, self._src.nbytes, MIB
        )
        return {}


if __name__ == "__main__":
    _sender = _Sender()
    serve({"start": _sender.start, "send": _sender.send})
