#ifndef KVXFER_ENGINE_GPU_DEVICE_H_
#define KVXFER_ENGINE_GPU_DEVICE_H_

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "base/thread_pool.h"
#include "device/gpu_event.h"
#include "device/gpu_runtime.h"
#include "engine/gpu_arena.h"
#include "engine/gpu_trials.h"
#include "kvxfer/agent.h"
#include "pack/gpu_packer.h"

namespace kvxfer {

class GpuLane;

// A GPU that holds caches of an agent, and what packs and unpacks them.
struct GpuDevice {
  GpuDevice();
  ~GpuDevice();

  std::shared_ptr<GpuRuntime> runtime;
  std::unique_ptr<GpuPacker> packer;  // null after GpuDevices::free()
  std::unique_ptr<ThreadPool> pool;   // waits for it; one that hangs holds up no other
  // Frees memory, and closes that of peers, one after the other: drivers let that wait for all that
  // runs on the device, also where it is not ours.
  std::unique_ptr<ThreadPool> frees;
  uint32_t packing = 0;  // chunks that run there or wait; needs the agent's mutex
  GpuTrials trials;
  // Memory for them, for the registrar's thread only; made at the first one. It stays, for to free
  // memory waits for all that runs on the device.
  std::unique_ptr<GpuLane> scratch;

  // For producers on this host; made at the first call. Fills in what one more of them is told.
  // Takes the device's time. Throws Error(kNoResources).
  std::shared_ptr<GpuArena> arena(const AgentOptions& options, wire::GpuArena& told);
  // Whether the packer was, also after GpuDevices::free(). Thread-safe.
  bool given_up() const;

 private:
  friend class GpuDevices;
  void free();

  mutable std::mutex packer_mutex_;  // of the pointer, against free()
  bool was_given_up_ = false;
  std::mutex making_arena_;
  std::shared_ptr<GpuArena> arena_;  // peers that were told of it hold it, too
};

// Where a cache on a GPU lies.
struct GpuPlace {
  std::shared_ptr<GpuRuntime> runtime;
  int device = 0;
  // An address in each of its allocations, and where that begins.
  std::vector<std::pair<const std::byte*, uint64_t>> allocations;
};

// Asks the runtimes. Throws Error(kInvalid) where the views are not all in the memory of one
// device, Error(kNoResources) where there is no runtime.
GpuPlace find_gpu(const CacheLayout& layout);

// Throws Error(kInvalid) when memory of the cache was freed since.
void check_allocations(const GpuPlace& place);

// The devices of an agent. Thread-safe.
class GpuDevices {
 public:
  // The device of a place, made ready at the first call, which may take seconds. Throws
  // Error(kNoResources), and Error(kClosed) after close().
  std::shared_ptr<GpuDevice> get(const GpuPlace& place, const AgentOptions& options);
  // Packs that are under way end within about a second.
  void hurry();
  // Runs what is queued to the end. A device that is not through by `deadline` is given up, and its
  // threads go on by themselves: false, and all that they use of the agent must stay.
  bool close(TimePoint deadline);
  // After close(), when the registrar's thread has ended and peers hold no memory of the devices:
  // gives that back by `deadline`, but for what somebody may yet write into. Returns of which
  // devices that did not happen. Idempotent.
  UnfinishedGpus free(TimePoint deadline);

 private:
  std::mutex making_;  // before the other, which close() must not wait for
  std::mutex mutex_;
  bool closed_ = false;
  std::map<std::pair<GpuVendor, int>, std::shared_ptr<GpuDevice>> devices_;  // none new when closed
};

// Chunks that are under way on one device at once: some are copied while others are packed.
constexpr size_t kGpuLanes = 4;

}  // namespace kvxfer

#endif  // KVXFER_ENGINE_GPU_DEVICE_H_
