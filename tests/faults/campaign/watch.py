"""What passes over a connection, message by message, as far as the campaign has to know it."""

from __future__ import annotations

import json
import struct

# In the order in which they pass.
HANDSHAKE = ("hello", "reply", "proof", "choice", "stream", "stream taken")
MESSAGES = {
    1: "HELLO",
    2: "LAYOUT",
    3: "FETCH",
    4: "ACCEPT",
    6: "REFUSED",
    7: "CREDIT",
    8: "DONE",
    9: "CANCEL",
    10: "CANCELLED",
    11: "PING",
    12: "RENEW",
    13: "BYE",
    14: "WANT",
    15: "DECLINE",
    16: "DECLINED",
}
FIRST = (*HANDSHAKE, "HELLO", "LAYOUT")  # what passes when a connection is made
KINDS = (*HANDSHAKE, *MESSAGES.values(), "WRITE")

_MOST = 1 << 20  # bytes of a frame
_FRAMES = {  # of the handshake, by whether it is a data stream and by the way
    (False, "up"): ("hello", "proof"),
    (False, "down"): ("reply", "choice"),
    (True, "up"): ("stream",),
    (True, "down"): ("stream taken",),
}


class Watch:
    """One connection, both ways. What makes no sense ends the watching, not the connection."""

    def __init__(self) -> None:
        self._data = False  # a data stream, else the control connection
        self._buffers: dict[str, bytearray] = {"up": bytearray(), "down": bytearray()}
        self._skipped = {"up": 0, "down": 0}  # bytes to come that are of no interest
        self._frames = {"up": 0, "down": 0}
        self._places = {"up": 0, "down": 0}  # of the buffers, in all that passed
        self.begun: dict[str, list[tuple[int, int]]] = {"up": [], "down": []}

    def feed(self, way: str, piece: bytes) -> list[str]:
        """Return the kinds of the messages that begin in a piece of what passes this way.

        `begun` says where in all that passed those of the core begin and end.
        """
        self.begun[way] = []
        buffer = self._buffers.get(way)
        if buffer is None:
            return []
        buffer += piece
        seen = []
        try:
            while (kind := self._next(way, buffer)) is not None:
                seen.append(kind)
        except (ValueError, KeyError, TypeError):
            del self._buffers[way]
        return seen

    def _next(self, way: str, buffer: bytearray) -> str | None:
        skipped = min(self._skipped[way], len(buffer))
        self._drop(way, skipped)
        self._skipped[way] -= skipped
        frames, number = _FRAMES[self._data, way], self._frames[way]
        if number < len(frames):
            return self._frame(way, buffer)
        if self._data:
            if way == "up" or len(buffer) < 24:
                return None
            magic, notice, size, _ = struct.unpack_from("<4sIQQ", buffer)
            if magic != b"KVXW":
                raise ValueError(magic)
            self._begin(way, 24, notice + size)
            return "WRITE"
        if len(buffer) < 9:
            return None
        (size,) = struct.unpack_from("<I", buffer)
        kind = MESSAGES[buffer[8]]
        self._begin(way, 8, size)
        return kind

    def _begin(self, way: str, header: int, size: int) -> None:
        place = self._places[way]
        self.begun[way].append((place, place + header + size))
        self._drop(way, header)
        self._skipped[way] = size

    def _drop(self, way: str, count: int) -> None:
        del self._buffers[way][:count]
        self._places[way] += count

    def _frame(self, way: str, buffer: bytearray) -> str | None:
        if len(buffer) < 4:
            return None
        (size,) = struct.unpack_from("<I", buffer)
        if size > _MOST:  # as the first bytes of TLS say
            raise ValueError(size)
        if len(buffer) < 4 + size:
            return None
        frame = json.loads(buffer[4 : 4 + size])
        self._drop(way, 4 + size)
        if way == "up" and self._frames[way] == 0:
            self._data = frame["kind"] == "data"
        self._frames[way] += 1
        return _FRAMES[self._data, way][self._frames[way] - 1]
