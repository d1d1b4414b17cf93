"""The example proxy as a process of its own, between sockets that stand for engines."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
from rig.engines import free_port

pytestmark = pytest.mark.filterwarnings("default")

PATIENCE = 30.0  # seconds; what is waited for takes milliseconds
BODY = b'{"model": "m", "prompt": "p"}'
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: p\r\nContent-Type: application/json\r\n"


@pytest.fixture
def decoder() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(PATIENCE)
        yield server


@pytest.fixture
def proxy(decoder: socket.socket) -> Iterator[int]:
    """The port of a proxy whose prefill engine is down."""
    pytest.importorskip("aiohttp", reason="the proxy needs aiohttp, which vLLM brings along")
    port = free_port()
    command = [sys.executable, "-m", "kvxfer.integrations.vllm_connector.proxy"]
    command += ["--prefill", f"http://127.0.0.1:{free_port()}", "--port", str(port)]
    command += ["--decode", f"http://127.0.0.1:{decoder.getsockname()[1]}"]
    with subprocess.Popen(command) as process:
        yield port
        process.terminate()
        process.wait(PATIENCE)


def _connect(port: int) -> socket.socket:
    deadline = time.monotonic() + PATIENCE
    while True:
        try:
            return socket.create_connection(("127.0.0.1", port), PATIENCE)
        except ConnectionRefusedError:
            assert time.monotonic() < deadline, "the proxy doesn't listen"
            time.sleep(0.05)


def test_client_that_leaves_ends_the_decode_request(proxy: int, decoder: socket.socket) -> None:
    client = _connect(proxy)
    client.sendall(HEAD + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY)
    engine, _ = decoder.accept()
    with engine:
        engine.settimeout(PATIENCE)
        assert engine.recv(1 << 16).startswith(b"POST /v1/completions")
        client.close()
        while engine.recv(1 << 16):  # it ends when the proxy hangs up, which aborts the request
            pass


def test_what_a_client_says_of_transfers_is_not_handed_on(
    proxy: int, decoder: socket.socket
) -> None:
    body = BODY[:-1] + b', "kv_transfer_params": {"do_remote_prefill": true}}'
    with _connect(proxy) as client:
        client.sendall(HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        engine, _ = decoder.accept()
        with engine:
            engine.settimeout(PATIENCE)
            received = b""
            while not received.endswith(b"}"):
                piece = engine.recv(1 << 16)
                assert piece, "the proxy hung up"
                received += piece
    assert received.endswith(BODY)
