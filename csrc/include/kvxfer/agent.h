#ifndef KVXFER_AGENT_H_
#define KVXFER_AGENT_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "kvxfer/codec.h"
#include "kvxfer/copy_plan.h"
#include "kvxfer/layout.h"
#include "kvxfer/status.h"
#include "kvxfer/trace.h"
#include "kvxfer/transport.h"

namespace kvxfer {

struct AgentCore;   // internal
struct OfferState;  // internal
struct FetchState;  // internal

using Generation = std::array<std::byte, 16>;  // unguessable; names one offer once and for all
using CacheId = uint32_t;
using PeerId = uint32_t;

// How elements are encoded on the wire. The values travel on it: append, never renumber.
enum class Codec : uint8_t {
  kRaw = 0,         // as they are
  kFloat8E4M3 = 1,  // a scale for every row
  kFloat8E5M2 = 2,  // the same
  kInt8 = 3,        // plane "k" by channels, asymmetric; other planes a scale for every row
  kAuto = 255,      // the producer chooses kInt8 where that is faster than kRaw, else kRaw
};
const char* codec_name(Codec codec);  // "raw", "fp8_e4m3", "fp8_e5m2", "int8", "auto"
// Throws Error(kInvalid) that lists the known ones.
Codec codec_from_name(const std::string& name);

// What a fetch asks for.
struct CodecSpec {
  Codec codec = Codec::kRaw;
  uint32_t panel_tokens = 64;  // that are encoded together; fewer when a chunk does not hold them
  uint32_t group = 0;  // elements of a row that share a scale; 0: all, or 128 of more than 256
  ScaleFormat scale = ScaleFormat::kBFloat16;
  // Tokens of the request outside [raw_until, raw_from) travel as they are.
  uint32_t raw_until = 0, raw_from = UINT32_MAX;
};

// Where the chunks of a fetch go on links that have a direct path. Both sides have their say: what
// either wants staged is.
enum class Path : uint8_t {
  kStaged,  // into slots of the staging arena: no peer reaches a cache
  kAuto,    // straight into the blocks where that is faster
  kDirect,  // wherever it is possible
};

// How adapters reach caches in GPU memory, for the direct path.
enum class GpuDirect : uint8_t {
  kOff,         // not at all: those are staged
  kAuto,        // by dma-buf, else by peer memory
  kDmaBuf,      // of the allocation, which the GPU's runtime exports
  kPeerMemory,  // by its address: a kernel module tells adapters what is there
};

struct AgentOptions {
  std::string name;
  uint64_t incarnation = 0;  // new at each start
  uint64_t arena_bytes = 256u << 20;
  uint32_t slot_bytes = 4u << 20;  // largest chunk
  uint32_t window = 8;             // most slots that one fetch holds per peer
  // The same two where the transport copies through sockets: what is under way should stay in the
  // caches of both cores (docs/transports.md).
  uint32_t copied_chunk_bytes = 512u << 10;
  uint32_t copied_window = 4;
  uint32_t threads = 1;                // that pack and unpack
  uint32_t bulk_threads = 1;           // that serve data streams
  uint32_t inline_bytes = 128u << 10;  // chunks up to this are packed without a change of thread
  double heartbeat_interval = 1.0;     // seconds
  double heartbeat_timeout = 10.0;     // seconds of silence after which a peer is lost
  // Most that one peer can have the agent keep: its layouts and open fetches, plans included. All
  // together can have 8 times as much; a fetch beyond it is refused with kBusy.
  uint64_t peer_bytes = 64u << 20;
  bool digest = true;
  Path path = Path::kStaged;
  GpuDirect gpu_direct = GpuDirect::kAuto;
  // Seconds after which a way to reach a GPU's memory that failed on trial is tried again.
  double gpu_direct_retry = 60.0;
  // Fetches that would be staged are refused, of caches on GPUs.
  bool gpu_direct_only = false;
  bool lock_arena = false;  // mlock(); fails when RLIMIT_MEMLOCK is too small
  // Seconds that a GPU has for a chunk, and a stream to get to where an offer is ready.
  double gpu_timeout = 60.0;
  // Between caches on GPUs of one host, chunks go from GPU to GPU. The fetching side takes
  // arena_bytes of its GPU for that.
  bool gpu_ipc = true;
};

// The blocks of one request, pinned until released. Thread-safe. Outlives its agent harmlessly.
class Offer {
 public:
  explicit Offer(std::shared_ptr<OfferState> state) : state_(std::move(state)) {}

  const std::string& id() const;
  const Generation& generation() const;

  // Says that a layer's KV is complete in the blocks. Throws Error(kInvalid) for an unknown layer.
  // Of a cache on a GPU: that it will be, once `stream` (the runtime's handle; null: the default
  // stream) has done what it was told until now. Nobody waits for that in here.
  void mark_ready(uint32_t layer, void* stream = nullptr);
  void mark_all_ready(void* stream = nullptr);

  // Ends the offer: fetches of it fail with kCancelled. The blocks are free once released() is
  // true, which is at once unless a pack is just reading them.
  void release();

  // True when nobody reads the blocks any more and never will: the engine may reuse them.
  bool released() const;
  // Why it ended: kOk when all expected consumers were served. Meaningful once wait() is true.
  Status outcome() const;
  // Waits up to `seconds` until it is released, or will never be: the agent was closed, and a GPU
  // that does not come back has the blocks until the process ends. False: neither so far.
  bool wait(double seconds) const;
  // Becomes readable when wait() is true; owned by the offer.
  int event_fd();
  uint64_t handle() const;  // what Agent::poll() returns

 private:
  std::shared_ptr<OfferState> state_;
};

struct OfferSpec {
  std::string id;
  Generation generation{};
  CacheId cache = 0;
  BlockTable table;  // table.first_token is the first token on offer
  uint32_t num_tokens = 0;
  double lease = 30.0;  // seconds without a word from a consumer
  // Fetches after which the offer has done its duty. One that knows of more says so (FetchPart).
  uint32_t consumers = 1;
  bool ready = true;       // false: layers follow by mark_ready()
  void* stream = nullptr;  // with `ready`, of a cache on a GPU: as for mark_ready()
};

// Facts about a fetch, for people and metrics.
struct FetchReport {
  uint64_t bytes = 0;  // of KV delivered
  double seconds = 0;  // from fetch() to the end
  uint32_t chunks = 0;
  std::string path;        // "staged", "direct" or "gpu-ipc"
  std::string path_why;    // why that one
  std::string transport;   // of the peers, e.g. "shm"
  std::string why;         // why this path and not a better one
  std::string wire_order;  // outermost axis first, e.g. "LPTHN"
  std::string link;        // Link::describe()
  std::vector<std::string> peers;
  std::string codec;        // that was used, e.g. "int8"
  std::string codec_why;    // why that one, and what was converted
  uint64_t wire_bytes = 0;  // that crossed the link for `bytes`
  uint64_t exceptions = 0;  // rows that travelled raw although the codec was not
  uint64_t clamped = 0;     // elements beyond the largest that this side's cache can hold
  double retry_after = 0;   // seconds after which it may work, as the producer said; 0: not said
};

// One fetch: ends by itself at its deadline at the latest. Thread-safe.
class Fetch {
 public:
  explicit Fetch(std::shared_ptr<FetchState> state) : state_(std::move(state)) {}

  bool done() const;
  Status status() const;  // meaningful once done()
  // Waits up to `seconds`; returns done().
  bool wait(double seconds) const;
  // Ends the fetch with kCancelled unless it is done. On return nothing writes into the caller's
  // blocks any more; chunks that are still under way land in quarantined slots. Where they were to
  // go straight into the blocks, it waits for the producer to say that none is, and ends the
  // connection where that takes longer than heartbeat_timeout, or the producer is silent for a
  // fifth of it. `for_good`: the producers count it as if it had been fetched, as after
  // Agent::decline(); this holds for a fetch that has failed before, too, and is told in the
  // background, within another timeout of the fetch.
  void cancel(bool for_good = false);
  int event_fd();  // becomes readable when done; owned by the fetch
  FetchReport report() const;
  uint64_t handle() const;  // what Agent::poll() returns

 private:
  std::shared_ptr<FetchState> state_;
};

// What of a fetch one peer answers. Layers index the consumer's cache; heads are global.
struct FetchPart {
  PeerId peer = 0;
  std::vector<uint32_t> layers;
  uint32_t head_begin = 0, head_end = 0;
  // How many agents of the consumer's side fetch this offer from this peer: it ends after so many.
  uint32_t consumers = 1;
};

struct FetchSpec {
  std::string offer_id;
  Generation generation{};
  CacheId cache = 0;
  BlockTable table;  // table.first_token is the first token wanted
  uint32_t num_tokens = 0;
  double timeout = 30.0;  // seconds
  std::vector<FetchPart> parts;
  CodecSpec codec = {};
  // Of a cache on a GPU: nothing is written into the blocks before this stream has done what it was
  // told until now. Null: the default stream.
  void* stream = nullptr;
  // Fails where it would be staged. For caches on GPUs only.
  bool gpu_direct_only = false;
};

// What a consumer does not fetch.
struct DeclineSpec {
  std::string offer_id;
  Generation generation{};
  CacheId cache = 0;      // that it would have been fetched into
  double timeout = 30.0;  // seconds
  struct Part {
    PeerId peer = 0;
    uint32_t consumers = 1;  // as in FetchPart
  };
  std::vector<Part> parts;  // each peer once
};

// Bytes of a cache a second, by one thread.
struct CodecRates {
  double pack = 0, unpack = 0;    // as they are
  double encode = 0, decode = 0;  // with the codec that Codec::kAuto may choose
};

// Measured when first asked for, which takes some 50 to 200 milliseconds. Thread-safe. An agent
// measures by itself, on its own threads, before the first fetch with Codec::kAuto over a link that
// may be slower than memory; calling this ahead spares that fetch the wait.
const CodecRates& codec_rates();
bool codec_rates_known();  // whether that was done, so that codec_rates() returns at once

// Counts of what an agent holds: everything returns to zero, or to capacity, when it is at rest.
struct AgentStats {
  uint64_t offers = 0, serving = 0, fetches = 0, peers = 0;
  uint64_t slots = 0, free_slots = 0, quarantined_slots = 0;
  uint64_t held_bytes = 0;  // what AgentOptions::peer_bytes is about, of all peers
  uint64_t bytes_sent = 0, bytes_received = 0, digest_errors = 0;  // of KV
  uint64_t wire_bytes_sent = 0, wire_bytes_received = 0;           // that KV, as it was encoded
};

// Staging memory of an agent. It stays mapped until the agent is closed and `owner` has gone.
struct AgentMemory {
  std::shared_ptr<void> owner;
  std::span<std::byte> bytes;
};

// Of how many GPUs close() could not free the memory.
struct UnfinishedGpus {
  uint32_t busy = 0;      // it is freed when they get there
  uint32_t given_up = 0;  // they may use it, and the blocks of their caches, until the process ends
};

// One endpoint of transfers. Thread-safe; every call but close() returns without waiting for peers.
// In a forked child every call throws Error(kClosed), and destruction does nothing.
class Agent {
 public:
  explicit Agent(const AgentOptions& options);  // throws Error
  ~Agent();                                     // as close()
  Agent(const Agent&) = delete;
  Agent& operator=(const Agent&) = delete;

  // The memory of a cache must stay valid until unregister_cache() has returned. `on_gpu`: it is a
  // GPU's, whose runtime is loaded. Throws Error(kInvalid) where it is not, or on several devices,
  // Error(kNoResources) where no GPU can be used, or the build has no kernels for it.
  CacheId register_cache(const CacheLayout& layout, bool on_gpu = false);
  // Throws Error(kInvalid) while offers or fetches use it. Waits until it is pinned nowhere.
  void unregister_cache(CacheId cache);
  // PCI addresses, as sysfs has them, of the GPUs that hold registered caches: each once, in order;
  // an empty one for all of which it is not known.
  std::vector<std::string> gpus() const;

  Offer offer(const OfferSpec& spec);
  // The promised offer will not be made: fetches that wait for it, and later ones, are refused with
  // kWithdrawn. One that is open ends with that, too. Does nothing when it has ended already.
  void reject(const std::string& offer_id, const Generation& generation, const std::string& reason);
  Fetch fetch(const FetchSpec& spec);
  // Tells producers that this agent will not fetch an offer into a cache: they count it as if it
  // had, once. Ends with kOk when each has noted it, or has no such offer any more; waits for an
  // offer that is not there yet. Peers that fail leave the others alone.
  Fetch decline(const DeclineSpec& spec);

  // Extends the lease of an offer that is to be fetched later.
  void renew(PeerId peer, const std::string& offer_id, const Generation& generation);

  // A peer that is being connected: fetches for it wait until attach() or fail_peer().
  PeerId add_peer(const std::string& name);
  // Hands over an open link to that incarnation of the peer; `inbound` when the other side fetches
  // over it. `why` is for reports.
  void attach(PeerId peer, std::shared_ptr<Link> link, uint64_t incarnation, bool inbound,
              const std::string& why);
  void fail_peer(PeerId peer, const Status& status);  // not OK, or it throws Error(kInvalid)
  bool peer_alive(PeerId peer) const;
  // Another connection has taken its place: it ends as soon as nothing is fetched over it.
  void retire_peer(PeerId peer);

  IoThreads& io();
  // The arena's memfd, created at the first call; owned by the agent. Peers of one host map it.
  int arena_fd();
  uint64_t arena_bytes() const;
  // For transports that register memory: what peers write into (the arena), and what links send
  // chunks from. Made at the first call.
  AgentMemory arena();
  AgentMemory staging();

  // Becomes readable when poll() has something. From the first call on, ends are queued for poll().
  int event_fd();
  // Handles of the offers and fetches that have ended since the last call.
  std::vector<uint64_t> poll();

  AgentStats stats() const;
  // What the flight recorder holds, and what it has counted. Also after close().
  Trace trace() const;
  AgentMetrics metrics() const;

  // Fails what is open with kClosed, says goodbye to peers, joins the threads. Takes a second at
  // worst, after direct fetches three, and the time to unpin caches; where a GPU does not get done,
  // gpu_timeout and some seconds. Idempotent.
  UnfinishedGpus close();

 private:
  std::shared_ptr<AgentCore> core_;
};

}  // namespace kvxfer

#endif  // KVXFER_AGENT_H_
