#ifndef KVXFER_ENGINE_CORE_H_
#define KVXFER_ENGINE_CORE_H_

#include <atomic>
#include <condition_variable>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <tuple>
#include <unordered_map>
#include <vector>

#include "base/clock.h"
#include "base/thread_pool.h"
#include "base/unique_fd.h"
#include "device/gpu_peer_memory.h"
#include "engine/arena.h"
#include "engine/chunk_plan.h"
#include "engine/event_queue.h"
#include "engine/fair_queue.h"
#include "engine/gpu_device.h"
#include "engine/gpu_gate.h"
#include "engine/recorder.h"
#include "engine/timers.h"
#include "kvxfer/agent.h"
#include "wire/messages.h"

// State of an agent. One mutex, AgentCore::mutex, guards all of it; packing, unpacking and writes
// to transports run outside. Any thread may run the state machine: a worker that has packed a chunk
// sends its commit itself, so nothing waits for another thread to wake up.
//
// All free functions here need the mutex held, but for jobs given to run_job().

namespace kvxfer {

struct Peer;
struct Serve;
struct Part;

// Producer: who is at the other end, across connections: the agent's name, and its cache's id.
using Consumer = std::pair<std::string, uint32_t>;

// A registered cache.
struct Cache {
  CacheId id = 0;
  CacheLayout layout;
  std::unordered_map<std::string, uint32_t> layer_index;
  std::vector<std::span<std::byte>> memory;  // that it lies in
  uint32_t users = 0;                        // offers and fetches
  std::atomic<uint32_t> pinned = 0;          // registrations, also those under way either way
  std::optional<GpuPlace> place;             // on a GPU, if at all; then with its device
  std::shared_ptr<GpuDevice> gpu;
  std::string gpu_address;  // on the PCI bus; empty: not known

  GpuPacker* packer() const { return gpu ? gpu->packer.get() : nullptr; }
};

// A cache as a link has registered it, or why that is not possible; neither while it is at it.
struct Registered {
  std::shared_ptr<DirectMemory> memory;
  std::string problem;
  bool told = false;    // consumer: the peer has the keys
  std::string by = {};  // of GPU memory: in which way, as reports say it

  bool ready() const { return memory || !problem.empty(); }
};

// Consumer: a GPU's slots that a peer may write into, or why not; neither while they are prepared.
struct Exposed {
  std::shared_ptr<GpuDevice> device;
  std::shared_ptr<GpuArena> arena;
  std::string problem;
  wire::GpuArena about;  // with its number on the link
  bool told = false;     // the peer has that
  uint32_t tried = 0;    // its trials that were looked at, bit by bit

  bool ready() const { return arena || !problem.empty(); }
};

// Producer: such slots of a peer, as a device here has opened them, or why not.
struct Imported {
  std::shared_ptr<GpuDevice> device;
  std::shared_ptr<GpuPeerMemory> memory;
  std::string problem;
  uint32_t trial = 0;
  bool tried = false;  // the peer has looked at it

  bool ready() const { return tried || !problem.empty(); }
};

// Producer: how chunks go from the offer's blocks straight into the consumer's.
struct DirectServe {
  CopyPlan target;      // of the consumer's cache, whose lowest address is 0
  uint64_t pieces = 0;  // of all chunks
  std::shared_ptr<DirectMemory> from;
  std::shared_ptr<RemoteMemory> to;
};

// Producer: an offer, from offer() until its blocks are released.
struct OfferState {
  std::shared_ptr<AgentCore> core;
  uint64_t handle = 0;
  std::string id;
  Generation generation{};
  std::shared_ptr<Cache> cache;
  BlockTable table;
  uint32_t token_end = 0;
  std::vector<bool> ready;  // by layer
  uint32_t ready_left = 0;
  uint32_t consumers =
      0;  // whose end ends it: what the owner said, or a consumer that knows of more
  uint32_t ended_consumers = 0;
  uint32_t declines = 0;  // of those
  // By agent and its cache: a decline stands for one fetch, and is not counted beside it.
  std::set<Consumer> fetched_by, declined_by;
  Duration lease{};
  TimePoint began, lease_end;
  std::optional<Timers::Id> timer;
  std::set<std::shared_ptr<Serve>> serves;
  uint32_t reading = 0;  // packs and direct writes that are reading the blocks
  bool ended = false;    // nothing new is read
  bool released = false;
  bool left = false;  // when the agent was closed: a GPU that hangs may read the blocks
  Status outcome;
  std::condition_variable changed;
  UniqueFd event;
};

// Producer: the answer to one FETCH, from its arrival until DONE, CANCELLED or REFUSED. Or to a
// DECLINE, until DECLINED: then `request` has what the two have in common.
struct Serve {
  std::shared_ptr<Peer> peer;
  wire::Fetch request;
  bool declines = false, given_up = false;
  std::shared_ptr<OfferState> offer;  // null while it waits for one
  uint8_t path = 0;                   // of a FETCH_DIRECT
  std::vector<uint32_t> blocks;       // the same: the consumer's
  uint32_t arena = 0;                 // of a FETCH_GPU
  bool registering = false;           // waits for the cache, or arena, to be registered
  std::optional<ChunkPlan> plan;      // once accepted
  std::optional<DirectServe> direct;  // once accepted, unless it is staged
  std::byte* gpu_slots = nullptr;     // once accepted so: Peer::imported has them open
  std::vector<int32_t> wire_layer;    // cache layer -> wire layer, -1: not asked for
  bool per_layer = false;             // no chunk spans two layers
  std::deque<std::pair<uint32_t, uint32_t>> ready;  // chunk ranges that may be sent
  std::deque<uint32_t> credits;
  uint32_t asked = 0;      // ready chunks that slots were asked for
  uint32_t in_flight = 0;  // packs and writes
  bool queued = false;     // in AgentCore::serve_queue
  bool ended = false;
  uint64_t held = 0;                     // bytes of Peer::held
  TimePoint began;                       // once accepted
  std::optional<wire::Bytes> last_word;  // sent once in_flight is 0
};

// Consumer: what one peer answers of a fetch.
struct Part {
  std::shared_ptr<FetchState> fetch;
  std::shared_ptr<Peer> peer;
  uint64_t id = 0;  // fetch_id on the link
  FetchPart spec;
  uint64_t memory_bytes = 0;  // of what is fetched, as this side's cache holds it
  uint32_t chunk_bytes = 0;
  std::optional<ChunkPlan> plan;  // once accepted
  ElementType producer_element = ElementType::kBFloat16;
  std::vector<bool> arrived;        // by chunk
  std::vector<wire::Commit> early;  // landed before the ACCEPT
  uint32_t chunks_left = 0;         // to unpack; an estimate until accepted
  uint32_t wanted = 0;              // slots that the producer can use, as far as is known
  uint32_t granted = 0;             // slots granted so far
  std::vector<uint32_t> slots;      // granted and not yet given back, in any state
  bool hungry = false;              // in AgentCore::hungry
  bool asks_direct = false;         // asked with FETCH_DIRECT
  bool direct = false;              // accepted so: no chunk goes through its slot
  // Then: that it lands in, registered until nothing more can land.
  std::shared_ptr<DirectMemory> target;
  bool asks_gpu = false;          // asked with FETCH_GPU
  std::shared_ptr<GpuArena> gpu;  // accepted so: its slots are in there
  std::string path_why;           // of one that does not ask
  bool sent = false, accepted = false, done = false;
};

// Or a decline, which has no cache, no blocks and no slots.
struct FetchState {
  std::shared_ptr<AgentCore> core;
  uint64_t handle = 0;
  FetchSpec spec;
  bool declines = false;
  bool given_up = false;  // of a fetch: its producers are told; of a decline: that it tells them so
  bool nothing_to_code = false;  // the codec asked for leaves all tokens as they are
  std::shared_ptr<Cache> cache;
  std::vector<std::shared_ptr<Part>> parts;
  uint32_t parts_left = 0;
  uint32_t unpacking = 0;  // jobs that are using the caller's blocks
  uint32_t fenced = 0;     // slots in quarantine whose chunks may still land in the blocks
  bool settled = false;    // of one that failed: all that was written into the blocks
  bool ending = false;     // no new job is started
  // The caller's GPU may still be using the blocks: jobs that write there wait until it is not.
  bool gated = false;
  std::vector<std::function<void()>> parked;
  bool done = false;
  Status status;
  TimePoint started, ended;
  std::optional<Timers::Id> timer;
  FetchReport report;
  std::condition_variable changed;
  UniqueFd event;
};

// Who owns a slot of the arena, and what may still write into it.
struct SlotInfo {
  enum State : uint8_t { kFree, kGranted, kReceiving, kLanded, kUnpacking, kQuarantined };
  State state = kFree;
  PeerId peer = 0;
  uint64_t fetch_id = 0;
  std::shared_ptr<FetchState> fenced = nullptr;  // of a quarantined slot: counts it
};

class Guard;

// What packing costs is made up for by runs of this many bytes: docs/performance.md.
constexpr uint64_t kAutoRun = 310u << 10;

struct OrderKey {
  uint32_t remote = 0;
  CacheId local = 0;
  bool per_layer = false;
  auto operator<=>(const OrderKey&) const = default;
};

// A cache of a peer, with relative addresses, and what it takes to remember it.
struct KnownLayout {
  CacheLayout layout;
  uint64_t bytes = 0;
  uint64_t key_bytes = 0;                // of these
  std::shared_ptr<RemoteMemory> memory;  // where it may be written into
  std::string problem;                   // or why there was no room for its keys
};

// One connection, in one direction. Kept until the link's on_closed().
struct Peer : LinkSink, std::enable_shared_from_this<Peer> {
  enum State { kConnecting, kGreeting, kReady, kClosing };

  AgentCore* core = nullptr;
  PeerId id = 0;
  std::string name;
  uint64_t incarnation = 0;
  bool inbound = false;
  State state = kConnecting;
  Status failure;  // why it is kClosing
  std::string why;
  std::shared_ptr<Link> link;
  uint32_t slot_bytes = 0;  // the other side's
  uint32_t schemes = 0;     // the same
  bool direct = false;      // both sides allow the direct path
  bool gpu_ipc = false;     // the same of memory of GPUs
  bool has_gpus = false;    // whose producer has told the consumer that it has caches on GPUs
  std::atomic<TimePoint> last_heard{};
  // Producer side.
  std::map<uint32_t, KnownLayout> layouts;  // by remote cache id
  uint64_t layout_bytes = 0;                // of `held`
  std::map<OrderKey, WireOrder> orders;     // what choose_wire_order() has answered
  std::map<CacheId, Registered> sources;    // our caches
  std::map<uint32_t, wire::GpuArena> arenas;
  std::map<std::pair<uint32_t, GpuDevice*>, Imported> imported;  // of those
  uint32_t staged = 0;  // slots of AgentCore::staging that its chunks hold
  uint64_t held = 0;    // bytes that it has us keep: see budget.cc
  std::map<uint64_t, std::shared_ptr<Serve>> serves;
  // Consumer side.
  std::set<CacheId> announced;
  uint32_t granted = 0;                   // slots of the arena that it may use, or uses
  bool retired = false;                   // closed when it has nothing to do
  std::map<CacheId, Registered> targets;  // our caches that it may write into
  std::map<GpuDevice*, Exposed> exposed;  // ours
  std::map<uint64_t, std::shared_ptr<Part>> parts;
  std::vector<std::shared_ptr<Part>> pending;  // until kReady
  uint64_t next_fetch_id = 1;

  // Closes what is imported, on a thread of the device's, and then lets go of the link.
  ~Peer() override;

  void on_message(Link& link, std::span<const std::byte> message) override;
  std::byte* on_incoming(Link& link, uint64_t offset, uint64_t size,
                         std::span<const std::byte> notice) override;
  void on_landed(Link& link, std::span<const std::byte> notice, bool accepted) override;
  void on_written(Link& link, uint64_t token, bool ok) override;
  void on_lost(Link& link, const std::string& reason) override;
  void on_closed(Link& link, const std::string& reason) override;
};

// Producer: whose turn it is to have chunks sent: a peer's with what goes direct, and with the
// rest, which may have to wait for staging memory.
// Those of a GPU take turns of their own, for one that is slow holds up nobody else.
using Turn = std::tuple<Peer*, bool, GpuDevice*>;

// A chunk that a link is still reading.
struct Writing {
  std::shared_ptr<Serve> serve;
  std::optional<uint32_t> staging_slot;  // none: out of the offer's blocks
  uint32_t chunk = 0;
  uint32_t bytes = 0;
  TimePoint began;
};

struct AgentCore : std::enable_shared_from_this<AgentCore> {
  explicit AgentCore(const AgentOptions& agent_options);
  ~AgentCore();

  const AgentOptions options;
  const uint64_t fork_generation;
  std::mutex mutex;
  std::condition_variable peers_changed;
  bool closed = false;
  std::mutex closing;  // held for the whole of close(): a second caller waits for the first

  Timers timers;
  TimePoint sleeping_until = kNever;  // of the control loop
  std::optional<Timers::Id> heartbeat;
  TimePoint last_beat;
  std::deque<std::function<void()>> deferred;  // small jobs of the control loop's own thread
  bool draining = false;

  uint64_t next_handle = 1;
  std::map<CacheId, std::shared_ptr<Cache>> caches;
  std::map<PeerId, std::shared_ptr<Peer>> peers;
  PeerId next_peer = 1;
  AgentStats counters;  // only the bytes_* and *_errors fields
  Recorder recorder;    // needs no mutex
  EventQueue events;

  // Producer side.
  std::map<Generation, std::shared_ptr<OfferState>> offers;
  std::unordered_map<std::string, Generation> offer_ids;
  std::map<uint64_t, std::shared_ptr<OfferState>> unreleased;  // by handle; also ended ones
  std::map<Generation, std::set<std::shared_ptr<Serve>>>
      waiting;                           // fetches whose offer is not there yet
  std::map<Generation, Status> history;  // how offers ended, the newest ones
  std::deque<Generation> history_order;
  FairQueue<Turn, std::shared_ptr<Serve>> serve_queue;  // have a chunk and a credit
  uint32_t packing = 0;
  std::shared_ptr<Arena>
      staging;          // where chunks wait for transports that don't map the peer's arena
  uint32_t staged = 0;  // slots of it that are taken or promised to packs
  std::map<uint64_t, Writing> writing;
  uint64_t next_token = 1;
  uint64_t held = 0;         // of all peers
  double serve_seconds = 0;  // that fetches took here lately

  // Consumer side.
  std::shared_ptr<Arena> arena;
  std::vector<SlotInfo> slots;
  std::map<uint64_t, std::shared_ptr<FetchState>> fetches;
  FairQueue<Peer*, std::shared_ptr<Part>> hungry;  // want a slot

  const std::unique_ptr<ThreadPool> pool;
  GpuDevices gpus;                        // needs no mutex
  GpuGate gpu_gate;                       // needs no mutex
  std::shared_ptr<ThreadPool> registrar;  // pins and unpins caches; made with the first cache
  const std::unique_ptr<IoThreads> io;    // its control loop is the progress thread

  void check_open() const;  // throws Error(kClosed) after close(); needs the mutex
  void check_fork() const;  // throws Error(kClosed) in a forked child
};

// Holds the agent's mutex. On the control loop's thread it runs the deferred jobs when it lets go.
class Guard {
 public:
  explicit Guard(AgentCore& core) : core_(core), lock_(core.mutex) {}
  ~Guard();
  Guard(const Guard&) = delete;
  Guard& operator=(const Guard&) = delete;
  std::unique_lock<std::mutex>& lock() { return lock_; }

 private:
  AgentCore& core_;
  std::unique_lock<std::mutex> lock_;
};

// core.cc
Duration to_duration(double seconds);  // clamped to what a clock can hold
void set_timer(AgentCore& core, std::optional<Timers::Id>& timer, TimePoint when,
               std::function<void()> action);
void clear_timer(AgentCore& core, std::optional<Timers::Id>& timer);
// Runs a job that handles `bytes`: small ones on the control loop's thread when that is the caller,
// else on a pool: of its own where the cache is on a GPU, which jobs wait for.
void run_job(AgentCore& core, const Cache& cache, uint64_t bytes, std::function<void()> job);

// gpu_device.cc
// What a stream still has to do before the memory of a cache may be read or written: null where
// that is nothing. Throws Error(kInvalid) for a stream where the cache is in the host's memory. Not
// with the mutex held.
std::shared_ptr<GpuEvent> stream_event(const Cache& cache, void* stream);
// The same for an offer or a fetch that begins, or null while it is not `ready`. Throws
// Error(kInvalid) where memory of the cache was freed, too.
std::shared_ptr<GpuEvent> first_event(AgentCore& core, CacheId cache, void* stream, bool ready);

// offers.cc
void end_offer(AgentCore& core, const std::shared_ptr<OfferState>& offer, Status outcome);
// A consumer is through: it has fetched.
void count_fetch(AgentCore& core, const std::shared_ptr<OfferState>& offer, const Serve& serve);
// Or will not.
void count_decline(AgentCore& core, const std::shared_ptr<OfferState>& offer, const Serve& serve);
void release_if_unread(AgentCore& core, OfferState& offer);
// At the end of close(), of one that a GPU has not come back with: ends it, but does not release
// it.
void leave_offer(OfferState& offer, const std::string& why);
void renew_lease(OfferState& offer);

// serve_plan.cc
// Compares the two caches and the slice, decides how it is sent, and returns the ACCEPT, or
// ACCEPT_DIRECT or ACCEPT_GPU, that says so. Throws Error for what is refused. Nothing: the offer's
// cache is to be registered with the peer's link first, or the peer's arena to be opened.
std::optional<wire::Bytes> accept_fetch(AgentCore& core, Serve& serve, const OfferState& offer,
                                        const CacheLayout& theirs);

// budget.cc
// Throws Error(kBusy), or Error(kNoResources) for what would not fit alone.
void hold(AgentCore& core, Serve& serve, uint64_t bytes);
void let_go(AgentCore& core, Serve& serve);  // it has ended
uint64_t bytes_of(const Serve& serve);       // as it was asked for
uint64_t bytes_of_plans(const Serve& serve);
// These throw where that is too much, or makes no sense. The keys go with the layout.
void keep_layout(AgentCore& core, Peer& peer, uint32_t cache_id, CacheLayout layout);
void keep_keys(AgentCore& core, Peer& peer, const wire::Memory& memory);
void forget_layout(AgentCore& core, Peer& peer, uint32_t cache_id);
double retry_seconds(const AgentCore& core);  // after which there may be room

// producer.cc. `arena`: of a FETCH_GPU.
void handle_fetch(AgentCore& core, const std::shared_ptr<Peer>& peer, wire::FetchDirect asked,
                  uint32_t arena = 0);
// Begins to serve, waits for the offer, or refuses.
void find_offer(AgentCore& core, const std::shared_ptr<Serve>& serve);
void handle_decline(AgentCore& core, const std::shared_ptr<Peer>& peer,
                    const wire::Decline& decline);
void handle_credit(AgentCore& core, Peer& peer, const wire::Credit& credit);
void handle_done(AgentCore& core, Peer& peer, uint64_t fetch_id);
void handle_cancel(AgentCore& core, Peer& peer, uint64_t fetch_id);
// Its offer has ended, or will never be there.
void answer_ended(AgentCore& core, const std::shared_ptr<Serve>& serve, const Status& outcome);
void begin_serving(AgentCore& core, const std::shared_ptr<Serve>& serve,
                   const std::shared_ptr<OfferState>& offer);
void layer_ready(AgentCore& core, OfferState& offer, uint32_t layer);
void end_serve(AgentCore& core, const std::shared_ptr<Serve>& serve,
               std::optional<wire::Bytes> last_word);
// Ends a serve, where it has not ended yet, with REFUSED as its last word.
void refuse(AgentCore& core, const std::shared_ptr<Serve>& serve, const Status& why);
// Queues a serve that has something to send and a slot for it.
void queue_serve(AgentCore& core, const std::shared_ptr<Serve>& serve);
// A pack or write of the serve has ended.
void land_flight(AgentCore& core, const std::shared_ptr<Serve>& serve);

// direct_serve.cc
// Says why chunks of serve.plan, which are plain memory, go straight into the consumer's blocks,
// and then has set serve.direct, or why not. None: the offer's cache is to be registered first.
std::optional<std::string> choose_path(AgentCore& core, Serve& serve, const OfferState& offer,
                                       CopyPlan target);
// Has the offer's cache registered with the peer's link, and goes on with the serve then.
void register_and_serve(AgentCore& core, const std::shared_ptr<Serve>& serve,
                        const std::shared_ptr<OfferState>& offer);
// Writes a chunk of serve.direct, from a thread that may take its time; without the mutex.
void write_blocks(AgentCore& core, const std::shared_ptr<Serve>& serve, uint32_t chunk,
                  uint32_t slot);

// gpu_serve.cc
bool has_gpu_caches(const AgentCore& core);
void tell_of_gpus(const AgentCore& core, Peer& peer);  // a consumer, once, if that matters
// These throw Error(kProtocol) for what makes no sense.
void keep_gpu_arena(Peer& peer, wire::GpuArena arena);
void handle_gpu_tried(AgentCore& core, Peer& peer, const wire::GpuTried& tried);
// As choose_path(), for chunks that go into the arena of a FETCH_GPU: then sets serve.gpu_slots.
// None: it is to be opened first.
std::optional<std::string> choose_gpu_slots(Serve& serve, const OfferState& offer);
// Has the arena opened for the offer's device, and goes on with the serve then.
void import_and_serve(AgentCore& core, const std::shared_ptr<Serve>& serve,
                      const std::shared_ptr<OfferState>& offer);

// packing.cc
void start_packs(AgentCore& core);
// Chunks that are packed by the threads that do so for this serve, or wait for them.
uint32_t& packing(AgentCore& core, const Serve& serve);

// part_plan.cc
void announce(Peer& peer, const Cache& cache);  // LAYOUT, once
void send_fetch(AgentCore& core, Part& part, const std::vector<uint32_t>& slots);
uint64_t blocks_used(const Part& part);
// This side's plan of what an ACCEPT says. Throws Error(kProtocol) where it is not what was asked
// for, Error(kMismatch) where the two sides disagree or their elements do not go together.
ChunkPlan plan_part(const Part& part, const wire::Accept& accept);

// direct_fetch.cc
// Whether a part can ask for the direct path; if not, says why in it.
bool may_go_direct(const AgentCore& core, Part& part);
// Whether a part that might go direct is staged, for it is not known yet whether adapters reach the
// cache, and a trial takes seconds. Then that is being found out, and the part says so.
bool stages_meanwhile(AgentCore& core, Part& part);
// Has the cache registered for the part's peer, and starts the part then.
void register_and_start(AgentCore& core, const std::shared_ptr<Part>& part);
// Ends the connections that a fetch that has ended waits for, if they don't let go of its blocks.
void watch_fence(AgentCore& core, const std::shared_ptr<FetchState>& fetch);

// gpu_fetch.cc
// Whether this agent allows memory of GPUs to be shared over a link that can.
bool allows_gpu_ipc(const AgentCore& core, const Peer& peer);
// Whether a part can ask for chunks in a GPU's slots; if not, says why in it where it might have.
bool may_use_gpu_slots(const AgentCore& core, Part& part);
// Has the slots prepared for the part's peer, and starts the part then.
void expose_and_start(AgentCore& core, const std::shared_ptr<Part>& part);
void handle_gpu_trial(AgentCore& core, const std::shared_ptr<Peer>& peer, wire::GpuTrial trial);
// Agent::close() is over: who has not closed our memory by now may write there until it ends.
void abandon_exposed(Peer& peer);

// pinning.cc
// Registers a cache with the peer's link on the registrar, and calls `then` there, without the
// mutex. unregister_cache() waits for it. False: the agent is closing.
bool pin_cache(AgentCore& core, const std::shared_ptr<Cache>& cache,
               const std::shared_ptr<Peer>& peer, Link::DirectUse use,
               std::function<void(Registered)> then);
// What the peer's link has registered, of one cache or all. Dropped anywhere, also with the mutex
// held, it is unpinned on the registrar, or in place once that has stopped.
std::vector<Registered> take_registered(Peer& peer, std::optional<CacheId> cache);

// gpu_pinning.cc
// Registers the memory of a cache on a GPU, in the ways that the options allow, where a transfer to
// and from scratch memory of that GPU shows that the way works. Without the mutex; takes seconds at
// worst. Throws Error(kNoResources) with what is wrong with each way.
Registered register_gpu(const AgentCore& core, Cache& cache, Link& link, Link::DirectUse use);
// What adapters have written into a chunk's blocks is there for kernels that are launched from now
// on. Without the mutex. Throws Error(kNoResources).
void settle_writes(const AgentCore& core, const Part& part);
// The same of a fetch that has failed, for writes that no COMMIT has told of: does what it can, so
// that none of them is seen after something else that is written into the blocks later.
void settle_failed(const FetchState& fetch);

// fetches.cc
// run_job() for a job that writes into the blocks, once the caller's GPU has let go of them.
// Counted in `unpacking` already; by the time that it runs the fetch may be ending.
void run_unpack(AgentCore& core, const std::shared_ptr<FetchState>& fetch, uint64_t bytes,
                std::function<void()> job);
// Nothing waits for the caller's GPU any more.
void open_gate(AgentCore& core, FetchState& fetch);
// Hands the parts of a fetch that is in AgentCore::fetches to their peers, and sets its deadline.
void launch(AgentCore& core, const std::shared_ptr<FetchState>& fetch);

// slots.cc
void ensure_arena(AgentCore& core);
void ensure_staging(AgentCore& core);
uint32_t window_of(const AgentCore& core, const Part& part);  // most slots that a part holds
void free_slot(AgentCore& core, uint32_t slot);
uint32_t grant_slot(AgentCore& core, Part& part);  // one must be free
// Lets a part ask for slots until it holds `enough`.
void feed(AgentCore& core, const std::shared_ptr<Part>& part, uint32_t enough);
void return_slot(AgentCore& core, const std::shared_ptr<Part>& part, uint32_t slot);
// Takes back the slots that nothing was committed into. `exposed`: the peer may still write there.
void reclaim_granted(AgentCore& core, Part& part, bool exposed);
void grant_slots(AgentCore& core);
void free_quarantined(AgentCore& core, Peer& peer, uint64_t fetch_id);
void free_slots_of(AgentCore& core, PeerId peer);  // its link is closed: nothing can write any more

// consumer.cc
void start_part(AgentCore& core, const std::shared_ptr<Part>& part);
// All chunks of a part are verified.
void complete_part(AgentCore& core, const std::shared_ptr<Part>& part);
void complete(AgentCore& core, const std::shared_ptr<FetchState>& fetch);
// At the end of close(), of one that a GPU has not come back with: ends it, with CLOSED.
void leave_fetch(AgentCore& core, const std::shared_ptr<FetchState>& fetch, const std::string& why);
void fail_fetch(AgentCore& core, const std::shared_ptr<FetchState>& fetch, Status status);
// One peer of a fetch fails: with it the fetch. Other parts of a decline go on.
void fail_part(AgentCore& core, const std::shared_ptr<Part>& part, Status status);
// `answer`: what only ACCEPT_DIRECT says, or null; `gpu`: the same of ACCEPT_GPU.
void handle_accept(AgentCore& core, Peer& peer, const wire::Accept& accept,
                   const wire::AcceptDirect* answer, const wire::AcceptGpu* gpu = nullptr);
void handle_want(AgentCore& core, Peer& peer, const wire::Want& want);
void handle_refused(AgentCore& core, Peer& peer, const wire::Refused& refused);

// landing.cc
// A chunk is in its slot, of a part that is accepted: has it unpacked. Throws Error(kProtocol) for
// one that is not expected.
void take_chunk(AgentCore& core, const std::shared_ptr<Part>& part, const wire::Commit& commit);
void handle_commit(AgentCore& core, Peer& peer, const wire::Commit& commit);

// declines.cc
void send_decline(Part& part);
// Tells the producers of a fetch that has failed that they need not wait for another.
void give_up(AgentCore& core, FetchState& fetch);
void handle_declined(AgentCore& core, Peer& peer, uint64_t fetch_id);
// A part of a decline has its answer, or gets none.
void end_declined_part(AgentCore& core, const std::shared_ptr<Part>& part, Status status);

// peers.cc
// Ends a connection: all that waits on it fails now, its slots are freed at on_closed().
void drop_peer(AgentCore& core, const std::shared_ptr<Peer>& peer, Status why);
void run_or_drop(AgentCore& core, const std::shared_ptr<Peer>&, const std::function<void()>& work);
// Keeps up the lease of an offer that a part will ask for later.
void send_renew(const Part& part);
void beat(AgentCore& core);

}  // namespace kvxfer

#endif  // KVXFER_ENGINE_CORE_H_
