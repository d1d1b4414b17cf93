"""Real vLLM engines as processes, and requests to them."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

RIG = Path(__file__).parents[1]
START_SECONDS = 1500  # imports alone take a quarter of a minute on a busy machine
ANSWER_SECONDS = 300


def prompt(length: int, seed: object = 0) -> list[int]:
    numbers = random.Random(f"{length}/{seed}")
    return [numbers.randrange(3, 512) for _ in range(length)]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def post(port: int, path: str, body: dict[str, Any]) -> dict[str, Any]:
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}{path}",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    try:
        with urllib.request.urlopen(request, timeout=ANSWER_SECONDS) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as error:
        raise RuntimeError(f"{error.code}: {error.read().decode()[:500]}") from None


def completion(port: int, prompt: list[int] | str, **more: Any) -> dict[str, Any]:
    body = {
        "prompt": prompt,
        "max_tokens": 8,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        "logprobs": 3,
        **more,
    }
    return post(port, "/v1/completions", body)


def tokens(answer: dict[str, Any]) -> list[int]:
    return answer["choices"][0]["token_ids"]


class Server:
    """A process with an HTTP port, its log in a file."""

    def __init__(self, command: list[str], port: int, log: Path, env: dict[str, str]) -> None:
        self.port, self.log = port, log
        with log.open("w") as out:
            self.process = subprocess.Popen(
                command,
                stdout=out,
                stderr=subprocess.STDOUT,
                env={**os.environ, **env},
                start_new_session=True,
            )

    def wait_ready(self, seconds: float = START_SECONDS) -> None:
        """Wait until it answers something, be it that it doesn't know the path."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                break
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=2).close()
                return
            except urllib.error.HTTPError:
                return
            except OSError:
                pass
            time.sleep(0.5)
        tail = "\n".join(self.log.read_text(errors="replace").splitlines()[-40:])
        raise RuntimeError(f"port {self.port} does not answer; the end of {self.log}:\n{tail}")

    def kill(self) -> None:
        """End the process and all that it started, without notice."""
        self.signal(signal.SIGKILL)
        self.process.wait()

    def stop(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(20)
        self.kill()

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the process and all that it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    def lines(self, text: str) -> list[str]:
        return [line for line in self.log.read_text(errors="replace").splitlines() if text in line]

    def metric(self, name: str) -> float:
        """Sum of a Prometheus metric over its labels."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics", timeout=10) as answer:
            lines = answer.read().decode().splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name))


def wait_idle(server: Server) -> None:
    """Wait until an engine holds no request and no block."""
    deadline = time.monotonic() + 60
    names = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
    while any(server.metric(name) for name in names):
        if time.monotonic() > deadline:
            raise RuntimeError(f"it still holds blocks:\n{server.log.read_text()[-3000:]}")
        time.sleep(0.3)


def start_engine(
    model: Path,
    log: Path,
    *,
    port: int | None = None,
    role: str | None = None,
    extra: dict[str, Any] | None = None,
    core: str = "nobind",
    block_size: int = 32,
    max_len: int = 4096,
    dtype: str = "float32",
    policy: str = "recompute",
    connector: str = "KvxferConnector",
    module: str | None = None,
    options: tuple[str, ...] = (),
    env: dict[str, str] | None = None,
) -> Server:
    """Start an engine without waiting for it; `role` None is one without a connector."""
    port = port or free_port()
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    command += ["--model", str(model), "--served-model-name", "tiny", "--port", str(port)]
    command += ["--enforce-eager", "--dtype", dtype]
    command += ["--block-size", str(block_size), "--max-model-len", str(max_len)]
    command += ["--max-num-seqs", "16", "--host", "127.0.0.1", *options]
    if role is not None:
        transfer = {
            "kv_connector": connector,
            "kv_role": role,
            "kv_load_failure_policy": policy,
            "kv_connector_extra_config": extra or {},
        }
        if module is not None:  # else by its name: vLLM loads our entry point
            transfer["kv_connector_module_path"] = module
        command += ["--kv-transfer-config", json.dumps(transfer)]
    settings = {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": core,
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_CI_ENV": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "INFO",
        "PYTHONPATH": os.pathsep.join([str(RIG), os.environ.get("PYTHONPATH", "")]),
        **(env or {}),
    }
    return Server(command, port, log, settings)


def start_proxy(log: Path, prefill: Server, decode: Server, flow: str) -> Server:
    port = free_port()
    command = [sys.executable, "-m", "kvxfer.integrations.vllm_connector.proxy"]
    command += ["--prefill", f"http://127.0.0.1:{prefill.port}", "--flow", flow]
    command += ["--decode", f"http://127.0.0.1:{decode.port}", "--port", str(port)]
    return Server(command, port, log, {})


def start_router(log: Path, prefill: Server, decode: Server) -> Server | None:
    """Start vllm-router as for NixlConnector; None where it is not installed."""
    program = Path(sys.executable).parent / "vllm-router"
    if not program.exists():
        return None
    port = free_port()
    command = [str(program), "--host", "127.0.0.1", "--port", str(port)]
    command += ["--vllm-pd-disaggregation", "--kv-connector", "nixl"]
    command += ["--prometheus-port", str(free_port())]
    command += ["--prefill", f"http://127.0.0.1:{prefill.port}"]
    command += ["--decode", f"http://127.0.0.1:{decode.port}"]
    return Server(command, port, log, {})


@contextlib.contextmanager
def running(*servers: Server) -> Iterator[tuple[Server, ...]]:
    try:
        for server in servers:
            server.wait_ready()
        yield servers
    finally:
        for server in servers:
            server.kill()
