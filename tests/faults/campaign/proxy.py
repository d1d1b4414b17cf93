"""A TCP proxy in front of a producer, which does to bytes and connections what networks do."""

from __future__ import annotations

import collections
import contextlib
import random
import socket
import struct
import threading
import time
from collections.abc import Callable

from faults.campaign.shuffle import SHUFFLES, Shuffle
from faults.campaign.watch import Watch

from kvxfer.handshake import split_address

DAMAGE = ("corrupt", "duplicate", "truncate")  # of what passes
MET = (*DAMAGE, *SHUFFLES)  # what happens only when something passes
_PIECE = 16 << 10
_TICK = 0.05  # seconds after which a thread looks whether its connection is still wanted
_ABORT = struct.pack("ii", 1, 0)  # SO_LINGER: close with RST


class _Pair:
    """A connection through the proxy: the consumer's end and the producer's."""

    def __init__(self, client: socket.socket, server: socket.socket) -> None:
        self.client, self.server = client, server
        self.running = 2
        self.watch = Watch()
        self.passed = {"up": 0, "down": 0}
        self.shuffles: dict[str, Shuffle] = {}
        self.half = False

    def abort(self, sock: socket.socket) -> None:
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _ABORT)
        sock.close()


class Proxy:
    """Forwards connections to `target`, which may change. `begin` and `end` turn faults on and off.

    ``reset``: connections end with RST. ``half``: one end does, the other hears nothing.
    ``freeze``: nothing passes, nothing is said, as in a partition. ``delay``: all is late.
    ``corrupt``, ``duplicate``, ``truncate``: that happens to one piece of what passes; ``repeat``,
    ``swap``, ``late`` to one message or a few. `happened` counts them.
    """

    def __init__(self) -> None:
        self._listening = socket.create_server(("127.0.0.1", 0), backlog=512)
        self._listening.settimeout(_TICK)
        self.address = f"127.0.0.1:{self._listening.getsockname()[1]}"
        self.target: str | None = None
        self._lock = threading.Lock()
        self._pairs: list[_Pair] = []
        self._open = threading.Event()  # cleared while frozen
        self._open.set()
        self._delay = 0.0
        self._damage: list[tuple[str, str, random.Random]] = []
        self._watched: list[tuple[str, Callable[[], None]]] = []
        self.corrupted: list[float] = []  # when a bit was flipped
        self.connections = 0
        self.happened: collections.Counter[str] = collections.Counter()
        self._over = False
        threading.Thread(target=self._accept, daemon=True, name="campaign-proxy").start()

    def close(self) -> None:
        self._over = True
        self._open.set()
        with self._lock:
            pairs = list(self._pairs)
        for pair in pairs:
            pair.client.close()
            pair.server.close()

    def begin(self, how: str, direction: str, seed: int) -> None:
        """Begin a fault in one direction: "up" is to the producer."""
        with self._lock:
            pairs = list(self._pairs)
            if how in MET:
                self._damage.append((how, direction, random.Random(seed)))
        if how == "reset":
            for pair in pairs:
                pair.abort(pair.client)
                pair.abort(pair.server)
        elif how == "half":
            for pair in pairs:
                pair.half = True
                pair.abort(pair.server if direction == "up" else pair.client)
        elif how == "freeze":
            self._open.clear()
        elif how == "delay":
            self._delay = 0.02

    def end(self, how: str) -> None:
        if how == "freeze":
            self._open.set()
        elif how == "delay":
            self._delay = 0.0
        elif how == "half":
            with self._lock:
                halves = [pair for pair in self._pairs if pair.half]
            for pair in halves:
                pair.client.close()
                pair.server.close()
        with self._lock:
            self._damage = [entry for entry in self._damage if entry[0] != how]

    def watch(self, kind: str, action: Callable[[], None]) -> object:
        """Do something, once, when a message of a kind is about to pass: see `watch.KINDS`."""
        entry = (kind, action)
        with self._lock:
            self._watched.append(entry)
        return entry

    def forget(self, entry: object) -> None:
        with self._lock:
            self._watched = [other for other in self._watched if other is not entry]

    def _see(self, pair: _Pair, direction: str, data: bytes) -> None:
        with self._lock:
            seen = pair.watch.feed(direction, data)
            now = [entry for entry in self._watched if entry[0] in seen]
            self._watched = [entry for entry in self._watched if entry not in now]
        for _, action in now:
            action()

    def _accept(self) -> None:
        with self._listening:
            while not self._over:
                try:
                    client, _ = self._listening.accept()
                except OSError:
                    continue
                threading.Thread(
                    target=self._connect, args=(client,), daemon=True, name="campaign-proxy"
                ).start()

    def _connect(self, client: socket.socket) -> None:
        self._open.wait()
        try:
            assert self.target is not None
            server = socket.create_connection(split_address(self.target), 5)
        except (OSError, AssertionError):
            client.close()
            return
        pair = _Pair(client, server)
        for sock in (client, server):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.settimeout(_TICK)
        with self._lock:
            self._pairs.append(pair)
            self.connections += 1
        threading.Thread(
            target=self._pump, args=(pair, server, client, "down"), daemon=True
        ).start()
        self._pump(pair, client, server, "up")

    def _pump(
        self, pair: _Pair, source: socket.socket, target: socket.socket, direction: str
    ) -> None:
        try:
            while not self._over:
                try:
                    data = source.recv(_PIECE)
                except TimeoutError:
                    self._pass_on(target, self._tick(pair, direction))
                    continue
                self._open.wait()
                if self._delay:
                    time.sleep(self._delay)
                if not data:
                    target.shutdown(socket.SHUT_WR)
                    break
                self._see(pair, direction, data)
                data = self._shuffled(pair, data, direction)
                self._pass_on(target, self._damaged(data, direction))
        except OSError:
            # One end has gone: the other is told, unless it is not to know.
            if not pair.half:
                source.close()
                target.close()
        with self._lock:
            pair.running -= 1
            over = pair.running == 0 and not pair.half
            if over:
                self._pairs.remove(pair)
        if over:
            source.close()
            target.close()

    def _pass_on(self, target: socket.socket, data: bytes) -> None:
        rest = memoryview(data)
        while rest:
            try:
                rest = rest[target.send(rest) :]
            except TimeoutError:
                if self._over:
                    return

    def _shuffled(self, pair: _Pair, data: bytes, direction: str) -> bytes:
        at, begun = pair.passed[direction], pair.watch.begun[direction]
        pair.passed[direction] += len(data)
        with self._lock:
            shuffle = pair.shuffles.get(direction)
            for entry in self._damage:
                how, where, draw = entry
                if shuffle or where != direction or how not in SHUFFLES or not begun:
                    continue
                if draw.random() > 0.3:
                    continue
                shuffle = pair.shuffles[direction] = Shuffle(how)
                break
            if shuffle is None:
                return data
            data = shuffle.feed(at, data, begun)
            self._after(pair, shuffle, direction)
            return data

    def _tick(self, pair: _Pair, direction: str) -> bytes:
        with self._lock:
            shuffle = pair.shuffles.get(direction)
            if shuffle is None:
                return b""
            data = shuffle.tick()
            self._after(pair, shuffle, direction)
            return data

    def _after(self, pair: _Pair, shuffle: Shuffle, direction: str) -> None:
        if shuffle.over:
            del pair.shuffles[direction]
        if shuffle.happened:
            self.happened[shuffle.how] += 1
            happened = (shuffle.how, direction)
            self._damage = [entry for entry in self._damage if entry[:2] != happened]

    def _damaged(self, data: bytes, direction: str) -> bytes:
        if not self._damage or not data:
            return data
        with self._lock:
            for entry in self._damage:
                how, where, draw = entry
                if where != direction or how not in DAMAGE:
                    continue
                # Some pieces pass, so that it meets every stage of a conversation.
                if draw.random() < 0.7:
                    continue
                self._damage.remove(entry)
                self.happened[how] += 1
                at = draw.randrange(len(data))
                if how == "corrupt":
                    raw = bytearray(data)
                    raw[at] ^= 1 << draw.randrange(8)
                    self.corrupted.append(time.monotonic())
                    return bytes(raw)
                if how == "duplicate":
                    return data[:at] + data[at // 2 : at] + data[at:]
                return data[:at] + data[at + 1 + (len(data) - at) // 2 :]
        return data
