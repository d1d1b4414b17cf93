#ifndef KVXFER_DEVICE_GPU_RUNTIME_H_
#define KVXFER_DEVICE_GPU_RUNTIME_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "base/unique_fd.h"

namespace kvxfer {

enum class GpuVendor : uint8_t { kNvidia, kAmd };

// Memory that a GPU's runtime knows.
struct GpuMemory {
  enum class Kind : uint8_t { kDevice, kManaged, kHost };
  Kind kind = Kind::kDevice;
  int device = 0;
  uint64_t base = 0;  // of the allocation that the address is in
  uint64_t bytes = 0;
};

// A file descriptor that RDMA NICs can register the memory behind: [offset, offset + bytes) in it.
struct DmaBuf {
  UniqueFd fd;
  uint64_t offset = 0;
};

// What names a device in all processes of a host, whatever number it has there. Parts of a device
// share its PCI address, and some devices of AMD a UUID that says nothing.
struct GpuIdentity {
  std::array<std::byte, 16> uuid{};
  std::string pci;
  bool operator==(const GpuIdentity&) const = default;
};

// By which another process of this host opens an allocation. The runtime's own.
using GpuIpcHandle = std::array<std::byte, 64>;

// The calls of CUDA's driver and of HIP that are used here, under one set of names. All but those
// that take a device work on the device that is current on the calling thread: see CurrentDevice.
// Thread-safe. Errors throw Error(kNoResources) with the call, and the runtime's name and text for
// what went wrong. Handles are the runtime's own.
class GpuRuntime {
 public:
  using Stream = void*;
  using Event = void*;
  using Module = void*;
  using Function = void*;

  virtual ~GpuRuntime() = default;

  virtual GpuVendor vendor() const = 0;
  // As "CUDA 13.0 (libcuda.so.1)".
  virtual std::string name() const = 0;
  virtual int device_count() = 0;
  // As in sysfs, "0000:3b:00.0", lower case.
  virtual std::string pci_address(int device) = 0;
  // These throw where the runtime is too old.
  virtual GpuIdentity identity(int device) = 0;
  // Whether kernels of a device can reach the memory of another.
  virtual bool reaches(int device, int other) = 0;

  // What was set on a thread before.
  struct Before {
    void* device = nullptr;
    int capture_mode = 0;
  };
  // Makes a device current on this thread, and lets the thread's calls leave alone what others, or
  // itself on other streams, capture into graphs: else a question for an event, and memory that is
  // allocated, would invalidate that.
  virtual Before set_device(int device) = 0;
  virtual void restore_device(const Before& before) noexcept = 0;

  // Nothing where the runtime does not know the address: memory of the host.
  virtual std::optional<GpuMemory> find_memory(const void* address) = 0;
  virtual uint64_t allocate(size_t bytes) = 0;
  virtual void free(uint64_t address) noexcept = 0;
  // Memory of the host that the device can be copied to and from at full speed.
  virtual void* allocate_host(size_t bytes) = 0;
  virtual void free_host(void* address) noexcept = 0;
  // Throws where the platform can't, naming what is missing. `address` may lie anywhere in an
  // allocation.
  DmaBuf export_dmabuf(uint64_t address, size_t bytes);

  // Between processes. Only for what allocate() has made: neither pools nor memory that is mapped
  // piece by piece have such handles. What another process has opened must not be freed.
  virtual GpuIpcHandle export_memory(uint64_t address) = 0;
  // Where all of such an allocation is here: for kernels of the current device, whichever the
  // memory is of. Throws for one of this process. See GpuPeerMemory, which opens none twice.
  virtual uint64_t open_memory(const GpuIpcHandle& handle) = 0;
  virtual void close_memory(uint64_t address) noexcept = 0;
  // How many bytes are mapped from an address on that open_memory() has answered.
  virtual uint64_t opened_bytes(uint64_t address) = 0;

  // After it, kernels that are launched see what RDMA adapters had written into the device's memory
  // when it was called. `read_back` has those adapters read from that memory, which pushes their
  // writes ahead of it; it is called where the platform needs that.
  virtual void settle_writes(int device, const std::function<void()>& read_back) = 0;

  // Does not wait for the default stream.
  virtual Stream create_stream() = 0;
  virtual void destroy_stream(Stream stream) noexcept = 0;
  // Whether what the stream is told goes into a graph, and does not run now.
  virtual bool is_capturing(Stream stream) = 0;
  virtual Event create_event() = 0;
  virtual void destroy_event(Event event) noexcept = 0;
  virtual void record(Event event, Stream stream) = 0;
  // Whether what was recorded has happened.
  virtual bool happened(Event event) = 0;

  virtual void copy(void* to, const void* from, size_t bytes, Stream stream) = 0;
  virtual void set(uint64_t to, uint8_t value, size_t bytes, Stream stream) = 0;
  // `rows` rows of `bytes` bytes, `pitch` apart.
  virtual void set_rows(uint64_t to, size_t pitch, uint8_t value, size_t bytes, size_t rows,
                        Stream stream) = 0;

  // Throws where the code is for other devices, too.
  virtual Module load_module(const void* code) = 0;
  virtual void unload_module(Module module) noexcept = 0;
  virtual Function find_function(Module module, const char* name) = 0;
  // `arguments` are addresses of the kernel's arguments.
  virtual void launch(Function function, uint32_t groups_x, uint32_t groups_y, uint32_t threads,
                      void** arguments, Stream stream) = 0;

 private:
  // Of a part of that allocation, at least, on the current device. The offset is that of `address`.
  virtual DmaBuf export_range(const GpuMemory& memory, uint64_t address, size_t bytes) = 0;
};

// A runtime, or why there is none.
struct GpuSearch {
  std::shared_ptr<GpuRuntime> runtime;
  std::string why_not;
};

// Loads a vendor's library: what KVXFER_CUDA_LIBRARY or KVXFER_HIP_LIBRARY names, else the
// system's. Without one, or without a device, there is a reason instead.
GpuSearch load_gpu_runtime(GpuVendor vendor);

// The same, loaded once for the process: looked for again as long as there is none.
GpuSearch gpu_runtime(GpuVendor vendor);

// A device that is current on this thread for the time of this object's life, in which no capture
// of a graph is disturbed.
class CurrentDevice {
 public:
  CurrentDevice(GpuRuntime& runtime, int device)
      : runtime_(runtime), before_(runtime.set_device(device)) {}
  ~CurrentDevice() { runtime_.restore_device(before_); }
  CurrentDevice(const CurrentDevice&) = delete;
  CurrentDevice& operator=(const CurrentDevice&) = delete;

 private:
  GpuRuntime& runtime_;
  const GpuRuntime::Before before_;
};

}  // namespace kvxfer

#endif  // KVXFER_DEVICE_GPU_RUNTIME_H_
