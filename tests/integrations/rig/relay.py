"""A TCP relay that can flip a bit of what passes, and tickets that lead through it."""

from __future__ import annotations

import contextlib
import dataclasses
import socket
import threading
from collections.abc import Iterator
from typing import Any

from kvxfer.ticket import issue_ticket, parse_ticket

_PIECE = 256 << 10
_LARGE = 16 << 10  # pieces of this size hold chunks, smaller ones may be messages


class Relay:
    """Listens on loopback and forwards to wherever a ticket's agent is."""

    def __init__(self) -> None:
        self._listening = socket.create_server(("127.0.0.1", 0))
        self._target = ("127.0.0.1", 0)
        self.address = f"127.0.0.1:{self._listening.getsockname()[1]}"
        self.flipping = True
        self.flipped = 0
        threading.Thread(target=self._accept, daemon=True).start()

    def through(self, params: dict[str, Any]) -> dict[str, Any]:
        """Return kv_transfer_params whose agents are reached through this relay."""
        agents = {}
        for key, ticket in params["kvxfer"]["agents"].items():
            parsed = parse_ticket(ticket, None)
            (agent,) = parsed.agents
            host, port = agent.address.rsplit(":", 1)
            self._target = host, int(port)
            here = dataclasses.replace(agent, address=self.address)
            agents[key] = issue_ticket(
                parsed.offer_id,
                [here],
                num_tokens=parsed.num_tokens,
                first_token=parsed.first_token,
                generation=parsed.generation,
                model=parsed.model,
            )
        return {**params, "kvxfer": {**params["kvxfer"], "agents": agents}}

    def close(self) -> None:
        self._listening.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listening.accept()
            except OSError:
                return  # closed
            server = socket.create_connection(self._target)
            for ends in ((client, server, False), (server, client, True)):
                threading.Thread(target=self._forward, args=ends, daemon=True).start()

    def _forward(self, source: socket.socket, sink: socket.socket, may_flip: bool) -> None:
        with contextlib.suppress(OSError):
            while piece := bytearray(source.recv(_PIECE)):
                if may_flip and self.flipping and len(piece) >= _LARGE:
                    piece[len(piece) // 2] ^= 4
                    self.flipped += 1
                sink.sendall(piece)
        for each in (source, sink):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)


@contextlib.contextmanager
def flipping() -> Iterator[Relay]:
    relay = Relay()
    try:
        yield relay
    finally:
        relay.close()
