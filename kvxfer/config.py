"""Every knob of an agent: name, unit, default and environment variable, in this one place."""

from __future__ import annotations

import dataclasses
import numbers
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar, overload

from kvxfer import ucx
from kvxfer.codecs import Codec
from kvxfer.errors import ConfigError, InvalidError, ResourceError
from kvxfer.verbs import rails

if TYPE_CHECKING:
    from kvxfer import _core

_T = TypeVar("_T")
_TRUE, _FALSE = {"1", "true", "yes", "on"}, {"0", "false", "no", "off"}


def _parse(name: str, text: str, kind: type) -> object:
    try:
        if kind is bool:
            if text.lower() in _TRUE | _FALSE:
                return text.lower() in _TRUE
            raise ValueError
        return kind(text)
    except ValueError:
        raise ConfigError(f"{name}={text!r}: expected {kind.__name__}") from None


@overload
def _knob(
    variable: str, default: Callable[[], _T], unit: str, doc: str, shown: bool = True
) -> _T: ...
@overload
def _knob(variable: str, default: _T, unit: str, doc: str, shown: bool = True) -> _T: ...
def _knob(variable: str, default: object, unit: str, doc: str, shown: bool = True) -> object:
    """Declare a field that its environment variable overrides and an argument overrides again.

    One that is not `shown` is left out of what ``repr()`` says.
    """

    def value() -> object:
        fallback = default() if callable(default) else default
        text = os.environ.get(variable)
        if text is None:
            return fallback
        return _parse(variable, text, kind)

    known = default() if callable(default) else default
    kind = str if known is None else type(known)
    metadata = {"variable": variable, "unit": unit, "doc": doc, "kind": kind}
    return dataclasses.field(default_factory=value, metadata=metadata, repr=shown)


# Smallest and largest value. A chunk is one write, of which 1 GiB is the most.
_LIMITS: dict[str, tuple[float, float]] = {
    "arena_bytes": (4096, 1 << 46),
    "chunk_bytes": (4096, 1 << 30),
    "tcp_chunk_bytes": (4096, 1 << 30),
    "window": (1, 1 << 16),  # slots in one message
    "tcp_window": (1, 1 << 16),
    "threads": (1, 1024),
    "tcp_threads": (1, 1024),
    "tcp_streams": (1, 64),
    "verbs_gid_index": (-1, 255),
    "verbs_queue_pairs": (1, 32),
    "verbs_traffic_class": (0, 255),
    "inline_bytes": (0, 1 << 30),
    "peer_bytes": (1 << 16, 1 << 40),
    "heartbeat_interval": (0.001, 1e6),
    "heartbeat_timeout": (0.002, 1e7),
    "handshake_timeout": (0.001, 1e6),
    "gpu_timeout": (0.001, 1e6),
}


def _check(name: str, value: object, kind: type) -> None:
    numbers_of = {int: numbers.Integral, float: numbers.Real}
    fits = isinstance(value, numbers_of.get(kind, kind)) and (
        kind is bool or not isinstance(value, bool)
    )
    optional = kind is str and name not in ("transport", "codec", "path", "gpudirect")
    if not fits and not (optional and value is None):
        found = type(value).__name__ if name == "secret" else repr(value)
        raise ConfigError(f"{name} is {found}: expected {kind.__name__}")
    if name in _LIMITS:
        low, high = _LIMITS[name]
        assert isinstance(value, numbers.Real)
        if not low <= float(value) <= high:
            raise ConfigError(f"{name} is {value}: it must be {low} to {high}")


def _read_secret(path: str) -> str:
    try:
        with open(path, encoding="utf-8") as file:
            secret = file.read(1 << 16).rstrip("\r\n")
    except (OSError, ValueError) as error:
        # Of what is in it nothing is said.
        why = error.strerror if isinstance(error, OSError) else "it is not text"
        raise ConfigError(f"secret_file {path!r} cannot be read: {why}") from None
    if not secret:
        raise ConfigError(f"secret_file {path!r} is empty: write the shared secret into it")
    return secret


def check_require(require: str, config: Config) -> None:
    """Raise ConfigError when what these settings allow cannot be what is required."""
    transport = config.transport
    if require == "gpudirect-rdma":
        if transport == "ucx":
            raise ConfigError(
                "require='gpudirect-rdma' contradicts transport='ucx': over UCX chunks are staged "
                "in host memory, on both sides; say auto or verbs"
            )
        if config.gpudirect == "off":
            raise ConfigError("require='gpudirect-rdma' contradicts gpudirect='off'")
        if config.path == "staged":
            raise ConfigError(
                "require='gpudirect-rdma' cannot be had: chunks are staged in host memory with "
                "path='staged', which is the default; set path='direct' on both sides"
            )
    elif require != "rdma":
        raise ConfigError(f"require={require!r} is not known; there are rdma and gpudirect-rdma")
    elif transport == "ucx":
        return
    if transport not in ("auto", "verbs"):
        can = "auto or verbs" if require == "gpudirect-rdma" else "auto, verbs or ucx"
        raise ConfigError(f"require={require!r} contradicts transport={transport!r}: say {can}")


def _default_threads() -> int:
    # All cores of a small machine: packing and unpacking take unequal time, and the side that has
    # more to do should find the other's idle core.
    return min(8, len(os.sched_getaffinity(0)))


def _tcp_threads() -> int:
    return max(1, min(4, len(os.sched_getaffinity(0)) // 4))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Settings of an `Agent`. Arguments win over environment variables, those over defaults.

    `Config.describe()` lists all of them as a table.
    """

    transport: str = _knob(
        "KVXFER_TRANSPORT",
        "auto",
        "name",
        "transport to use; auto takes shm on one host, else verbs, else tcp",
    )
    require: str | None = _knob(
        "KVXFER_REQUIRE",
        None,
        "name",
        "rdma: what goes by anything else fails; gpudirect-rdma: also by way of host memory",
    )
    secret: str | None = _knob(
        "KVXFER_SECRET",
        None,
        "text",
        "shared secret of all agents; without one anybody may connect",
        shown=False,
    )
    secret_file: str | None = _knob(
        "KVXFER_SECRET_FILE", None, "path", "file that holds the secret, where secret is not set"
    )
    tls_cert: str | None = _knob(
        "KVXFER_TLS_CERT",
        None,
        "path",
        "our certificate with its chain, in PEM: puts handshakes under TLS, of both sides",
    )
    tls_key: str | None = _knob(
        "KVXFER_TLS_KEY", None, "path", "the key to tls_cert, where that file does not hold it"
    )
    tls_ca: str | None = _knob(
        "KVXFER_TLS_CA", None, "path", "certificates of those who may sign the other agents'"
    )
    insecure: bool = _knob(
        "KVXFER_INSECURE", False, "bool", "listen beyond loopback although there is no secret"
    )
    interface: str | None = _knob(
        "KVXFER_INTERFACE", None, "name", "network interface that all sockets are bound to, as eth1"
    )
    advertise: str | None = _knob(
        "KVXFER_ADVERTISE",
        None,
        "host",
        "host that tickets name, where it is not the listen address",
    )
    codec: str = _knob(
        "KVXFER_CODEC", "raw", "text", "encoding on the wire of fetches that name none"
    )
    path: str = _knob(
        "KVXFER_PATH",
        "staged",
        "name",
        "auto: where that is faster, RDMA peers write into caches; direct: wherever it is possible",
    )
    gpudirect: str = _knob(
        "KVXFER_GPUDIRECT",
        "auto",
        "name",
        "how RDMA adapters reach GPU memory on the direct path: dmabuf, peermem, auto for the "
        "first that works; off: not at all",
    )
    arena_bytes: int = _knob(
        "KVXFER_ARENA_BYTES", 256 << 20, "bytes", "staging memory of the fetching side"
    )
    chunk_bytes: int = _knob(
        "KVXFER_CHUNK_BYTES", 4 << 20, "bytes", "most that is packed, written and verified at once"
    )
    window: int = _knob(
        "KVXFER_WINDOW", 8, "chunks", "most chunks that one fetch has under way with one peer"
    )
    threads: int = _knob(
        "KVXFER_THREADS", _default_threads, "threads", "threads that pack and unpack"
    )
    tcp_streams: int = _knob("KVXFER_TCP_STREAMS", 2, "sockets", "data connections to a peer")
    tcp_threads: int = _knob(
        "KVXFER_TCP_THREADS", _tcp_threads, "threads", "threads that receive from data connections"
    )
    tcp_chunk_bytes: int = _knob(
        "KVXFER_TCP_CHUNK_BYTES",
        512 << 10,
        "bytes",
        "as chunk_bytes, where sockets carry the chunks",
    )
    tcp_window: int = _knob(
        "KVXFER_TCP_WINDOW",
        4,
        "chunks",
        "as window, where sockets carry the chunks: more for long distances, else caches overflow",
    )
    verbs_devices: str | None = _knob(
        "KVXFER_VERBS_DEVICES",
        None,
        "names",
        "RDMA ports to use, as mlx5_0,mlx5_1:1; without it all that are active",
    )
    verbs_near: str | None = _knob(
        "KVXFER_VERBS_NEAR",
        None,
        "name",
        "of the RDMA ports use those nearest to a PCI address (0000:c1:00.0), a NUMA node (numa:1) "
        "or the GPUs that hold caches (gpu: the default without verbs_devices); any: all",
    )
    verbs_gid_index: int = _knob(
        "KVXFER_VERBS_GID_INDEX", -1, "index", "GID of every RDMA port; -1: chosen for each peer"
    )
    verbs_queue_pairs: int = _knob(
        "KVXFER_VERBS_QUEUE_PAIRS", 2, "pairs", "queue pairs for each RDMA port and peer"
    )
    verbs_traffic_class: int = _knob(
        "KVXFER_VERBS_TRAFFIC_CLASS", 0, "value", "of RoCE packets: their DSCP times 4"
    )
    inline_bytes: int = _knob(
        "KVXFER_INLINE_BYTES",
        128 << 10,
        "bytes",
        "chunks up to this are packed on the progress thread, which saves waking another",
    )
    heartbeat_interval: float = _knob(
        "KVXFER_HEARTBEAT_INTERVAL", 1.0, "seconds", "between signs of life, which renew leases"
    )
    heartbeat_timeout: float = _knob(
        "KVXFER_HEARTBEAT_TIMEOUT",
        10.0,
        "seconds",
        "of silence after which a peer is lost; well above every peer's heartbeat_interval",
    )
    handshake_timeout: float = _knob(
        "KVXFER_HANDSHAKE_TIMEOUT", 5.0, "seconds", "for connecting to a peer, all steps together"
    )
    peer_bytes: int = _knob(
        "KVXFER_PEER_BYTES",
        64 << 20,
        "bytes",
        "memory that one peer's layouts and open fetches may take; beyond it fetches end with BUSY",
    )
    digest: bool = _knob("KVXFER_DIGEST", True, "bool", "verify every chunk before it is published")
    trace_dir: str | None = _knob(
        "KVXFER_TRACE_DIR", None, "path", "folder that a trace of each failed fetch is written to"
    )
    lock_arena: bool = _knob(
        "KVXFER_LOCK_ARENA", False, "bool", "pin the arena in memory (needs ulimit -l)"
    )
    gpu_timeout: float = _knob(
        "KVXFER_GPU_TIMEOUT",
        60.0,
        "seconds",
        "that a GPU has for a chunk, and a stream to get to where an offer is ready",
    )
    gpu_ipc: bool = _knob(
        "KVXFER_GPU_IPC",
        True,
        "bool",
        "between caches on GPUs of one host, chunks go from GPU to GPU; takes arena_bytes of each",
    )

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            _check(field.name, getattr(self, field.name), field.metadata["kind"])
        if self.transport not in ("auto", "shm", "verbs", "ucx", "tcp", "loopback"):
            raise ConfigError(
                f"transport {self.transport!r} is not known; "
                "kvxfer.transports() lists what there is"
            )
        if self.path not in ("staged", "auto", "direct"):
            raise ConfigError(f"path {self.path!r} is not known; there are staged, auto and direct")
        if self.gpudirect not in ("auto", "dmabuf", "peermem", "off"):
            raise ConfigError(
                f"gpudirect {self.gpudirect!r} is not known; there are auto, dmabuf, peermem, off"
            )
        if self.require is not None:
            check_require(self.require, self)
        if self.transport in ("verbs", "ucx") or self.require is not None:
            self._check_fabric()
        if self.arena_bytes < self.chunk_bytes:
            raise ConfigError(
                f"arena_bytes is {self.arena_bytes}, less than one chunk of {self.chunk_bytes}: "
                "raise arena_bytes or lower chunk_bytes"
            )
        if self.heartbeat_timeout < 2 * self.heartbeat_interval:
            raise ConfigError(
                f"heartbeat_timeout is {self.heartbeat_timeout} s: it must be at least twice "
                f"heartbeat_interval, which is {self.heartbeat_interval} s"
            )
        if self.secret is None and self.secret_file is not None:
            object.__setattr__(self, "secret", _read_secret(self.secret_file))
        if self.secret == "":
            raise ConfigError("secret is empty: leave it out, or set one")
        if (self.tls_cert, self.tls_key, self.tls_ca) != (None, None, None):
            from kvxfer import tls  # only here: it needs this module

            tls.check(self)
        try:
            Codec.parse(self.codec)
        except InvalidError as error:
            raise ConfigError(str(error)) from None

    def _check_fabric(self) -> None:
        """Raise ConfigError where what was asked for can't be had on this host."""
        asked = f"require={self.require!r}" if self.require else f"transport {self.transport!r}"
        why_not = None
        if self.transport != "ucx":
            try:
                rails(self)
            except ResourceError as error:
                why_not = str(error)
        ucx_would_do = self.transport == "auto" and self.require != "gpudirect-rdma"
        if self.transport == "ucx" or (ucx_would_do and why_not is not None):
            problem = ucx.problem(rdma=self.require is not None)
            why_not = None if problem is None else why_not or problem
        if why_not is not None:
            raise ConfigError(f"{asked} cannot be had here: {why_not}")

    def replace(self, **changes: Any) -> Config:  # noqa: ANN401 - any of the fields
        """Return a copy with some knobs changed."""
        return dataclasses.replace(self, **changes)

    def core_options(self, name: str, incarnation: int) -> _core.AgentOptions:
        """Return these settings as the core takes them."""
        from kvxfer import _core  # only here: importing kvxfer loads no native code

        options = _core.AgentOptions()
        options.name, options.incarnation = name, incarnation
        options.arena_bytes, options.slot_bytes = self.arena_bytes, self.chunk_bytes
        options.window, options.threads = self.window, self.threads
        options.copied_chunk_bytes, options.copied_window = self.tcp_chunk_bytes, self.tcp_window
        options.bulk_threads, options.inline_bytes = self.tcp_threads, self.inline_bytes
        options.heartbeat_interval = self.heartbeat_interval
        options.heartbeat_timeout = self.heartbeat_timeout
        options.peer_bytes = self.peer_bytes
        options.digest, options.lock_arena = self.digest, self.lock_arena
        options.gpu_timeout, options.gpu_ipc = self.gpu_timeout, self.gpu_ipc
        options.path, options.gpudirect = self.path, self.gpudirect
        options.gpudirect_only = self.require == "gpudirect-rdma"
        return options

    @classmethod
    def describe(cls) -> str:
        """Return a table of all knobs: name, variable, unit, default here, meaning."""
        here = cls()
        rows = [("knob", "environment variable", "unit", "value here", "meaning")]
        for field in dataclasses.fields(cls):
            about = field.metadata
            shown = "(set)" if field.name == "secret" and here.secret else getattr(here, field.name)
            rows.append((field.name, about["variable"], about["unit"], str(shown), about["doc"]))
        widths = [max(len(row[i]) for row in rows) for i in range(4)]
        return "\n".join(
            "  ".join(
                [*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[4]]
            )
            for row in rows
        )
