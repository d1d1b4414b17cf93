"""A consumer over TCP that was written from docs/wire_protocol.md and uses none of kvxfer's own.

(But for the digest, which docs/digest.md specifies and its own tests pin.) When this fails, either
the page or the code has changed without the other.
"""

from __future__ import annotations

import collections
import hashlib
import hmac
import itertools
import json
import select
import socket
import struct
import zlib

import numpy as np
import pytest

import kvxfer
from kvxfer import _core

SECRET = "swordfish"
SLOT_BYTES = 4096 * 3
LAYERS, HEADS, CONTENT, BLOCK = 3, 2, 24, 8  # of the consumer: [layer, plane, block, token, head]
BLOCKS = [5, 0, 3, 9]
BEGIN, END, SLOT = 10, 34, 2  # tokens, and the slot of the first in block 5


def send_frame(sock, frame):
    raw = json.dumps(frame).encode()
    sock.sendall(struct.pack("<I", len(raw)) + raw)


def receive(sock, size):
    raw = b""
    while len(raw) < size:
        piece = sock.recv(size - len(raw))
        assert piece, "closed"
        raw += piece
    return raw


def recv_frame(sock):
    return json.loads(receive(sock, *struct.unpack("<I", receive(sock, 4))))


def mac(key, message):
    return hmac.new(key, message, "sha256")


def text(value):
    raw = value.encode()
    return struct.pack("<I", len(raw)) + raw


def check_signature(ticket):
    body = {key: value for key, value in ticket.items() if key != "signature"}
    canonical = json.dumps(body, sort_keys=True, separators=(",", ":")).encode()
    assert ticket["signature"] == "hmac-sha256:" + mac(SECRET.encode(), canonical).hexdigest()


def dial(address):
    host, port = address.rsplit(":", 1)
    return socket.create_connection((host, int(port)), timeout=10)


def shake_hands(agent, streams):
    """Section 2 and 3; returns the control connection and the data connections."""
    control = dial(agent["address"])
    hello = {
        "kvxfer": 2, "kind": "peer", "name": "étranger", "incarnation": f"{77:016x}",
        "nonce": "00" * 16, "host": "elsewhere", "transports": ["tcp"], "streams": streams,
    }  # fmt: skip
    send_frame(control, hello)
    reply = recv_frame(control)
    assert (reply["kvxfer"], reply["name"]) == (2, agent["name"])
    assert reply["incarnation"] == agent["incarnation"]
    proof = reply.pop("proof")
    key = SECRET.encode()
    digest = hashlib.sha256(json.dumps([hello, reply], sort_keys=True).encode()).digest()
    assert proof == mac(key, b"producer" + digest).hexdigest()
    send_frame(control, {"proof": mac(key, b"consumer" + digest).hexdigest()})
    choice = recv_frame(control)
    assert choice["transport"] == "tcp"
    session_key = mac(key, b"session" + digest).digest()
    data = []
    for index in range(streams):
        stream = dial(agent["address"])
        token = mac(session_key, f"data{index}".encode()).hexdigest()
        send_frame(
            stream, {"kind": "data", "session": choice["session"], "index": index, "token": token}
        )
        assert recv_frame(stream) == {"ok": True}
        data.append(stream)
    return control, data


numbers = collections.Counter()  # of messages, by direction and connection


def next_check(direction, sock, message):
    """Section 3: the check of the next message."""
    number = numbers[direction, sock]
    numbers[direction, sock] += 1
    return zlib.crc32(message, number)


def send(sock, kind, body=b""):
    message = bytes([kind]) + body
    check = next_check("sent", sock, message)
    sock.sendall(struct.pack("<II", len(message), check) + message)


def receive_message(sock, kind):
    """The next message but PINGs; it must be of that kind."""
    while True:
        size, check = struct.unpack("<II", receive(sock, 8))
        message = receive(sock, size)
        assert check == next_check("received", sock, message)
        if message[0] != 11 or len(message) > 1:
            assert message[0] == kind, message
            return message[1:]


def layout(cache_id):
    token, head = HEADS * CONTENT * 2, CONTENT * 2
    body = struct.pack("<I", cache_id) + text("m")
    body += struct.pack("<BIIII", 1, 10, BLOCK, HEADS, 4)  # float16; heads from 4 on
    body += struct.pack("<I", LAYERS) + b"".join(text(f"l{i}") for i in range(LAYERS))
    body += struct.pack("<I", 2)
    body += text("v") + struct.pack("<I", CONTENT) + text("k") + struct.pack("<I", CONTENT)
    for index in range(LAYERS * 2):
        offset = index * 10 * BLOCK * token
        body += struct.pack("<Qqqqq", offset, BLOCK * token, head, token, 2)
    return body + struct.pack("<I", 0)  # no scales


def rows(order, producer_block, producer_slot):
    """Section 5: (layer, plane, head, token) of each row, in wire order."""
    cuts = [
        t for t in range(BEGIN + 1, END)
        if (producer_slot + t - BEGIN) % producer_block == 0 or (SLOT + t - BEGIN) % BLOCK == 0
    ]  # fmt: skip
    tiles = list(itertools.pairwise([BEGIN, *cuts, END]))
    extents = [LAYERS, 2, len(tiles), HEADS]

    def nest(axes, at):
        if not axes:
            yield at[0], at[1], at[3], at[4]
            return
        axis, *inner = axes
        steps = range(*tiles[at[2]]) if axis == 4 else range(extents[axis])
        for step in steps:
            yield from nest(inner, {**at, axis: step})

    return list(nest(order, {}))


def chunk_bounds(total, chunk_bytes, per_layer):
    row, layer = CONTENT * 2, total // LAYERS
    bounds = [0]
    while bounds[-1] < total:
        end = bounds[-1] + chunk_bytes
        if per_layer:
            end = min(end, (bounds[-1] // layer + 1) * layer)
        bounds.append(min(end, total) // row * row)
    return bounds


@pytest.mark.parametrize("ready", [True, False])
def test_a_consumer_written_from_the_page(ready):
    shape = (7, 8, 16, CONTENT)  # block, head, token, content; heads 0 to 7
    rng = np.random.default_rng(5)
    kv = rng.integers(0, 1 << 16, (4, 2, *shape), dtype=np.uint16)
    tensors = {f"l{i}": (kv[i, 0], kv[i, 1]) for i in range(4)}
    with kvxfer.Agent("prefill", listen="127.0.0.1:0", secret=SECRET, chunk_bytes=1 << 16) as agent:
        cache = agent.register(kvxfer.Cache(tensors, axes="BHNC", dtype="float16", model="m"))
        offer = agent.offer(cache, [6, 2, 4], 40, id="née", ready=ready)
        ticket = json.loads(json.dumps(offer.ticket))
        check_signature(ticket)
        control, data = shake_hands(ticket["agents"][0], 2)
        try:
            got = fetch(offer, ticket, control, data, ready)
        finally:
            for sock in [control, *data]:
                sock.close()
        assert offer.wait(10) == kvxfer.Status.OK

    positions = np.arange(BEGIN, END)
    held = kv[:LAYERS][:, :, [6, 2, 4]].transpose(0, 1, 3, 2, 4, 5)
    held = held.reshape(LAYERS, 2, 8, 48, CONTENT)[:, :, 4:6]  # layer, plane, head, token
    assert np.array_equal(got, held[:, ::-1][..., positions, :])  # our planes are v, k


def fetch(offer, ticket, control, data, ready):
    body = struct.pack("<HQ", 4, 77) + text("étranger") + struct.pack("<II", SLOT_BYTES, 1)
    send(control, 1, body)
    hello = receive_message(control, 1)
    assert hello[:2] == struct.pack("<H", 4)

    generation = bytes.fromhex(ticket["generation"])
    send(control, 2, layout(9))
    body = struct.pack("<Q", 1) + text("née") + generation
    body += struct.pack("<II3I", 9, LAYERS, *range(LAYERS))
    body += struct.pack("<5I", 4, 6, BEGIN, END, SLOT)
    body += struct.pack("<BHHBIIIIB", 0, 64, 0, 1, 0, 0xFFFFFFFF, 0, 0, 1)  # raw; with digests
    chunk_bytes = 4100  # no multiple of a row, and less than a layer
    send(control, 3, body + struct.pack("<IIII", chunk_bytes, 1, 1, 3))  # slot 3
    answer = receive_message(control, 4)
    accept = struct.unpack("<Q5BBIQII", answer[:34])
    # Raw plain memory of float16, no encodings, nothing between, no scales; and why.
    assert answer[34:54] == struct.pack("<BBHIIII", 0, 1, 0, 0, 0, 0xFFFFFFFF, 0)
    fetch_id, order, (per_layer, chunks, total, block, slot) = accept[0], accept[1:6], accept[6:]
    assert fetch_id == 1
    assert per_layer == (not ready)
    assert (block, slot) == (16, BEGIN % 16)
    assert order.index(2) < order.index(4)
    wire_rows = rows(list(order), block, slot)
    bounds = chunk_bounds(total, chunk_bytes, per_layer)
    assert (total, chunks) == (len(wire_rows) * CONTENT * 2, len(bounds) - 1)
    if not ready:
        for layer in (2, 0, 1):
            offer.mark_ready(layer)
            assert receive_message(control, 14) == struct.pack("<QI", 1, 2)

    wire = bytearray(total)
    g0, g1 = struct.unpack("<QQ", generation)
    for arrived in range(chunks):
        chunk, into, piece, found = receive_write(data)
        assert into == 3
        start = bounds[chunk]
        assert len(piece) == bounds[chunk + 1] - start
        seed = g0 ^ g1 ^ ((start + 1) * 0x9E3779B97F4A7C15 % (1 << 64))
        assert found == _core.digest(piece, seed)
        wire[start : start + len(piece)] = piece
        if arrived < chunks - 1:
            send(control, 7, struct.pack("<QII", 1, 1, 3))
    send(control, 8, struct.pack("<Q", 1))

    got = np.zeros((LAYERS, 2, HEADS, END - BEGIN, CONTENT), np.uint16)
    elements = np.frombuffer(bytes(wire), np.uint16).reshape(-1, CONTENT)
    for (layer, plane, head, token), row in zip(wire_rows, elements, strict=True):
        got[layer, plane, head, token - BEGIN] = row
    return got


def receive_write(streams):
    readable, _, _ = select.select(streams, [], [], 10)
    assert readable, "no write came"
    magic, notice_bytes, size, offset = struct.unpack("<IIQQ", receive(readable[0], 24))
    assert magic == 0x5758564B
    notice = receive(readable[0], notice_bytes)
    kind, fetch_id, chunk, slot, count, total, mix = struct.unpack("<BQIIIQQ", notice)
    assert (kind, fetch_id, count) == (5, 1, size)
    assert offset == slot * SLOT_BYTES
    return chunk, slot, receive(readable[0], size), (total, mix)
