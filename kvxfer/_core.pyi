"""The compiled part of kvxfer. Use it through the package kvxfer."""

from collections.abc import Iterable, Sequence
from typing import Literal, TypedDict

# --- bindings/layout_py.cc ---

class CacheLayout:
    """Where an engine's paged KV memory lies. It does not keep that alive."""

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        num_heads: int,
        layers: list[str],
        planes: list[tuple[str, int]],
        views: list[tuple[int, int, int, int, int]],
        element: str = "bfloat16",
        first_head: int = 0,
        model: str = "",
        scales: list[float] = [],
    ) -> None: ...
    @property
    def model(self) -> str: ...
    @property
    def element(self) -> str: ...
    @property
    def num_blocks(self) -> int: ...
    @property
    def block_size(self) -> int: ...
    @property
    def num_heads(self) -> int: ...
    @property
    def first_head(self) -> int: ...
    @property
    def layers(self) -> list[str]: ...
    @property
    def planes(self) -> list[tuple[str, int]]: ...
    @property
    def views(self) -> list[tuple[int, int, int, int, int]]:
        """Address and block, kv head, token and content strides in bytes, layer by layer."""
    @property
    def scales(self) -> list[float]:
        """What stored numbers are multiplied by, of each plane, layer by layer; empty for 1."""
    def token_bytes(self) -> int: ...
    def validate(self) -> None: ...

class BlockTable:
    """Where a request's tokens lie in one side's cache."""

    def __init__(
        self, blocks: Iterable[int], first_token: int = 0, first_slot: int = 0
    ) -> None: ...
    @property
    def blocks(self) -> list[int]: ...
    @property
    def first_token(self) -> int: ...
    @property
    def first_slot(self) -> int: ...
    def validate(self, layout: CacheLayout, begin: int, end: int, unique: bool) -> None: ...

class Slice:
    """Layers x kv heads x tokens that a fetch asks for."""

    def __init__(
        self, layers: list[int], head_begin: int, head_end: int, token_begin: int, token_end: int
    ) -> None: ...
    @property
    def layers(self) -> list[int]: ...
    @property
    def head_begin(self) -> int: ...
    @property
    def head_end(self) -> int: ...
    @property
    def token_begin(self) -> int: ...
    @property
    def token_end(self) -> int: ...

class CopyPlan:
    """Maps bytes of the wire to one side's memory."""

    def __init__(
        self,
        layout: CacheLayout,
        table: BlockTable,
        slice: Slice,
        tile_ends: list[int],
        order: str,
        plane_of: list[int],
    ) -> None: ...
    def wire_bytes(self) -> int: ...
    def row_floor(self, offset: int) -> int: ...
    def layers_of(self, begin: int, end: int) -> tuple[int, int]: ...
    def runs(self, begin: int, end: int) -> list[tuple[int, int, int, int]]:
        """Address, bytes, count and stride of each run of wire bytes [begin, end)."""
    def tail_runs(self) -> list[tuple[int, int, int, int]]: ...

def element_bytes(name: str) -> int: ...
def tile_ends(
    begin: int,
    end: int,
    producer_block_size: int,
    producer_slot: int,
    consumer_block_size: int,
    consumer_slot: int,
) -> list[int]: ...
def choose_wire_order(
    producer: CacheLayout, consumer: CacheLayout, layer_first: bool = False
) -> str:
    """The order as letters: L layer, P plane, T tile, H kv head, N token in the tile."""

# --- bindings/dlpack_py.cc ---

class DlpackTensor:
    """A tensor taken over from a DLPack capsule."""

    def __init__(self, capsule: object) -> None: ...
    @property
    def address(self) -> int: ...
    @property
    def dtype(self) -> str: ...
    @property
    def itemsize(self) -> int: ...
    @property
    def read_only(self) -> bool: ...
    @property
    def device(self) -> tuple[int, int]: ...
    @property
    def shape(self) -> list[int]: ...
    @property
    def strides(self) -> list[int]:
        """In bytes."""

# --- bindings/pack_py.cc ---

# Digests are (sum, mix). `wire` and `data` are contiguous buffers.
def pack(
    plan: CopyPlan,
    begin: int,
    end: int,
    wire: object,
    seed: int = 0,
    with_digest: bool = True,
    stream: bool = False,
) -> tuple[int, int]: ...
def unpack(
    plan: CopyPlan, begin: int, end: int, wire: object, seed: int = 0, with_digest: bool = True
) -> tuple[int, int]: ...
def zero_tail(plan: CopyPlan) -> None: ...
def digest(data: object, seed: int = 0) -> tuple[int, int]: ...
def simd_variants() -> list[str]: ...
def simd_variant() -> str: ...
def set_simd_variant(name: str) -> None: ...

# --- bindings/codec_py.cc ---

# An encoding is (scheme, scale format, group); what a cache stores is (element, scale). Rows are
# `content` elements at byte offsets into `memory`. Losses are (clamped, inexact).
def panel_bytes(encoding: tuple[str, str, int], element: str, rows: int, content: int) -> int: ...
def encode_panel(
    encoding: tuple[str, str, int],
    element: str,
    memory: object,
    offsets: Sequence[int],
    content: int,
) -> tuple[bytes, list[int]]:
    """The panel's bytes, and the rows that go raw."""

def decode_panel(
    encoding: tuple[str, str, int],
    source: tuple[str, float],
    target: tuple[str, float],
    coded: object,
    memory: object,
    offsets: Sequence[int],
    content: int,
    left_out: Sequence[int] = ...,
) -> tuple[int, int]:
    """The loss as (clamped, inexact); rows that are left out are neither written nor counted."""

def can_convert(source: tuple[str, float], target: tuple[str, float]) -> bool: ...
def convert(
    source: tuple[str, float],
    target: tuple[str, float],
    elements: object,
    converted: object,
    count: int,
) -> tuple[int, int]: ...

# --- bindings/panel_py.cc ---

class PanelFormat:
    """What two sides agree on about coded chunks."""

    def __init__(
        self,
        *,
        encodings: list[tuple[str, str, int]],
        panel_tokens: int = 64,
        raw_until: int = 0,
        raw_from: int = 0xFFFFFFFF,
        producer_element: str = "bfloat16",
        producer_scales: list[float] = ...,
        codec: int = 0,
    ) -> None: ...

class PanelPlan:
    """Maps panels of the wire to one side's memory."""

    def __init__(
        self,
        layout: CacheLayout,
        table: BlockTable,
        slice: Slice,
        plane_of: list[int],
        format: PanelFormat,
    ) -> None: ...
    def num_panels(self) -> int: ...
    def panels_per_layer(self) -> int: ...
    def memory_bytes(self, begin: int, end: int) -> int: ...
    def most_bytes(self, begin: int, end: int) -> int: ...
    def zero_tail(self) -> None: ...

def pack_panels(
    plan: PanelPlan,
    begin: int,
    end: int,
    wire: object,
    seed: int = 0,
    with_digest: bool = True,
    stream: bool = False,
) -> tuple[int, int, tuple[int, int]]:
    """Bytes, rows that went raw, and the digest."""

def unpack_panels(
    plan: PanelPlan, begin: int, end: int, wire: object, seed: int = 0, with_digest: bool = True
) -> tuple[tuple[int, int], tuple[int, int], int]:
    """The digest, the loss as (clamped, inexact), and rows that went raw."""

# --- bindings/build_info.cc ---

__version__: str

class _BackEnd(TypedDict):
    state: Literal["on", "off"]
    reason: str

class _BuildInfo(TypedDict):
    version: str
    compiler: str
    build_type: str
    sanitize: str
    back_ends: dict[str, _BackEnd]

def build_info() -> _BuildInfo:
    """How this extension was built, and why each optional back end is in it or not."""

# --- bindings/agent_py.cc ---

def codec_rates() -> tuple[float, float, float, float]:
    """Bytes of a cache a second that one thread packs, unpacks, encodes and decodes.

    Measured at the first call, in some 50 to 200 milliseconds.
    """

def codec_rates_known() -> bool:
    """Whether they were measured, so that codec_rates() returns at once."""

class AgentOptions:
    """Settings of an Agent, read once when it is made. kvxfer.Config says what they mean."""

    name: str
    incarnation: int
    arena_bytes: int
    slot_bytes: int
    path: str
    gpudirect: str
    gpudirect_only: bool
    window: int
    copied_chunk_bytes: int
    copied_window: int
    threads: int
    bulk_threads: int
    inline_bytes: int
    heartbeat_interval: float
    heartbeat_timeout: float
    peer_bytes: int
    digest: bool
    lock_arena: bool
    gpu_timeout: float
    gpudirect_retry: float
    gpu_ipc: bool
    def __init__(self) -> None: ...

class LoopbackFaults:
    """What goes wrong on a loopback link: probabilities from 0 to 1 for each message or write."""

    drop_message: float
    duplicate_message: float
    drop_write: float
    duplicate_write: float
    reorder_write: float
    corrupt_write: float
    delay_us: int
    bytes_per_second: int
    seed: int
    def __init__(self) -> None: ...

class FetchReport:
    """What a fetch did, up to when the report was made. Not updated."""

    @property
    def bytes(self) -> int: ...
    @property
    def seconds(self) -> float: ...
    @property
    def chunks(self) -> int: ...
    @property
    def path(self) -> str: ...
    @property
    def path_why(self) -> str: ...
    @property
    def transport(self) -> str: ...
    @property
    def why(self) -> str: ...
    @property
    def wire_order(self) -> str: ...
    @property
    def link(self) -> str: ...
    @property
    def peers(self) -> list[str]: ...
    @property
    def codec(self) -> str: ...
    @property
    def codec_why(self) -> str: ...
    @property
    def wire_bytes(self) -> int: ...
    @property
    def exceptions(self) -> int: ...
    @property
    def clamped(self) -> int: ...
    @property
    def retry_after(self) -> float: ...

# Nanoseconds, duration, kind, request, offer, peer, chunk, bytes, status.
_TraceRecord = tuple[int, int, str, int, str, int, int, int, str]

# Bounds in seconds, counts, sum.
_Histogram = tuple[list[float], list[int], float]

class AgentMetrics:
    @property
    def counts(self) -> dict[str, int]: ...
    @property
    def fetch_ends(self) -> dict[str, int]: ...
    @property
    def offer_ends(self) -> dict[str, int]: ...
    @property
    def refusals(self) -> dict[str, int]: ...
    @property
    def fetch_seconds(self) -> _Histogram: ...
    @property
    def offer_seconds(self) -> _Histogram: ...
    @property
    def pack_seconds(self) -> _Histogram: ...
    @property
    def write_seconds(self) -> _Histogram: ...
    @property
    def verify_seconds(self) -> _Histogram: ...

class AgentStats:
    """Counts of what an agent held at one moment: all zero, or at capacity, when it is at rest."""

    @property
    def offers(self) -> int: ...
    @property
    def serving(self) -> int: ...
    @property
    def fetches(self) -> int: ...
    @property
    def peers(self) -> int: ...
    @property
    def slots(self) -> int: ...
    @property
    def free_slots(self) -> int: ...
    @property
    def quarantined_slots(self) -> int: ...
    @property
    def held_bytes(self) -> int: ...
    @property
    def bytes_sent(self) -> int: ...
    @property
    def bytes_received(self) -> int: ...
    @property
    def wire_bytes_sent(self) -> int:
        """Those of bytes_sent, as they were encoded."""
    @property
    def wire_bytes_received(self) -> int: ...
    @property
    def digest_errors(self) -> int: ...

class CodecSpec:
    """How a fetch wants elements to be encoded. What is None is the default."""

    def __init__(
        self,
        *,
        codec: str = "raw",
        panel_tokens: int | None = None,
        group: int | None = None,
        scale: str | None = None,
        raw_until: int = 0,
        raw_from: int = 0xFFFFFFFF,
    ) -> None:
        """Raises InvalidError for a codec or scale that is not known."""

class Offer:
    """The blocks of one request, pinned until released. Thread-safe; outlives its agent."""

    @property
    def id(self) -> str: ...
    @property
    def generation(self) -> bytes:
        """16 bytes."""
    @property
    def handle(self) -> int:
        """What Agent.poll() returns for it."""
    def mark_ready(self, layer: int, stream: int) -> None:
        """Say that a layer's KV is complete, or will be when the GPU's stream has got there.

        Raises InvalidError for an unknown layer. Streams are handles; 0 is the default stream, and
        the only one where the cache is not on a GPU.
        """
    def mark_all_ready(self, stream: int) -> None: ...
    def release(self) -> None:
        """End it: fetches of it fail with CANCELLED. Does not wait."""
    def released(self) -> bool:
        """Whether nobody reads the blocks any more, now or later."""
    def outcome(self) -> tuple[str, str]:
        """Status name and message; meaningful once wait() is true."""
    def wait(self, seconds: float) -> bool:
        """Wait at most that long until it is released, or will never be: a GPU hangs at close()."""
    def event_fd(self) -> int:
        """A descriptor that becomes readable when wait() is true. The offer owns it."""

class Fetch:
    """One fetch; ends by its deadline at the latest. Thread-safe; outlives its agent."""

    @property
    def handle(self) -> int:
        """What Agent.poll() returns for it."""
    def done(self) -> bool: ...
    def status(self) -> tuple[str, str]:
        """Status name and message; meaningful once done."""
    def wait(self, seconds: float) -> bool:
        """Wait at most that long; return done()."""
    def cancel(self, for_good: bool = False) -> None:
        """End it with CANCELLED unless it is done. On return nothing writes into the blocks.

        `for_good`: the producers count it as if it had been declined, unless it delivered.
        """
    def event_fd(self) -> int:
        """A descriptor that becomes readable when done. The fetch owns it."""
    def report(self) -> FetchReport: ...

class Link:
    """A connection for attach(); ends with its last reference when it is not handed over."""

    def describe(self) -> str: ...

class Agent:
    """One endpoint of transfers. Thread-safe; holds the GIL in no call that can block."""

    def __init__(self, options: AgentOptions) -> None:
        """Start its threads. Raises InvalidError or ResourceError."""
    def register_cache(self, layout: CacheLayout, on_gpu: bool = False) -> int:
        """Return the cache's id. Its memory stays valid until unregister_cache() has returned.

        Raises InvalidError or ResourceError where it should be on a GPU, and cannot be used there.
        """
    def unregister_cache(self, cache: int) -> None:
        """Forget a cache. Raises InvalidError while offers or fetches use it."""
    def gpus(self) -> list[str]:
        """PCI addresses of the GPUs that hold registered caches, in order, each once."""
    def offer(
        self,
        *,
        id: str,
        generation: bytes,
        cache: int,
        table: BlockTable,
        num_tokens: int,
        lease: float,
        consumers: int,
        ready: bool,
        stream: int = 0,
    ) -> Offer:
        """Offer the tokens from table.first_token on. `lease` is in seconds.

        On a GPU they are ready when `stream` has done what it was told until now.
        """
    def fetch(
        self,
        *,
        offer_id: str,
        generation: bytes,
        cache: int,
        table: BlockTable,
        num_tokens: int,
        timeout: float,
        parts: Sequence[tuple[int, Sequence[int], int, int, int]],
        codec: CodecSpec,
        stream: int = 0,
        gpudirect_only: bool = False,
    ) -> Fetch:
        """Fetch the tokens from table.first_token on; on a GPU nothing is written before `stream`.

        A part: peer, layers, heads begin and end, consumers that fetch from the peer.
        """
    def decline(
        self,
        *,
        offer_id: str,
        generation: bytes,
        cache: int,
        timeout: float,
        parts: Sequence[tuple[int, int]],
    ) -> Fetch:
        """Tell peers that an offer will not be fetched. A part: peer, consumers as in fetch()."""
    def reject(self, offer_id: str, generation: bytes, reason: str) -> None:
        """Refuse fetches of an offer that will not be made with WITHDRAWN; end it if it is open."""
    def renew(self, peer: int, offer_id: str, generation: bytes) -> None:
        """Extend the lease of an offer that is to be fetched later; nothing if not connected."""
    def add_peer(self, name: str) -> int:
        """Announce a connection: fetches for it wait until attach_*() or fail_peer()."""
    def attach_shm(
        self,
        *,
        peer: int,
        control_fd: int,
        arena_fd: int,
        arena_bytes: int,
        incarnation: int,
        inbound: bool,
        why: str,
    ) -> None:
        """Hand over a link over shared memory. Owns both descriptors from the call on."""
    def attach_tcp(
        self,
        *,
        peer: int,
        control_fd: int,
        data_fds: Sequence[int],
        incarnation: int,
        inbound: bool,
        why: str,
    ) -> None:
        """Hand over a link over TCP. Owns all descriptors from the call on."""
    @staticmethod
    def attach_loopback(
        *,
        consumer: Agent,
        consumer_peer: int,
        consumer_incarnation: int,
        producer: Agent,
        producer_peer: int,
        producer_incarnation: int,
        faults: LoopbackFaults,
    ) -> None:
        """Connect two agents of this process; each peer is what its agent calls the other."""
    def attach(self, *, peer: int, link: Link, incarnation: int, inbound: bool, why: str) -> None:
        """Hand over a link that an endpoint made."""
    def fail_peer(self, peer: int, status: str, message: str) -> None:
        """End a connection: what waits for it fails with that status."""
    def peer_alive(self, peer: int) -> bool:
        """Whether it is connected or being connected."""
    def retire_peer(self, peer: int) -> None:
        """End a connection as soon as nothing is fetched over it."""
    def arena_fd(self) -> int:
        """The staging arena's memfd, made at the first call. The agent owns it."""
    def arena_bytes(self) -> int:
        """0 before the arena is made."""
    def event_fd(self) -> int:
        """A descriptor that is readable when poll() has something. The agent owns it."""
    def poll(self) -> list[int]:
        """Handles of what has ended since the last call; collects from event_fd() on."""
    def stats(self) -> AgentStats: ...
    def trace(self) -> tuple[int, int, list[_TraceRecord]]: ...
    def metrics(self) -> AgentMetrics: ...
    def close(self) -> tuple[int, int]:
        """End everything with CLOSED and join the threads; idempotent.

        About a second at worst; kvxfer.Agent.close says when it takes longer. Returns how many GPUs
        were still busy, whose memory is freed when they are done, and how many were given up: what
        these were told may yet read and write the blocks of their caches.
        """

# --- bindings/verbs_py.cc; not in a build without verbs ---

class VerbsOptions:
    """Which RDMA ports are used, and how. kvxfer.Config says what it means."""

    def __init__(
        self,
        *,
        devices: Sequence[str],
        gid_index: int,
        queue_pairs: int,
        traffic_class: int,
        near_to: str,
        gpus: Sequence[str],
        sysfs: str,
    ) -> None: ...

class VerbsRail:
    """One port of one adapter."""

    @property
    def device(self) -> str: ...
    @property
    def port(self) -> int: ...
    @property
    def active(self) -> bool: ...
    @property
    def link_layer(self) -> str:
        """Ethernet or InfiniBand."""
    @property
    def gids(self) -> list[str]: ...
    @property
    def lid(self) -> int: ...
    @property
    def mtu(self) -> int:
        """Bytes."""
    @property
    def mbit_per_second(self) -> int:
        """0: unknown."""
    @property
    def pci_address(self) -> str:
        """Empty: not on PCI, or unknown."""
    @property
    def numa_node(self) -> int:
        """-1: unknown."""

def verbs_rails(options: VerbsOptions) -> list[VerbsRail]:
    """Return the ports that can be used. Raises ResourceError, or InvalidError for unknown ones."""

class Verbs:
    """The adapters as one agent uses them. Thread-safe; keeps its agent alive."""

    def __init__(self, agent: Agent, options: VerbsOptions) -> None:
        """Open the adapters. Raises ResourceError, or InvalidError for unknown ones."""
    def rails(self) -> list[VerbsRail]: ...
    def endpoint(self, with_arena: bool) -> VerbsEndpoint:
        """Make one side of a connection: the consumer's, which has the arena, or the producer's."""

class VerbsEndpoint:
    """One side of a connection that is being made. Not thread-safe."""

    @property
    def address(self) -> bytes:
        """For the peer, which must have proved itself: it opens the arena to whoever has it."""
    @property
    def lanes(self) -> list[str]:
        """Empty: that it is RDMA says enough."""
    @property
    def rdma(self) -> bool: ...
    def connect(self, *, control_fd: int, remote: bytes) -> Link:
        """Connect to the peer with that address; once. Owns the descriptor from the call on.

        Raises TransferError when the address is malformed or out of reach, or ResourceError.
        """
    def close(self) -> None:
        """Let it go, with the keys that its address names, unless it is connected."""

# --- bindings/ucx_py.cc; not in a build without ucx ---

class UcxInfo:
    """Which UCX was found, and what it could use here."""

    @property
    def path(self) -> str: ...
    @property
    def version(self) -> str: ...
    @property
    def resources(self) -> list[str]:
        """As tcp/eth0, rc_verbs/mlx5_0:1."""
    @property
    def rdma(self) -> bool:
        """Whether one of them is."""

def ucx_info(libraries: Sequence[str]) -> UcxInfo:
    """Load UCX, from one of these files if there is no other. Raises ResourceError."""

class Ucx:
    """UCX as one agent uses it. Thread-safe; keeps its agent alive."""

    def __init__(
        self, agent: Agent, libraries: Sequence[str], rdma_only: bool, timeout: float
    ) -> None:
        """Raises ResourceError. A producer waits so many seconds for its consumer."""
    def endpoint(self, with_arena: bool) -> UcxEndpoint:
        """Make one side of a connection: the consumer's, which has the arena, or the producer's."""

class UcxEndpoint:
    """One side of a connection that is being made. Not thread-safe."""

    @property
    def address(self) -> bytes:
        """For the peer, which must have proved itself; a producer's once that is connected."""
    @property
    def lanes(self) -> list[str]:
        """What the producer's UCX has chosen, once connected: its word, at the consumer."""
    @property
    def rdma(self) -> bool:
        """Whether all of these are."""
    def connect(self, *, control_fd: int, remote: bytes) -> Link:
        """Connect to the peer with that address; once, the producer first.

        Owns the descriptor from the call on. Raises TransferError when the address is malformed or
        nobody answers there, or ResourceError.
        """
    def close(self) -> None:
        """Let it go, with the keys that its address names, unless it is connected."""
