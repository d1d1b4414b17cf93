#include "device/gpu_peer_memory.h"

#include <map>
#include <mutex>
#include <string>
#include <tuple>
#include <utility>

#include "base/unique_fd.h"
#include "kvxfer/status.h"

namespace kvxfer {
namespace {

struct Opened {
  uint64_t address = 0;
  uint32_t users = 0;
};

// Held while one is opened or closed, so that nobody opens what is just being closed.
struct Table {
  std::mutex mutex;
  std::map<std::tuple<GpuVendor, int, GpuIpcHandle>, Opened> opened;
};

Table& table() {
  static auto* table = new Table;  // never destroyed: agents may be used until the very end
  return *table;
}

}  // namespace

GpuPeerMemory::GpuPeerMemory(std::shared_ptr<GpuRuntime> runtime, int device,
                             const GpuIpcHandle& handle, uint64_t bytes)
    : runtime_(std::move(runtime)),
      device_(device),
      handle_(handle),
      generation_(fork_generation()) {
  const CurrentDevice current(*runtime_, device_);
  {
    const std::lock_guard lock(table().mutex);
    const std::tuple key(runtime_->vendor(), device_, handle_);
    const auto [known, is_new] = table().opened.try_emplace(key);
    try {
      if (is_new) known->second.address = runtime_->open_memory(handle_);
    } catch (...) {
      table().opened.erase(known);
      throw;
    }
    ++known->second.users;
    address_ = known->second.address;
  }
  try {
    if (const uint64_t mapped = runtime_->opened_bytes(address_); mapped < bytes) {
      throw Error(StatusCode::kNoResources, "the peer's memory has " + std::to_string(mapped) +
                                                " bytes, where it said " + std::to_string(bytes));
    }
  } catch (...) {
    close();
    throw;
  }
}

GpuPeerMemory::~GpuPeerMemory() {
  if (generation_ == fork_generation()) close();
}

void GpuPeerMemory::close() noexcept {
  const std::lock_guard lock(table().mutex);
  const auto known = table().opened.find({runtime_->vendor(), device_, handle_});
  if (--known->second.users > 0) return;
  table().opened.erase(known);
  try {
    const CurrentDevice current(*runtime_, device_);
    runtime_->close_memory(address_);
  } catch (const Error&) {
    // The device is gone, and its mappings with it.
  }
}

}  // namespace kvxfer
