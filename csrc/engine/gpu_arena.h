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
constexpr uint64_t gpu_arena_bytes(uint64_t slots, uint64_t slot_bytes) {
  return slots * gpu_slot_stride(slot_bytes) + sizeof(wire::GpuArena::stamp);
}

// Memory of a GPU that producers on this host write into: a slot for each of the staging arena's.
// Which of them is whose, and when, is settled there. An allocation of its own, for pools and
// memory mapped piece by piece have no handles. Immutable but for abandon(). Made and freed where
// the device's time may be taken.
class GpuArena {
 public:
  // Throws Error(kNoResources).
  GpuArena(std::shared_ptr<GpuRuntime> runtime, GpuPacker& packer, uint32_t slots,
           uint32_t slot_bytes);
  ~GpuArena();
  GpuArena(const GpuArena&) = delete;
  GpuArena& operator=(const GpuArena&) = delete;

  std::byte* slot(uint32_t index) const { return base() + index * gpu_slot_stride(slot_bytes_); }
  // What peers are told, but for its number on the link.
  const wire::GpuArena& about() const { return about_; }
  // Somebody may still write there: it stays until the process ends.
  void abandon() { abandoned_ = true; }

 private:
  std::byte* base() const { return reinterpret_cast<std::byte*>(address_); }

  const std::shared_ptr<GpuRuntime> runtime_;
  const int device_;
  const uint32_t slot_bytes_;
  const uint64_t generation_ = fork_generation();
  uint64_t address_ = 0;
  wire::GpuArena about_;
  std::atomic<bool> abandoned_ = false;
};

}  // namespace kvxfer

#endif  // KVXFER_ENGINE_GPU_ARENA_H_
