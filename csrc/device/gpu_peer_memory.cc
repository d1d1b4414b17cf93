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

using Key = std::tuple<GpuVendor, int, GpuIpcHandle>;

}  // namespace

// Its mutex is held while it is opened or closed, so that nobody opens what is just being closed. A
// driver that does not come back holds up nobody else.
struct GpuPeerMemory::Opened {
  std::mutex mutex;
  uint64_t address = 0;
  uint32_t users = 0;
};

namespace {

struct Table {
  std::mutex mutex;
  std::map<Key, std::shared_ptr<GpuPeerMemory::Opened>> opened;
};

Table& table() {
  static auto* table = new Table;  // never destroyed: agents may be used until the very end
  return *table;
}

std::shared_ptr<GpuPeerMemory::Opened> find_opened(const Key& key) {
  const std::lock_guard lock(table().mutex);
  auto& opened = table().opened[key];
  if (!opened) opened = std::make_shared<GpuPeerMemory::Opened>();
  return opened;
}

// Who calls has the last but the table's, unless somebody is about to open it again.
void forget_opened(const Key& key, const std::shared_ptr<GpuPeerMemory::Opened>& opened) {
  const std::lock_guard lock(table().mutex);
  const auto known = table().opened.find(key);
  if (known != table().opened.end() && known->second == opened && opened.use_count() == 2) {
    table().opened.erase(known);
  }
}

}  // namespace

GpuPeerMemory::GpuPeerMemory(std::shared_ptr<GpuRuntime> runtime, int device,
                             const GpuIpcHandle& handle, uint64_t bytes)
    : runtime_(std::move(runtime)),
      device_(device),
      handle_(handle),
      generation_(fork_generation()) {
  const CurrentDevice current(*runtime_, device_);
  const Key key(runtime_->vendor(), device_, handle_);
  opened_ = find_opened(key);
  try {
    const std::lock_guard lock(opened_->mutex);
    if (opened_->users == 0) opened_->address = runtime_->open_memory(handle_);
    ++opened_->users;
    address_ = opened_->address;
  } catch (...) {
    forget_opened(key, opened_);
    throw;
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
  if (!left_open_ && generation_ == fork_generation()) close();
}

void GpuPeerMemory::close() noexcept {
  {
    const std::lock_guard lock(opened_->mutex);
    if (--opened_->users > 0) return;
    try {
      const CurrentDevice current(*runtime_, device_);
      runtime_->close_memory(address_);
    } catch (const Error&) {
      // The device is gone, and its mappings with it.
    }
  }
  forget_opened({runtime_->vendor(), device_, handle_}, opened_);
}

}  // namespace kvxfer
