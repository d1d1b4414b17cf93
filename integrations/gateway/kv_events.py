"""What decode engines publish of their prefix caches: vLLM's KV events over ZMQ.

Needs pyzmq and msgpack, which vLLM brings along. Events name blocks by the engine's own hashes and
tell their tokens once; from those our own hashes follow, so what is known from prompts and from
events is the same index. Without events it is known from the prompts alone.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from .engines import Engine
from .pool import Pool
from .prefix_index import extend
from .prompts import TOKEN_BYTES, token_bytes

logger = logging.getLogger("kvxfer.gateway")
_MEDIA = (None, "GPU")
_STORED = ("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium")
_REMOVED = ("block_hashes", "medium")


class Blocks:
    """Keeps an engine's index as its events say."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._ours: dict[Any, list[int]] = {}
        self._next: int | None = None

    def batch(self, number: int, batch: Any) -> None:  # noqa: ANN401 - what msgpack carries
        """Take in a batch of events with its number in the stream."""
        if self._next is not None and number != self._next:
            logger.warning(
                "%s: KV events %d to %d are missing; what it has cached is learnt anew",
                self._engine.name,
                self._next,
                number - 1,
            )
            self._clear()
        self._next = number + 1
        if not isinstance(batch, Sequence) or len(batch) < 2 or not isinstance(batch[1], Sequence):
            logger.warning("%s: odd KV events: %.100r", self._engine.name, batch)
            return
        for event in batch[1]:
            try:
                self._event(event)
            except (LookupError, TypeError, ValueError) as error:
                logger.warning("%s: an odd KV event: %r", self._engine.name, error)

    def _event(self, event: Any) -> None:  # noqa: ANN401
        kind, fields = _fields(event)
        if kind == "AllBlocksCleared":
            self._clear()
        elif fields.get("medium") not in _MEDIA:
            return  # of another tier, which says nothing about this one
        elif kind == "BlockStored":
            self._stored(fields)
        elif kind == "BlockRemoved":
            for name in fields["block_hashes"]:
                self._engine.index.remove(self._ours.pop(name, ()))

    def _stored(self, fields: Mapping[str, Any]) -> None:
        size, ours = int(fields["block_size"]), self._engine.index_block
        if (
            size < ours
            or size % ours
            or fields.get("lora_id") is not None
            or fields.get("lora_name")
        ):
            return
        if any(fields.get("extra_keys") or ()):
            return  # salted, or with images: not the tokens alone decide
        parent = fields.get("parent_block_hash")
        if parent is None:
            model = self._engine.model_ids[0] if self._engine.model_ids else None
            state = hash((model, "None", "tokens"))
        elif parent in self._ours:
            state = self._ours[parent][-1]
        else:
            return  # stored before we listened
        hashes = extend(state, token_bytes(fields["token_ids"]), ours * TOKEN_BYTES)
        each = size // ours
        for at, name in enumerate(fields["block_hashes"]):
            part = hashes[at * each : (at + 1) * each]
            if len(part) < each:
                break
            self._ours[name] = part
            self._engine.index.add(part)
        if len(self._ours) > 2 * self._engine.kv_tokens // size + 1024:
            logger.warning("%s: more blocks stored than it can hold", self._engine.name)
            self._clear()

    def _clear(self) -> None:
        self._ours.clear()
        self._engine.index.clear()


class KvEvents:
    """Listens to the engines that publish events."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def start(self) -> None:
        """Listen to those that there are and to those that come."""
        for engine in self._pool:
            self._listen(engine)
        self._pool.added.append(self._listen)
        self._pool.removed.append(self._leave)

    async def stop(self) -> None:
        """Listen no more."""
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    def _listen(self, engine: Engine) -> None:
        if engine.entry.kv_events is None:
            return
        try:
            import msgpack
            import zmq.asyncio  # noqa: F401
        except ImportError as error:
            logger.warning(
                "%s: its KV events are not read: %s; pip install 'kvxfer[gateway-events]'",
                engine.name,
                error,
            )
            return
        self._tasks[engine.url] = asyncio.create_task(
            self._loop(engine, engine.entry.kv_events, msgpack.unpackb)
        )

    def _leave(self, engine: Engine) -> None:
        task = self._tasks.pop(engine.url, None)
        if task is not None:
            task.cancel()

    async def _loop(self, engine: Engine, address: str, unpack: Any) -> None:  # noqa: ANN401
        import zmq
        import zmq.asyncio

        blocks = Blocks(engine)
        context = zmq.asyncio.Context.instance()
        with context.socket(zmq.SUB) as socket:
            socket.setsockopt(zmq.LINGER, 0)
            socket.subscribe(b"")
            socket.connect(address)
            while True:
                parts = await socket.recv_multipart()
                try:
                    _, number, payload = parts
                    batch = unpack(payload, strict_map_key=False)
                except Exception as error:  # noqa: BLE001 - whatever msgpack raises
                    logger.warning("%s: unreadable KV events: %r", engine.name, error)
                    continue
                blocks.batch(int.from_bytes(number, "big"), batch)


def _fields(event: Any) -> tuple[str, Mapping[str, Any]]:  # noqa: ANN401
    """Return an event's kind and fields: a map, or in older releases a list."""
    if isinstance(event, Mapping):
        return str(event["type"]), event
    names = {"BlockStored": _STORED, "BlockRemoved": _REMOVED}.get(event[0], ())
    return str(event[0]), dict(zip(names, event[1:], strict=False))
