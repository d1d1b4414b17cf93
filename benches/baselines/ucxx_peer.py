"""One side of a UCXX pair, driven by JSON lines (ucxx_pair.py is the other end of them).

Runs under the interpreter of .venv-peers. One contiguous message: what UCX reaches from Python
where nothing is scattered.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

from kvbench.child import Reply, serve
from kvbench.memory import Pages

from baselines.pool_side import PoolSide


class Side(PoolSide):
    """An endpoint and a pool, which is sent as a whole."""

    def __init__(self) -> None:
        super().__init__()
        import libucx  # type: ignore[import-not-found]  # only in .venv-peers

        libucx.load_library()  # or the system's is taken, of another version
        import ucxx  # type: ignore[import-not-found]

        self._ucxx: Any = ucxx
        self._loop = asyncio.new_event_loop()
        self._listener: Any = None
        self._endpoint: Any = None
        self._met: asyncio.Future[Any] = self._loop.create_future()

    def start(self, pool_bytes: int, pages: Pages, seed: int | None) -> Reply:
        """Make the pool."""
        self.make_pool(pool_bytes, pages, seed)
        return {"version": self._ucxx.__version__}

    def listen(self) -> Reply:
        """Listen on a free port."""

        async def listen() -> int:
            async def met(endpoint: Any) -> None:
                self._met.set_result(endpoint)
                await asyncio.sleep(1e9)  # the endpoint lives as long as this

            self._listener = self._ucxx.create_listener(met, 0)
            return int(self._listener.port)

        return {"port": self._loop.run_until_complete(listen())}

    def connect(self, port: int) -> Reply:
        """Connect to the other side."""

        async def connect() -> Any:
            return await self._ucxx.create_endpoint("127.0.0.1", port)

        self._endpoint = self._loop.run_until_complete(connect())
        return {}

    def accept(self) -> Reply:
        """Wait for the other side."""
        self._endpoint = self._loop.run_until_complete(asyncio.wait_for(self._met, 30))
        return {}

    def send(self) -> Reply:
        """Send the pool."""
        self._loop.run_until_complete(self._endpoint.send(self.pool.bytes))
        return {}

    def receive(self) -> Reply:
        """Receive into the pool; seconds until it is there."""
        began = time.perf_counter()
        self._loop.run_until_complete(self._endpoint.recv(self.pool.bytes))
        return {"seconds": time.perf_counter() - began}


if __name__ == "__main__":
    side = Side()
    serve(
        {
            "start": side.start,
            "listen": side.listen,
            "connect": side.connect,
            "accept": side.accept,
            "send": side.send,
            "receive": side.receive,
            **side.handlers(),
        }
    )
