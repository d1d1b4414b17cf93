"""A bit that flips on its way over TCP, anywhere: right bytes, or a failure that says so."""

from __future__ import annotations

import random
import socket
import struct
import threading

import pytest
from kvtest.agents import LONG, consumer, producer
from kvtest.caches import Geometry, Paged

import kvxfer
from kvxfer.handshake import split_address

SIDE = Geometry(layers=("a", "b"), content=16, num_blocks=16)
OTHER = Geometry(layers=("a", "b"), content=16, num_blocks=32, block_size=8, axes="BNHC")
TOKENS = 100
BLOCKS, OTHER_BLOCKS = list(range(7)), list(range(13))


class Flipper:
    """Passes connections on and flips one bit of what one side says on the control connection."""

    def __init__(self, address: str, direction: str, at: int, bit: int) -> None:
        self._target, self._direction, self._at, self._bit = address, direction, at, bit
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listening.getsockname()[1]}"
        self.flipped = False
        self._first = True
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listening.accept()
            except OSError:
                return
            server = socket.create_connection(split_address(self._target), LONG)
            control, self._first = self._first, False
            for source, target, way in ((client, server, "up"), (server, client, "down")):
                # Frames of the handshake come first: two from either side.
                flips = control and way == self._direction
                threading.Thread(
                    target=self._pump, args=(source, target, flips), daemon=True
                ).start()

    def _pump(self, source: socket.socket, target: socket.socket, flips: bool) -> None:
        try:
            for _ in range(2 if flips else 0):
                header = source.recv(4, socket.MSG_WAITALL)
                rest = source.recv(struct.unpack("<I", header)[0], socket.MSG_WAITALL)
                target.sendall(header + rest)
            seen = 0
            while data := source.recv(1 << 16):
                raw = bytearray(data)
                if flips and seen <= self._at < seen + len(raw):
                    raw[self._at - seen] ^= 1 << self._bit
                    self.flipped = True
                seen += len(raw)
                target.sendall(raw)
        except OSError:
            pass
        for sock in (source, target):
            sock.close()

    def close(self) -> None:
        self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()


def fetch_through(direction: str, at: int, bit: int) -> tuple[bool, bool, bool]:
    """Return whether a bit was flipped, whether the fetch delivered, and whether what it should."""
    with (
        producer("tcp", heartbeat_interval=0.2, heartbeat_timeout=2.0) as prefill,
        consumer("tcp", heartbeat_interval=0.2, heartbeat_timeout=2.0) as decode,
    ):
        flipper = Flipper(prefill.address, direction, at, bit)
        source, target, wanted = Paged(SIDE, 1), Paged(OTHER), Paged(OTHER)
        wanted.deliver([source], BLOCKS, OTHER_BLOCKS, (0, TOKENS))
        prefill.register(source.cache)
        decode.register(target.cache)
        reference = kvxfer.AgentRef(name="prefill", address=flipper.address)
        ticket = kvxfer.issue_ticket("r", [reference], num_tokens=TOKENS)
        prefill.offer(source.cache, BLOCKS, ticket=ticket)
        fetch = decode.fetch(ticket, target.cache, OTHER_BLOCKS, timeout=4.0)
        try:
            fetch.wait(LONG)
        except kvxfer.TransferError:
            delivered = False
        else:
            delivered = True
        flipper.close()
        return flipper.flipped, delivered, target.same_as(wanted)


def test_without_a_flip_it_delivers() -> None:
    assert fetch_through("up", 1 << 40, 0) == (False, True, True)


@pytest.mark.parametrize("direction", ["up", "down"])
@pytest.mark.parametrize("seed", range(6))
def test_a_flipped_bit_never_delivers_wrong_bytes(direction: str, seed: int) -> None:
    """HELLO, LAYOUT and FETCH one way, HELLO and ACCEPT the other."""
    draw = random.Random(seed)
    for _ in range(3):
        at, bit = draw.randrange(380 if direction == "up" else 110), draw.randrange(8)
        flipped, delivered, right = fetch_through(direction, at, bit)
        assert flipped
        assert not delivered, f"byte {at}, bit {bit} of what went {direction} made no difference"
        del right
