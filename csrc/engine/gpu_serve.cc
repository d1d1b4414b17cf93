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
#include <mutex>
#include <string>
#include <utility>

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

// Without the mutex: takes the device's time. Throws Error(kNoResources).
std::shared_ptr<GpuPeerMemory> open_arena(const GpuDevice& device, const wire::GpuArena& arena) {
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
  auto memory = std::make_shared<GpuPeerMemory>(device.runtime, own, arena.handle, arena.bytes);
  // A handle can be that of an older allocation, and one that opens need not be the right one.
  std::array<std::byte, sizeof(arena.stamp)> found{};
  device.packer->read(found.data(), memory->data() + arena.bytes - found.size(), found.size());
  if (found != arena.stamp) give_up("what was opened is not the consumer's memory");
  return memory;
}

// Runs on a thread of the device's, without the mutex.
void serve_waiting(AgentCore& core, Peer& peer, const std::shared_ptr<GpuDevice>& device,
                   const wire::GpuArena& arena) {
  Imported made{device, nullptr, {}};
  try {
    made.memory = open_arena(*device, arena);
  } catch (const std::exception& error) {
    made.problem = "'" + core.options.name + "': " + error.what();
  }
  std::map<uint64_t, std::shared_ptr<Serve>> serves;
  {
    Guard guard(core);
    peer.imported.at({arena.arena, device.get()}) = std::move(made);
    serves = peer.serves;
  }
  for (const auto& [id, serve] : serves) {
    Guard guard(core);
    if (std::exchange(serve->registering, false) && !serve->ended) find_offer(core, serve);
  }
}

// The consumer sees the link's end when nothing of its memory is open: never where that can't be
// closed.
struct LetGo {
  explicit LetGo(std::shared_ptr<Link> to) : link(std::move(to)) {}
  ~LetGo() {
    if (!kept) link->let_go_of_gpus();
  }

  const std::shared_ptr<Link> link;
  std::atomic<bool> kept = false;
};

void keep_for_good(const std::shared_ptr<void>& what) {
  static auto* mutex = new std::mutex;
  static auto* kept = new std::vector<std::shared_ptr<void>>;
  const std::lock_guard lock(*mutex);
  kept->push_back(what);
}

// What one device has open of a peer.
class Closing {
 public:
  Closing(std::shared_ptr<GpuDevice> device, std::shared_ptr<LetGo> held)
      : device_(std::move(device)), held_(std::move(held)) {}
  ~Closing() { run(); }

  void add(std::shared_ptr<GpuPeerMemory> memory) { memory_.push_back(std::move(memory)); }

  // Takes the device's time, the first time.
  void run() {
    if (!memory_.empty() && device_->given_up()) {
      for (const auto& memory : memory_) memory->leave_open();
      held_->kept = true;
      keep_for_good(held_);
    }
    memory_.clear();
    held_.reset();
  }

 private:
  const std::shared_ptr<GpuDevice> device_;
  std::shared_ptr<LetGo> held_;
  std::vector<std::shared_ptr<GpuPeerMemory>> memory_;
};

}  // namespace

Peer::~Peer() {
  if (!inbound || !link || fork_generation() != core->fork_generation) return;
  try {
    // Said also where nothing was opened: a GPU_ARENA may be on its way, unread. Not to who has no
    // such message, which is known from HELLO on.
    if (!allows_gpu_ipc(*core, *this) || (slot_bytes != 0 && !gpu_ipc)) return;
    const auto held = std::make_shared<LetGo>(std::move(link));
    std::map<GpuDevice*, std::shared_ptr<Closing>> closing;
    for (auto& [key, opened] : std::exchange(imported, {})) {
      if (!opened.memory) continue;
      auto& of_device = closing[key.second];
      if (!of_device) of_device = std::make_shared<Closing>(opened.device, held);
      of_device->add(opened.memory);
    }
    for (const auto& [device, closes] : closing) {
      // Perhaps with the mutex held, and on the progress thread.
      if (!device->pool->submit([closes = closes] { closes->run(); })) {
        core->gpus.leave_for_the_rest(closes);
      }
    }
  } catch (const std::bad_alloc&) {
    // Then the consumer waits for the end of this process.
  }
}

void keep_gpu_arena(Peer& peer, wire::GpuArena arena) {
  if (!peer.gpu_ipc || arena.arena == 0 || peer.arenas.contains(arena.arena) ||
      peer.arenas.size() >= kMostArenas) {
    throw Error(StatusCode::kProtocol,
                "GPU_ARENA was not agreed on, came twice, or is one of too many");
  }
  const uint64_t slots = peer.link->mapped_arena().size() / peer.slot_bytes;
  if (arena.bytes != gpu_arena_bytes(slots, peer.slot_bytes)) {
    throw Error(StatusCode::kProtocol, "GPU_ARENA of " + std::to_string(arena.bytes) +
                                           " bytes for " + std::to_string(slots) + " slots of " +
                                           std::to_string(peer.slot_bytes));
  }
  peer.arenas.emplace(arena.arena, std::move(arena));
}

std::optional<std::string> choose_gpu_slots(Serve& serve, const OfferState& offer) {
  const auto& device = offer.cache->gpu;
  if (!device) return "the producer's cache is in the host's memory";
  if (device->packer->given_up()) return "the producer's GPU was given up";
  const auto known = serve.peer->imported.find({serve.arena, device.get()});
  if (known == serve.peer->imported.end() || !known->second.ready()) return std::nullopt;
  if (!known->second.memory) return known->second.problem;
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
  const auto [entry, is_new] = peer->imported.try_emplace(key);
  if (!is_new) return;  // is under way
  entry->second.device = device;
  if (device->pool->submit([&core, peer, device, arena = peer->arenas.at(serve->arena)] {
        serve_waiting(core, *peer, device, arena);
      })) {
    return;
  }
  peer->imported.erase(entry);
  refuse(core, serve, {StatusCode::kClosed, "agent '" + core.options.name + "' is closing"});
}

void keep_for_good(const std::shared_ptr<Peer>& peer) {
  keep_for_good(std::shared_ptr<void>(peer));
}

}  // namespace kvxfer
