#ifndef KVXFER_DEVICE_GPU_PEER_MEMORY_H_
#define KVXFER_DEVICE_GPU_PEER_MEMORY_H_

#include <cstddef>
#include <cstdint>
#include <memory>

#include "device/gpu_runtime.h"

namespace kvxfer {

// An allocation of another process on this host, for kernels of one device here. It is opened once
// for all who want it: CUDA up to 10 and some of HIP's versions refuse the second time. Closed with
// this object, which takes the device's time: not to be dropped with a lock held. Thread-safe, but
// for leave_open().
//
// Whether it outlives the process that it is of is the driver's business: what is written there
// afterwards fails at worst, with this device's context.
class GpuPeerMemory {
 public:
  // Throws Error(kNoResources), also where less than `bytes` are mapped.
  GpuPeerMemory(std::shared_ptr<GpuRuntime> runtime, int device, const GpuIpcHandle& handle,
                uint64_t bytes);
  ~GpuPeerMemory();
  GpuPeerMemory(const GpuPeerMemory&) = delete;
  GpuPeerMemory& operator=(const GpuPeerMemory&) = delete;

  std::byte* data() const { return reinterpret_cast<std::byte*>(address_); }
  // It stays open until the process ends: to close it would wait for a device that hangs.
  void leave_open() { left_open_ = true; }

  struct Opened;  // by one process, for one device

 private:
  void close() noexcept;

  const std::shared_ptr<GpuRuntime> runtime_;
  const int device_;
  const GpuIpcHandle handle_;
  std::shared_ptr<Opened> opened_;
  uint64_t address_ = 0;
  bool left_open_ = false;
  const uint64_t generation_;
};

}  // namespace kvxfer

#endif  // KVXFER_DEVICE_GPU_PEER_MEMORY_H_
