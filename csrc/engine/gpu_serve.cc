// The producer's side of memory of GPUs that processes of one host share: chunks are packed by our
// GPU into slots in the memory of the consumer's.
//
// What orders the two: a chunk's COMMIT is sent when the host has seen the event behind its kernel
// and copies, and the consumer launches what reads the slot when it has that message. At the end of
// a kernel what it wrote is there for all devices, so events that cross processes would add
// nothing. AMD's memory of the kind that is allocated here is coherent only at the ends and
// beginnings of kernels, which these are.

#include <algorithm>
#include <array>
#include <atomic>
#include <exception>
#include <map>
#include <memory>
#include <new>
#include <string>
#include <utility>
#include <vector>

#include "engine/core.h"

namespace kvxfer {
namespace {

constexpr size_t kMostArenas = 64;  // GPUs of a consumer

std::string vendor_name(GpuVendor vendor) {
  return vendor == GpuVendor::kNvidia ? "NVIDIA" : "AMD";
}

[[noreturn]] void give_up(const std::string& why) { throw Error(StatusCode::kNoResources, why); }

// The number that the consumer's device has here.
int find_device(GpuRuntime& runtime, const wire::GpuArena& arena) {
  const GpuIdentity wanted{arena.uuid, arena.pci};
  for (int device = 0; device < runtime.device_count(); ++device) {
    if (runtime.identity(device) == wanted) return device;
  }
  give_up("the consumer's GPU (" + arena.pci +
          ") is not visible to this process: CUDA_VISIBLE_DEVICES, or HIP's, must name both");
}

// What went wrong here, for the consumer's report, wherever memory is short.
std::string said(const std::string& name, const std::exception& error) noexcept {
  try {
    return "'" + name + "': " + error.what();
  } catch (const std::exception&) {
    return "out of memory";
  }
}

// There are machines where what a GPU writes to another is lost, so that is tried, once in each of
// the ways that chunks are written in. The consumer looks.
void try_to_write(GpuPacker& packer, const wire::GpuArena& arena, std::byte* mailbox,
                  uint32_t trial) {
  // By a kernel: the stamp, as two tokens of half its bytes, each in a block of its own.
  constexpr uint32_t kHalf = kGpuStampBytes / 2, kElement = 2;
  CacheLayout layout;
  layout.element = ElementType::kBFloat16;
  layout.num_blocks = 2;
  layout.block_size = 1;
  layout.num_heads = 1;
  layout.layers = {"stamp"};
  layout.planes = {{"stamp", kHalf / kElement}};
  layout.views = {{mailbox, kHalf, kHalf, kHalf, kElement}};
  const WireOrder order{Axis::kLayer, Axis::kPlane, Axis::kTile, Axis::kHead, Axis::kToken};
  const CopyPlan plan(layout, {{1, 0}, 0, 0}, {{0}, 0, 1, 0, 2}, {1, 2}, order, {0});
  std::byte* const place = mailbox + gpu_trial_offset(trial);
  packer.pack(plan, 0, kGpuStampBytes, place, 0, /*with_digest=*/true, WireIn::kGpu);
  const auto written = gpu_trial(arena.stamp);
  packer.write(place + kGpuStampBytes, written.data() + kGpuStampBytes, kGpuStampBytes);
}

// Without the mutex: takes the device's time. Throws Error(kNoResources), perhaps with `memory`
// set: the device may still be at it then, so it is not closed here.
void open_arena(const GpuDevice& device, const wire::GpuArena& arena, uint32_t trial,
                std::shared_ptr<GpuPeerMemory>& memory) {
  GpuRuntime& runtime = *device.runtime;
  const GpuVendor vendor = arena.vendor == 0 ? GpuVendor::kNvidia : GpuVendor::kAmd;
  if (vendor != runtime.vendor()) {
    give_up("the consumer's GPU is of " + vendor_name(vendor) + ", this one of " +
            vendor_name(runtime.vendor()));
  }
  const int own = device.packer->device();
  const int other = find_device(runtime, arena);
  if (other != own && !runtime.reaches(own, other)) {
    give_up("device " + std::to_string(own) + " of " + runtime.name() +
            " has no peer access to the consumer's (" + arena.pci + ")");
  }
  memory = std::make_shared<GpuPeerMemory>(device.runtime, own, arena.handle, arena.bytes);
  // A handle can be that of an older allocation, and one that opens need not be the right one.
  std::byte* const mailbox = memory->data() + arena.mailbox;
  std::array<std::byte, kGpuStampBytes> found{};
  device.packer->read(found.data(), mailbox, found.size());
  if (found != arena.stamp) give_up("what was opened is not the consumer's memory");
  try_to_write(*device.packer, arena, mailbox, trial);
}

// Serves that have waited for an arena to be opened.
void go_on(AgentCore& core, const Peer& peer) {
  const auto serves = peer.serves;
  for (const auto& [id, serve] : serves) {
    if (std::exchange(serve->registering, false) && !serve->ended) find_offer(core, serve);
  }
}

// Runs on a thread of the device's, without the mutex.
void serve_waiting(AgentCore& core, const std::shared_ptr<Peer>& peer,
                   const std::shared_ptr<GpuDevice>& device, const wire::GpuArena& arena,
                   uint32_t trial) {
  std::shared_ptr<GpuPeerMemory> memory;
  std::string problem;
  try {
    open_arena(*device, arena, trial, memory);
  } catch (const std::exception& error) {
    problem = said(core.options.name, error);
  }
  Guard guard(core);
  run_or_drop(core, peer, [&] {
    Imported& made = peer->imported.at({arena.arena, device.get()});
    made.memory = std::move(memory);
    made.problem = std::move(problem);
    if (made.ready()) return go_on(core, *peer);
    peer->link->send(wire::GpuTrial{arena.arena, trial}.encode());
  });
}

// A link's last word: nothing of the peer's memory is open any more. Not said where something is
// left open, for then only the end of this process tells the peer.
struct LetGo {
  explicit LetGo(std::shared_ptr<Link> to) : link(std::move(to)) {}
  ~LetGo() {
    if (!left_open) link->let_go_of_gpus();
  }

  const std::shared_ptr<Link> link;
  std::atomic<bool> left_open = true;
};

// What one device has open of a peer.
class Closing {
 public:
  Closing(std::shared_ptr<GpuDevice> device, std::shared_ptr<LetGo> held)
      : device_(std::move(device)), held_(std::move(held)) {}
  ~Closing() { run(); }

  void add(std::shared_ptr<GpuPeerMemory> memory) { memory_.push_back(std::move(memory)); }

  // Takes the device's time, the first time.
  void run() noexcept {
    if (!memory_.empty() && device_->given_up()) leave_open();
    memory_.clear();
    held_.reset();
  }
  void leave_open() noexcept {
    for (const auto& memory : memory_) memory->leave_open();
    held_->left_open = true;
  }
  const GpuDevice& device() const { return *device_; }

 private:
  const std::shared_ptr<GpuDevice> device_;
  std::shared_ptr<LetGo> held_;
  std::vector<std::shared_ptr<GpuPeerMemory>> memory_;
};

// Perhaps with the mutex held, and on the progress thread.
void close_later(const std::shared_ptr<Closing>& closes) {
  try {
    // False: close() is over, and this runs here, when the last reference is dropped.
    closes->device().frees->submit([closes] { closes->run(); });
  } catch (const std::bad_alloc&) {
    closes->leave_open();
  }
}

}  // namespace

Peer::~Peer() {
  if (!inbound || !link || fork_generation() != core->fork_generation) return;
  try {
    // Said also where nothing was opened: a GPU_ARENA may be on its way, unread. Not to who has no
    // such message, which is known from HELLO on.
    if (!allows_gpu_ipc(*core, *this) || (slot_bytes != 0 && !gpu_ipc)) return;
    const auto held = std::make_shared<LetGo>(link);
    std::map<GpuDevice*, std::shared_ptr<Closing>> closing;
    for (const auto& [key, opened] : imported) {
      if (!opened.memory) continue;
      auto& of_device = closing[key.second];
      if (!of_device) of_device = std::make_shared<Closing>(opened.device, held);
      of_device->add(opened.memory);
    }
    imported.clear();
    held->left_open = false;
    for (const auto& [device, closes] : closing) close_later(closes);
  } catch (const std::bad_alloc&) {
    // Then the consumer waits for the end of this process.
    for (const auto& [key, opened] : imported) {
      if (opened.memory) opened.memory->leave_open();
    }
  }
}

bool has_gpu_caches(const AgentCore& core) {
  return std::any_of(core.caches.begin(), core.caches.end(),
                     [](const auto& entry) { return entry.second->gpu != nullptr; });
}

void tell_of_gpus(const AgentCore& core, Peer& peer) {
  if (!peer.inbound || peer.state != Peer::kReady || !peer.gpu_ipc || peer.has_gpus) return;
  if (!has_gpu_caches(core)) return;
  peer.has_gpus = true;
  peer.link->send(wire::encode_gpu_caches());
}

void handle_gpu_tried(AgentCore& core, Peer& peer, const wire::GpuTried& tried) {
  const auto found =
      std::find_if(peer.imported.begin(), peer.imported.end(), [&](const auto& entry) {
        return entry.first.first == tried.arena && entry.second.trial == tried.trial &&
               entry.second.memory && !entry.second.ready();
      });
  if (found == peer.imported.end()) {
    throw Error(StatusCode::kProtocol, "GPU_TRIED is of no trial, or came twice");
  }
  // It stays open until the peer goes: to close it would take the device's time.
  found->second.problem = tried.problem;
  found->second.tried = true;
  go_on(core, peer);
}

void keep_gpu_arena(Peer& peer, wire::GpuArena arena) {
  if (!peer.gpu_ipc || arena.arena == 0 || peer.arenas.contains(arena.arena) ||
      peer.arenas.size() >= kMostArenas) {
    throw Error(StatusCode::kProtocol,
                "GPU_ARENA was not agreed on, came twice, or is one of too many");
  }
  const uint64_t slots = peer.link->mapped_arena().size() / peer.slot_bytes;
  if (arena.mailbox < gpu_slots_bytes(slots, peer.slot_bytes) || arena.mailbox % 256 != 0 ||
      arena.mailbox > arena.bytes || arena.bytes - arena.mailbox < wire::kGpuMailboxBytes) {
    throw Error(StatusCode::kProtocol,
                "GPU_ARENA of " + std::to_string(arena.bytes) + " bytes, with a mailbox at " +
                    std::to_string(arena.mailbox) + ", for " + std::to_string(slots) +
                    " slots of " + std::to_string(peer.slot_bytes));
  }
  peer.arenas.emplace(arena.arena, std::move(arena));
}

std::optional<std::string> choose_gpu_slots(Serve& serve, const OfferState& offer) {
  const auto& device = offer.cache->gpu;
  if (!device) return "the producer's cache is in the host's memory";
  if (device->packer->given_up()) return "the producer's GPU was given up";
  const auto known = serve.peer->imported.find({serve.arena, device.get()});
  if (known == serve.peer->imported.end() || !known->second.ready()) return std::nullopt;
  if (!known->second.problem.empty()) return known->second.problem;
  serve.gpu_slots = known->second.memory->data();
  return "both caches are on GPUs of this host";
}

void import_and_serve(AgentCore& core, const std::shared_ptr<Serve>& serve,
                      const std::shared_ptr<OfferState>& offer) {
  serve->plan.reset();  // is made again then, and counted
  serve->registering = true;
  const auto& peer = serve->peer;
  const auto& device = offer->cache->gpu;
  const std::pair key(serve->arena, device.get());
  const auto trials = static_cast<uint32_t>(
      std::count_if(peer->imported.begin(), peer->imported.end(),
                    [&](const auto& entry) { return entry.first.first == serve->arena; }));
  const auto [entry, is_new] = peer->imported.try_emplace(key);
  if (!is_new) return;  // is under way
  Imported& made = entry->second;
  made.device = device;
  made.trial = trials;
  Status failure{StatusCode::kNoResources, "out of memory"};
  try {
    if (trials >= wire::kGpuTrials) {
      made.problem = "more than " + std::to_string(wire::kGpuTrials) + " GPUs write into one";
      return go_on(core, *peer);
    }
    if (device->pool->submit([&core, peer, device, arena = peer->arenas.at(serve->arena), trials] {
          serve_waiting(core, peer, device, arena, trials);
        })) {
      return;
    }
    failure = {StatusCode::kClosed, "agent '" + core.options.name + "' is closing"};
  } catch (const std::bad_alloc&) {
  }
  peer->imported.erase(entry);
  refuse(core, serve, failure);
}

}  // namespace kvxfer
