"""A client that costs little: requests over kept connections, answers counted and not parsed."""

from __future__ import annotations

import asyncio
import json
import re
import time
from dataclasses import dataclass, field
from typing import Any

_LENGTH = re.compile(rb"content-length:\s*(\d+)", re.IGNORECASE)


def request(port: int, body: dict[str, Any]) -> bytes:
    """Return a request as bytes."""
    text = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(text)}\r\n\r\n"
    return head.encode() + text


@dataclass
class Answer:
    """What came."""

    head: bytes = b""
    body: bytearray = field(default_factory=bytearray)
    events: int = 0
    seconds: float = 0.0

    def check(self) -> None:
        """Raise unless it is an answer."""
        if not self.head.startswith(b"HTTP/1.1 200"):
            raise RuntimeError(f"{self.head[:200]!r} {bytes(self.body[:300])!r}")

    def content(self) -> bytes:
        """Return the body without its framing."""
        if b"chunked" not in self.head.lower():
            return bytes(self.body)
        found, at, data = [], 0, bytes(self.body)
        while True:
            end = data.index(b"\r\n", at)
            size = int(data[at:end].split(b";")[0], 16)
            if size == 0:
                return b"".join(found)
            found.append(data[end + 2 : end + 2 + size])
            at = end + 4 + size


class Connection(asyncio.Protocol):
    """One connection with one request at a time."""

    transport: asyncio.Transport

    def __init__(self) -> None:
        self._answer = Answer()
        self._done: asyncio.Future[Answer] | None = None
        self._left: int | None = None
        self._keep = True
        self.delivered = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # type: ignore[assignment]

    def connection_lost(self, error: Exception | None) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_exception(error or ConnectionResetError("closed in the middle"))

    async def ask(self, data: bytes, keep: bool = True) -> Answer:
        """Send a request; return the answer, its body only if it is to be kept."""
        self._answer, self._left, self._keep = Answer(), None, keep
        self._done = asyncio.get_running_loop().create_future()
        began = time.perf_counter()
        self.transport.write(data)
        answer = await self._done
        answer.seconds = time.perf_counter() - began
        return answer

    def data_received(self, data: bytes) -> None:
        answer = self._answer
        if not answer.head:
            answer.body += data
            head, found, rest = bytes(answer.body).partition(b"\r\n\r\n")
            if not found:
                return
            answer.head, answer.body, data = head, bytearray(), rest
            length = _LENGTH.search(head)
            self._left = int(length[1]) if length else None
        count = data.count(b"\n\n")
        answer.events += count
        self.delivered += count
        if self._keep:
            answer.body += data
        if self._left is not None:
            self._left -= len(data)
            ended = self._left <= 0
        else:
            ended = data.endswith(b"0\r\n\r\n")
        if ended and self._done is not None and not self._done.done():
            self._done.set_result(answer)


async def connect(port: int, count: int) -> list[Connection]:
    """Return so many connections."""
    loop = asyncio.get_running_loop()
    made = [await loop.create_connection(Connection, "127.0.0.1", port) for _ in range(count)]
    return [connection for _, connection in made]


async def latencies(port: int, body: dict[str, Any], count: int) -> list[float]:
    """Return the seconds of so many requests, one after the other."""
    (connection,) = await connect(port, 1)
    data, found = request(port, body), []
    for _ in range(count):
        answer = await connection.ask(data)
        answer.check()
        found.append(answer.seconds)
    connection.transport.close()
    return found


async def throughput(port: int, body: dict[str, Any], clients: int, count: int) -> float:
    """Return the seconds of `count` requests by so many clients."""
    connections = await connect(port, clients)
    data, left = request(port, body), count

    async def client(connection: Connection) -> None:
        nonlocal left
        while left > 0:
            left -= 1
            (await connection.ask(data)).check()

    began = time.perf_counter()
    await asyncio.gather(*(client(connection) for connection in connections))
    seconds = time.perf_counter() - began
    for connection in connections:
        connection.transport.close()
    return seconds


async def streams(port: int, body: dict[str, Any], clients: int) -> tuple[int, float]:
    """Return the events of so many streams at once, and the seconds in which they came."""
    connections = await connect(port, clients)
    data = request(port, body)
    began = time.perf_counter()
    answers = await asyncio.gather(*(one.ask(data, keep=False) for one in connections))
    seconds = time.perf_counter() - began
    for answer in answers:
        answer.check()
    for connection in connections:
        connection.transport.close()
    return sum(answer.events for answer in answers), seconds
