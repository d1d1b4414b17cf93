#ifndef KVXFER_PACK_GPU_PACKER_H_
#define KVXFER_PACK_GPU_PACKER_H_

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "base/clock.h"
#include "base/unique_here.h"
#include "device/code_objects.h"
#include "device/gpu_runtime.h"
#include "kvxfer/copy_plan.h"
#include "kvxfer/digest.h"
#include "kvxfer/panel_plan.h"
#include "pack/gpu_tables.h"

namespace kvxfer {

class GpuLane;

// Where the bytes of a chunk are: memory of the host, or of a GPU that the packer's can reach, its
// own or another process's. There they begin at a multiple of 16.
enum class WireIn : uint8_t { kHost, kGpu };

// pack() and unpack() of kvxfer/pack.h and kvxfer/panel_plan.h for caches in one GPU's memory: the
// same bytes and digests. Each call runs on a stream of its own,
// which waits for no other, and returns when its bytes are there. Thread-safe: as many calls as
// there are lanes run side by side, others wait for one of them.
//
// A device that does not finish a chunk within the limit is given up: that call and all later ones
// throw Error(kNoResources). What it does afterwards changes the cache at most.
class GpuPacker {
 public:
  // Loads the first of `code` that is for the device; throws Error(kNoResources), saying which
  // there are, when none is. The runtime must outlive it. `slot_bytes` is the most that a chunk
  // has.
  GpuPacker(GpuRuntime& runtime, int device, std::span<const CodeObject> code, size_t slot_bytes,
            size_t lanes, Duration limit);
  ~GpuPacker();
  GpuPacker(const GpuPacker&) = delete;
  GpuPacker& operator=(const GpuPacker&) = delete;

  Digest pack(const CopyPlan& plan, uint64_t begin, uint64_t end, std::byte* wire, uint64_t seed,
              bool with_digest, WireIn in = WireIn::kHost);
  Digest unpack(const CopyPlan& plan, uint64_t begin, uint64_t end, const std::byte* wire,
                uint64_t seed, bool with_digest, WireIn in = WireIn::kHost);

  // What pack() would digest, where it lies.
  Digest digest(const CopyPlan& plan, uint64_t begin, uint64_t end, uint64_t seed);

  CodedChunk pack_panels(const PanelPlan& plan, uint32_t begin, uint32_t end, std::byte* wire,
                         uint64_t seed, WireIn in = WireIn::kHost);
  // Throws Error(kProtocol) for a chunk that is not what the plan expects, and writes nothing then.
  DecodedChunk unpack_panels(const PanelPlan& plan, uint32_t begin, uint32_t end,
                             const std::byte* wire, uint64_t bytes, uint64_t seed,
                             WireIn in = WireIn::kHost);

  // Up to a chunk from memory of a GPU to the host's, and back.
  void read(std::byte* to, const std::byte* from, uint64_t bytes);
  void write(std::byte* to, const std::byte* from, uint64_t bytes);

  // Zeroes memory on the device.
  void zero(std::span<const Run> runs);

  // Packs that are under way end within about a second, even if that gives the device up.
  void hurry() { hurried_ = true; }
  // As when a chunk was not finished within the limit.
  void give_up();

  int device() const { return device_; }
  // What was told to write may do so yet, until the process ends.
  bool given_up() const;

 private:
  class Lease;

  // The first that is for the device and has all kernels: one that lacks some would fail later.
  void load(std::span<const CodeObject> code);
  enum class Way : uint8_t { kPack, kUnpack, kDigest };
  Digest move(Way way, const CopyPlan& plan, uint64_t begin, uint64_t end, std::byte* wire,
              uint64_t seed, bool with_digest, WireIn in);
  void launch_panels(const std::string& name, uint32_t groups, gpu::PanelLaunch launch,
                     GpuRuntime::Stream stream);
  void check_fits(uint64_t bytes) const;
  [[noreturn]] void refuse() const;
  // Before each thing that writes: a call that did not come back may do so when the agent has been
  // closed, and nothing is to follow it then.
  void check_going() const;

  GpuRuntime& runtime_;
  const int device_;
  const size_t slot_bytes_;
  GpuRuntime::Module module_ = nullptr;
  std::map<std::string, GpuRuntime::Function> functions_;
  std::shared_ptr<const void> code_;  // a runtime may read it when a kernel is first launched
  mutable std::mutex mutex_;
  const UniqueHere<std::condition_variable> freed_{new std::condition_variable};
  std::vector<std::unique_ptr<GpuLane>> lanes_;
  std::vector<GpuLane*> free_;
  bool given_up_ = false;
  std::atomic<bool> hurried_ = false;
  const uint64_t generation_ = fork_generation();
};

}  // namespace kvxfer

#endif  // KVXFER_PACK_GPU_PACKER_H_
