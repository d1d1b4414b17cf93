"""A process of its own with an agent in it, driven by calls through a pipe.

`Child` is the parent's side. Its calls name methods of `Server`, which runs in the child.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import os
import resource
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import kvxfer
from kvtest import fake_gpu
from kvtest.agents import LONG, SMALL, devices, listen_address, transport_name
from kvtest.caches import Geometry, Paged
from kvtest.coded import fill_like_a_model


class ChildError(AssertionError):
    """What a call raised in the child: `kind` is the exception's class name."""

    def __init__(self, kind: str, message: str, trace: str) -> None:
        super().__init__(f"{kind}: {message}\n--- in the child:\n{trace}")
        self.kind, self.message = kind, message


class Server:
    """What a child can do. Caches, offers and fetches are kept by the names the parent gives."""

    def __init__(self, gil: int) -> None:
        self.gil = gil  # a socket on which the holding of the GIL is agreed on
        self.agent: kvxfer.Agent | None = None
        self.caches: dict[str, Paged] = {}
        self.offers: dict[str, kvxfer.Offer] = {}
        self.fetches: dict[str, kvxfer.Fetch] = {}
        self.limits: dict[str, tuple[int, int]] = {}
        self.spare: list[int] = []

    def start(
        self, name: str, transport: str = "auto", listen: str | None = None, **knobs: Any
    ) -> str | None:
        """Make the agent; return its address. `listen`: an address, or "" for the usual one."""
        if listen == "":
            listen = listen_address(transport)
        knobs = {**SMALL, **devices(transport, producing=listen is not None), **knobs}
        self.agent = kvxfer.Agent(name, listen=listen, transport=transport_name(transport), **knobs)
        return self.agent.address if listen is not None else None

    def cache(self, name: str, geometry: Geometry, seed: int | None = None) -> None:
        paged = self.caches[name] = Paged(geometry, seed)
        self.agent.register(paged.cache)

    def gpu_cache(
        self, name: str, geometry: Geometry, device: int, seed: int | None, like_a_model: bool
    ) -> None:
        """Make a cache on a fake GPU."""
        paged = fake_gpu.GpuPaged(geometry, device, seed)
        if like_a_model and seed is not None:
            fill_like_a_model(paged, seed)
            paged.store()
        self.caches[name] = paged
        self.agent.register(paged.cache)

    def gpu(self, method: str, *args: Any) -> Any:
        """Call a method of the fake GPUs."""
        return getattr(fake_gpu.gpus(), method)(*args)

    def forget(self, name: str) -> None:
        paged = self.caches.pop(name)
        self.agent.unregister(paged.cache)
        if isinstance(paged, fake_gpu.GpuPaged):
            paged.free()

    def offer(
        self, cache: str, blocks: Sequence[int], num_tokens: int | None = None, **options: Any
    ) -> kvxfer.Ticket:
        offer = self.agent.offer(self.caches[cache].cache, blocks, num_tokens, **options)
        self.offers[offer.id] = offer
        return offer.ticket

    def mark_ready(self, offer: str, layer: str) -> None:
        self.offers[offer].mark_ready(layer)

    def release_offers(self) -> None:
        while self.offers:
            self.offers.popitem()[1].release()

    def wait_offer(self, offer: str) -> str:
        return self.offers.pop(offer).wait(LONG).value

    def fetch(
        self, name: str, ticket: kvxfer.Ticket, cache: str, blocks: Sequence[int], **options: Any
    ) -> None:
        self.fetches[name] = self.agent.fetch(ticket, self.caches[cache].cache, blocks, **options)

    def wait_fetch(self, name: str) -> tuple[str, str]:
        """Return status and message."""
        fetch = self.fetches.pop(name)
        with contextlib.suppress(kvxfer.TransferError):
            fetch.wait(LONG)
        return fetch.status.value, str(fetch.error or "")

    def progress(self, name: str) -> tuple[str, int]:
        """Return the path of a fetch, and how many bytes have arrived."""
        report = self.fetches[name].report
        return report.path, report.bytes

    def same(self, cache: str, geometry: Geometry, seed: int) -> bool:
        return self.caches[cache].same_as(Paged(geometry, seed))

    def stats(self) -> dict[str, int]:
        stats = self.agent.stats
        return {name: getattr(stats, name) for name in dir(stats) if not name.startswith("_")}

    def hold_gil(self) -> None:
        """Keep every Python thread of this process from running until the parent says so."""
        # Functions called through PyDLL keep the GIL, and between them it is not given away either:
        # from the write on, which the parent waits for, no other thread runs.
        libc, byte = ctypes.PyDLL(None), ctypes.create_string_buffer(1)
        interval = sys.getswitchinterval()
        sys.setswitchinterval(1000.0)
        libc.write(self.gil, byte, 1)
        libc.read(self.gil, byte, 1)
        sys.setswitchinterval(interval)

    def limit(self, what: str, value: int) -> None:
        kind = getattr(resource, what)
        self.limits[what] = resource.getrlimit(kind)
        resource.setrlimit(kind, (value, self.limits[what][1]))

    def limit_address_space(self, beyond: int) -> None:
        """Let this process map only so many bytes more than it has now."""
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        self.limit("RLIMIT_AS", pages * os.sysconf("SC_PAGE_SIZE") + beyond)

    def limit_data(self, beyond: int) -> None:
        """Let this process allocate only so many bytes more than it has now."""
        status = Path("/proc/self/status").read_text()
        held = int(status.split("VmData:")[1].split()[0]) << 10
        self.limit("RLIMIT_DATA", held + beyond)

    def unlimit(self, what: str) -> None:
        resource.setrlimit(getattr(resource, what), self.limits.pop(what))

    def drop_privileges(self) -> None:
        # These import what may be out of reach afterwards.
        socket.getaddrinfo("127.0.0.1", 0)
        importlib.import_module("kvxfer.agent")
        os.setgid(65534)
        os.setuid(65534)

    def use_up_descriptors(self) -> None:
        """Leave this process not one more descriptor."""
        self.limit("RLIMIT_NOFILE", 1 + max(int(fd) for fd in os.listdir("/proc/self/fd")))
        with contextlib.suppress(OSError):
            while True:
                self.spare.append(os.open("/dev/null", os.O_RDONLY))

    def wait_for_dials(self) -> None:
        """Return when no connection is being made: one that fails is not to be shared any more."""
        while self.agent._peers._dialling:
            time.sleep(0.01)

    def free_descriptors(self) -> None:
        while self.spare:
            os.close(self.spare.pop())
        resource.setrlimit(resource.RLIMIT_NOFILE, self.limits["RLIMIT_NOFILE"])

    def fork_and_sleep(self) -> int:
        """Fork a process that does nothing until it is killed; return its pid."""
        pid = os.fork()
        if pid == 0:
            while True:
                signal.pause()
        return pid

    def shut_links(self) -> None:
        """Let peers on this host see the end of their links, as when a process dies."""
        for fd in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(fd))) as found:
                # Those between parent and child have no name.
                if found.family is socket.AF_UNIX and found.getsockname():
                    found.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        if self.agent is not None:
            self.agent.close()
            self.agent = None


class Child:
    """A child process. Use as a context manager; `kill`, `stop` and `resume` send it signals."""

    def __init__(self) -> None:
        ours, theirs = Pipe()
        self._pipe: Connection = ours
        self._gil, gil = socket.socketpair()
        with theirs, gil:
            tests = str(Path(__file__).parents[1])
            path = os.pathsep.join([tests, *filter(None, [os.environ.get("PYTHONPATH")])])
            self._process = subprocess.Popen(
                [sys.executable, "-m", "kvtest.child", str(theirs.fileno()), str(gil.fileno())],
                pass_fds=[theirs.fileno(), gil.fileno()],
                env={**os.environ, "PYTHONPATH": path},
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, method: str, *args: Any, **kwargs: Any) -> None:
        """Begin a call; `result` ends it."""
        self._pipe.send((method, args, kwargs))

    def result(self) -> Any:
        if not self._pipe.poll(LONG):
            raise TimeoutError(f"child {self.pid} has not answered within {LONG} s")
        ok, value = self._pipe.recv()
        if not ok:
            raise ChildError(*value)
        return value

    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        self.send(method, *args, **kwargs)
        return self.result()

    def wait_until_gil_is_held(self) -> None:
        """Behind `send("hold_gil")`: return when no Python thread of the child can run."""
        self._gil.settimeout(LONG)
        self._gil.recv(1)

    def let_gil_go(self) -> None:
        """End `hold_gil`."""
        self._gil.send(b"\0")
        self.result()

    def gil_is_held(self) -> bool:
        """Whether it still is: the call has not returned."""
        return not self._pipe.poll(0)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait(LONG)

    def stop(self) -> None:
        """Stop it, and return when it has stopped."""
        os.kill(self.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WNOWAIT)

    def resume(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        self._gil.close()
        self._pipe.close()  # a child whose pipe has ended closes its agent and exits
        with contextlib.suppress(ProcessLookupError):
            self.resume()
        try:
            self._process.wait(LONG)
        except subprocess.TimeoutExpired:
            self.kill()
            raise


def serve(pipe: Connection, gil: int) -> None:
    server = Server(gil)
    while True:
        try:
            method, args, kwargs = pipe.recv()
        except (EOFError, OSError):
            break
        try:
            answer = True, getattr(server, method)(*args, **kwargs)
        except Exception as error:  # noqa: BLE001 - the parent raises it
            answer = False, (type(error).__name__, str(error), traceback.format_exc())
        try:
            pipe.send(answer)
        except OSError:
            break
    server.close()


if __name__ == "__main__":
    with Connection(int(sys.argv[1])) as connection:
        serve(connection, int(sys.argv[2]))
