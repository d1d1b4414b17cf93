#ifndef KVXFER_ENGINE_GPU_ARENA_H_
#define KVXFER_ENGINE_GPU_ARENA_H_

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>

#include "base/unique_fd.h"
#include "device/gpu_runtime.h"
#include "wire/messages.h"

namespace kvxfer {

class GpuPacker;

// Kernels access 16 bytes at a time, and caches of GPUs have lines of up to 256.
constexpr uint64_t gpu_slot_stride(uint64_t slot_bytes) { return (slot_bytes + 255) / 256 * 256; }
constexpr uint64_t gpu_slots_bytes(uint64_t slots, uint64_t slot_bytes) {
  return slots * gpu_slot_stride(slot_bytes);
}

// Where in a mailbox a trial is.
constexpr uint64_t gpu_trial_offset(uint64_t trial) { return (1 + trial) * wire::kGpuTrialBytes; }
// What is written there: first the halves of the stamp, the second before the first, by a kernel,
// then its bits inverted, by a copy. Chunks are written in both ways.
constexpr size_t kGpuStampBytes = sizeof(wire::GpuArena::stamp);
std::array<std::byte, wire::kGpuTrialBytes> gpu_trial(
    const std::array<std::byte, kGpuStampBytes>& stamp);

// Memory of a GPU that producers on this host write into: a slot for each of the staging arena's,
// and mailboxes. Which slot is whose, and when, is settled there. An allocation of its own, for
// pools and memory mapped piece by piece have no handles. Made and freed where the device's time
// may be taken.
class GpuArena {
 public:
  // Throws Error(kNoResources).
  GpuArena(std::shared_ptr<GpuRuntime> runtime, int device, uint32_t slots, uint32_t slot_bytes);
  ~GpuArena();
  GpuArena(const GpuArena&) = delete;
  GpuArena& operator=(const GpuArena&) = delete;

  std::byte* slot(uint32_t index) const { return base() + index * gpu_slot_stride(slot_bytes_); }
  // Where the mailbox is that a peer was told of.
  std::byte* mailbox(const wire::GpuArena& told) const { return base() + told.mailbox; }
  // What one more peer is told, but for its number on the link: its stamp is in its mailbox.
  // Takes the device's time. Not thread-safe. Throws Error(kNoResources).
  wire::GpuArena tell(GpuPacker& packer);
  // Somebody may still write there: it stays until the process ends. Thread-safe.
  void abandon() { abandoned_ = true; }

 private:
  std::byte* base() const { return reinterpret_cast<std::byte*>(address_); }

  const std::shared_ptr<GpuRuntime> runtime_;
  const int device_;
  const uint32_t slot_bytes_;
  const uint64_t generation_ = fork_generation();
  uint64_t address_ = 0;
  wire::GpuArena about_;
  uint64_t mailboxes_ = 0;  // where they begin
  uint32_t told_ = 0;
  std::atomic<bool> abandoned_ = false;
};

}  // namespace kvxfer

#endif  // KVXFER_ENGINE_GPU_ARENA_H_
