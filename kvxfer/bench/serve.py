"""The serving side: has the caches that the other side fetches from."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable

import kvxfer
from kvxfer._numbers import format_bytes
from kvxfer._terminal import printable
from kvxfer.bench import channel as channels
from kvxfer.bench.case import BenchError, Case
from kvxfer.bench.channel import Channel
from kvxfer.bench.pool import Pool, block_tables
from kvxfer.bench.settings import agent_settings
from kvxfer.bench.sockets import SocketSender
from kvxfer.bench.stamp import available_bytes, stamp
from kvxfer.config import Config
from kvxfer.doctor.pattern import AGENT, PatternCache, offer_pattern
from kvxfer.handshake import Frame, join_address

_LEASE = 120.0  # seconds that an offer waits for the other side
_MOST_OFFERS = 64  # in one answer: a frame has 64 KiB

Say = Callable[[str], None]


class Visit:
    """What one running side has had us make. Used by one thread."""

    def __init__(self, channel: Channel, config: Config) -> None:
        self._channel, self._config = channel, config
        self._agent: kvxfer.Agent | None = None
        self._cache: kvxfer.Cache | None = None
        self._case: Case | None = None
        self._blocks: list[int] = []
        self._offers: list[kvxfer.Offer] = []
        self._sender: SocketSender | None = None
        self._handlers: dict[str, Callable[[Frame], Frame]] = {
            "hello": self._hello,
            "prepare": self._prepare,
            "pattern": self._pattern,
            "offer": self._offer,
            "cpu": self._cpu,
            "sockets": self._sockets,
            "send": self._send,
            "release": self._release,
        }

    def run(self, say: Say) -> None:
        """Answer until the other side ends."""
        while (frame := self._channel.wait()) is not None:
            handler = self._handlers.get(str(frame.get("do")))
            if handler is None:
                answer: Frame = {"failed": f"there is no {str(frame.get('do'))[:40]!r} here"}
            else:
                try:
                    answer = handler(frame)
                except (BenchError, kvxfer.Error, OSError, KeyError, ValueError) as error:
                    answer = {"failed": str(error) or type(error).__name__}
                except MemoryError:
                    answer = {"failed": "out of memory: choose fewer blocks or tokens"}
            if frame.get("do") == "prepare" and "failed" not in answer and self._case:
                name = printable(self._case.name)
                say(f"serving {name}: {self._case.bytes} bytes a transfer")
            try:
                self._channel.send(answer)
            except BenchError:
                return  # the other side has ended

    def close(self) -> None:
        self._release({})
        if self._sender is not None:
            self._sender.close()
            self._sender = None

    def _hello(self, _: Frame) -> Frame:
        return {"pid": os.getpid(), "stamp": stamp(), "available": available_bytes()}

    def _prepare(self, frame: Frame) -> Frame:
        self._release({})
        case = Case.of(frame["case"])
        available = available_bytes()
        if available is not None and case.pool_bytes > available:
            raise BenchError(
                f"{case.name} needs {format_bytes(case.pool_bytes)} of memory; "
                f"{format_bytes(available)} are available: choose fewer blocks or tokens"
            )
        pool = Pool(case)
        pool.fill()
        host = self._channel.local_host
        self._agent = kvxfer.Agent(
            "bench-serve",
            listen=join_address(host, 0),
            config=self._config.replace(**agent_settings(case)),
        )
        self._cache = self._agent.register(pool.cache())
        self._case, self._blocks = case, block_tables(case)[0]
        return {}

    def _pattern(self, _: Frame) -> Frame:
        """Be the other side of ``kvxfer doctor --peer``."""
        self._release({})
        host = self._channel.local_host
        self._agent = kvxfer.Agent(AGENT, listen=join_address(host, 0), config=self._config)
        self._offers = [offer_pattern(self._agent, PatternCache(filled=True))]
        return {"address": self._agent.address}

    def _offer(self, frame: Frame) -> Frame:
        if self._agent is None or self._cache is None or self._case is None:
            raise BenchError("nothing was prepared")
        case, count = self._case, int(frame["count"])
        if not 1 <= count * case.in_flight <= _MOST_OFFERS:
            raise BenchError(f"{count} times {case.in_flight} offers are more than {_MOST_OFFERS}")
        self._offers = [offer for offer in self._offers if not offer.released]
        tickets = []
        for _ in range(count):
            for begin, end in case.parts():
                first, last = begin // case.block_size, -(-end // case.block_size)
                offer = self._agent.offer(
                    self._cache, self._blocks[first:last], end - begin, lease=_LEASE
                )
                self._offers.append(offer)
                tickets.append(offer.ticket)
        return {"tickets": tickets}

    def _cpu(self, _: Frame) -> Frame:
        return {"seconds": time.process_time()}

    def _sockets(self, frame: Frame) -> Frame:
        if self._sender is not None:
            self._sender.close()
        self._sender = SocketSender(self._channel.local_host, int(frame["streams"]))
        return {"port": self._sender.port, "token": self._sender.token}

    def _send(self, frame: Frame) -> Frame:
        if self._sender is None:
            raise BenchError("no sockets were opened")
        self._sender.send(int(frame["bytes"]))
        return {}

    def _release(self, _: Frame) -> Frame:
        self._offers.clear()
        if self._agent is not None:
            self._agent.close()
        self._agent = self._cache = self._case = None
        return {}


class Server:
    """Serves one running side after the other; more at once are told to wait.

    Parameters
    ----------
    address
        Where to listen; port 0 picks a free one, which `address` then says.
    say
        Called with a line for the user, from any thread.
    """

    def __init__(self, address: str, config: Config, say: Say) -> None:
        self._config, self._say = config, say
        self._sock = channels.listen(address, config)
        host, port = self._sock.getsockname()[:2]
        self.address = join_address(str(host), int(port))
        self._open: set[Channel] = set()
        self._lock = threading.Lock()
        self._turn = threading.Lock()

    def run(self, once: bool = False, patience: float | None = None) -> bool:
        """Accept until interrupted; with `once` until the first running side has ended.

        Parameters
        ----------
        patience
            Seconds to wait for that one.

        Returns
        -------
        bool
            False when nobody came.
        """
        self._sock.settimeout(patience)
        threads: list[threading.Thread] = []
        try:
            while True:
                try:
                    sock, _ = self._sock.accept()
                except TimeoutError:
                    return False
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                if once:
                    if self._visit(sock):
                        return True
                    continue
                threads = [thread for thread in threads if thread.is_alive()]
                threads.append(threading.Thread(target=self._visit, args=(sock,), daemon=True))
                threads[-1].start()
        finally:
            self._sock.close()
            with self._lock:
                for channel in self._open:
                    channel.shut()
            for thread in threads:
                thread.join(10.0)

    def _visit(self, sock: socket.socket) -> bool:
        if not self._turn.acquire(blocking=False):
            busy = "it is serving another benchmark: try again when that has ended"
            channels.refuse(sock, self._config, busy)
            return False
        try:
            channel = channels.admit(sock, self._config)
            if channel is None:
                return False
            self._say(f"{channel.peer} has connected")
            with (
                channels.shut_on_exit(self._open, channel, self._lock),
                contextlib.closing(Visit(channel, self._config)) as visit,
            ):
                visit.run(self._say)
            self._say(f"{channel.peer} has ended")
            return True
        finally:
            self._turn.release()
