#include "engine/gpu_arena.h"

#include <sys/random.h>

#include <cerrno>
#include <cstring>
#include <string>
#include <utility>

#include "kvxfer/status.h"
#include "pack/gpu_packer.h"

namespace kvxfer {

GpuArena::GpuArena(std::shared_ptr<GpuRuntime> runtime, GpuPacker& packer, uint32_t slots,
                   uint32_t slot_bytes)
    : runtime_(std::move(runtime)), device_(packer.device()), slot_bytes_(slot_bytes) {
  about_.vendor = runtime_->vendor() == GpuVendor::kNvidia ? 0 : 1;
  about_.bytes = gpu_arena_bytes(slots, slot_bytes);
  auto identity = runtime_->identity(device_);
  about_.uuid = identity.uuid;
  about_.pci = std::move(identity.pci);
  if (::getrandom(about_.stamp.data(), about_.stamp.size(), 0) !=
      static_cast<ssize_t>(about_.stamp.size())) {
    throw Error(StatusCode::kNoResources, std::string("getrandom: ") + std::strerror(errno));
  }
  const CurrentDevice current(*runtime_, device_);
  address_ = runtime_->allocate(about_.bytes);
  try {
    about_.handle = runtime_->export_memory(address_);
    packer.write(slot(slots), about_.stamp.data(), about_.stamp.size());
  } catch (...) {
    if (!packer.given_up()) runtime_->free(address_);  // which would wait for the device
    throw;
  }
}

GpuArena::~GpuArena() {
  if (abandoned_ || generation_ != fork_generation()) return;
  try {
    const CurrentDevice current(*runtime_, device_);
    runtime_->free(address_);
  } catch (const Error&) {
    // The device is gone, and its memory with it.
  }
}

}  // namespace kvxfer
