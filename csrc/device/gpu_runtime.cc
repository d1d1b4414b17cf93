#include "device/gpu_runtime.h"

#include <array>
#include <mutex>

#include "device/gpu_library.h"
#include "kvxfer/status.h"

namespace kvxfer {

DmaBuf GpuRuntime::export_dmabuf(uint64_t address, size_t bytes) {
  const auto memory = find_memory(reinterpret_cast<const void*>(address));
  if (!memory || memory->kind != GpuMemory::Kind::kDevice) {
    throw Error(StatusCode::kInvalid, "no dmabuf of memory that is not on a GPU");
  }
  const uint64_t before = address - memory->base;
  if (bytes > memory->bytes - before) {
    throw Error(StatusCode::kInvalid, "a dmabuf of " + std::to_string(bytes) +
                                          " bytes would reach over the end of its allocation of " +
                                          std::to_string(memory->bytes) + " bytes");
  }
  const CurrentDevice current(*this, memory->device);
  return export_range(*memory, address, bytes);
}

GpuSearch load_gpu_runtime(GpuVendor vendor) {
  return vendor == GpuVendor::kNvidia ? load_cuda() : load_hip();
}

GpuSearch gpu_runtime(GpuVendor vendor) {
  // Never destroyed: an agent that nobody closed may use them until the very end.
  static auto* mutex = new std::mutex;
  static auto* found = new std::array<GpuSearch, 2>;
  const std::lock_guard lock(*mutex);
  GpuSearch& search = (*found)[static_cast<size_t>(vendor)];
  if (!search.runtime) search = load_gpu_runtime(vendor);
  return search;
}

}  // namespace kvxfer
