"""Two engines that answer at once, a prefill and a decode engine, for what stands before them.

Written on asyncio's protocols so that they take little of the core that they share with the client:
``python gateway_engine.py`` prints both ports and serves until it is ended.
"""

from __future__ import annotations

import asyncio
import json
import sys

TICK = 0.001  # seconds
TAIL = b"0\r\n\r\n"
JSON = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b"
STREAM = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\n"
    b"Transfer-Encoding: chunked\r\n\r\n"
)
PARAMS = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_block_ids": [[1, 2, 3]],
    "remote_engine_id": "e",
    "remote_host": "127.0.0.1",
    "remote_port": 1,
    "kvxfer": {"v": 1, "fields": {}, "tickets": {"kv": "t" * 200}, "digest": "d"},
}


def piece(number: int) -> bytes:
    """Return one event of a stream, as a chunk."""
    token = {"index": 0, "text": f" word{number}", "logprobs": None, "finish_reason": None}
    body = {"id": "cmpl-1", "object": "text_completion", "created": 1, "model": "m"}
    event = b"data: " + json.dumps({**body, "choices": [token]}).encode() + b"\n\n"
    return b"%x\r\n%b\r\n" % (len(event), event)


PIECES = [piece(number) for number in range(10_000)]
DONE = b"e\r\ndata: [DONE]\n\n\r\n" + TAIL


class Clock:
    """Writes the pieces of all streams that are paced, each in its turn."""

    def __init__(self) -> None:
        self._streams: list[tuple[float, float, int, int, Engine]] = []
        self._running = False

    def add(self, engine: Engine, pieces: int, pace: float) -> None:
        now = asyncio.get_running_loop().time()
        begin = now + pace * ((len(self._streams) * 0.618) % 1)
        self._streams.append((begin, pace, 0, pieces, engine))
        if not self._running:
            self._running = True
            asyncio.get_running_loop().call_later(TICK, self._tick)

    def _tick(self) -> None:
        loop = asyncio.get_running_loop()
        now, left = loop.time(), []
        for due, pace, at, pieces, engine in self._streams:
            if due > now:
                left.append((due, pace, at, pieces, engine))
            elif at < pieces and not engine.transport.is_closing():
                engine.transport.write(PIECES[at])
                left.append((due + pace, pace, at + 1, pieces, engine))
            else:
                engine.transport.write(DONE)
        self._streams = left
        self._running = bool(left)
        if left:
            loop.call_later(TICK, self._tick)


class Engine(asyncio.Protocol):
    """One connection."""

    transport: asyncio.Transport

    def __init__(self, clock: Clock) -> None:
        self._clock, self._data = clock, b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # type: ignore[assignment]

    def data_received(self, data: bytes) -> None:
        self._data += data
        while True:
            head, found, rest = self._data.partition(b"\r\n\r\n")
            if not found:
                return
            length = 0
            for line in head.split(b"\r\n")[1:]:
                name, _, value = line.partition(b":")
                if name.lower() == b"content-length":
                    length = int(value)
            if len(rest) < length:
                return
            body, self._data = rest[:length], rest[length:]
            self._answer(head.split(b" ", 2)[1], body)

    def _answer(self, path: bytes, body: bytes) -> None:
        if not path.startswith((b"/v1/completions", b"/v1/chat")):
            models = {"object": "list", "data": [{"id": "m", "object": "model"}]}
            text = json.dumps(models).encode() if path == b"/v1/models" else b"{}"
            self.transport.write(JSON % (len(text), text))
            return
        asked = json.loads(body)
        params = asked.get("kv_transfer_params") or {}
        pieces = asked.get("max_tokens") or 16
        if asked.get("stream"):
            self.transport.write(STREAM)
            pace = float(asked.get("user") or 0)
            if pace:
                self._clock.add(self, pieces, pace)
            else:
                self.transport.write(b"".join(PIECES[:pieces]) + DONE)
            return
        answer = {
            "id": "cmpl-1",
            "object": "text_completion",
            "created": 1,
            "model": "m",
            "choices": [{"index": 0, "text": "word " * pieces, "finish_reason": "length"}],
            "usage": {"prompt_tokens": 8, "completion_tokens": pieces, "total_tokens": 8 + pieces},
        }
        if params.get("do_remote_decode"):
            answer["kv_transfer_params"] = PARAMS
        text = json.dumps(answer).encode()
        self.transport.write(JSON % (len(text), text))


async def main() -> None:
    loop, clock = asyncio.get_running_loop(), Clock()
    servers = [
        await loop.create_server(lambda: Engine(clock), "127.0.0.1", 0, backlog=1024)
        for _ in range(2)
    ]
    ports = [server.sockets[0].getsockname()[1] for server in servers]
    sys.stdout.write(json.dumps(ports) + "\n")
    sys.stdout.flush()
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main())
