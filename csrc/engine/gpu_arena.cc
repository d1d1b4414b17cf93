#include "engine/gpu_arena.h"

#include <sys/random.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "kvxfer/status.h"
#include "pack/gpu_packer.h"

namespace kvxfer {
namespace {

// Used again when there were so many peers. One that has not had its trial by then, so much later,
// finds another stamp, and goes through the host's memory.
constexpr uint32_t kMailboxes = 512;
// CUDA's advice for what is shared: else the driver shares what else lies in the same pages, too.
constexpr uint64_t kPage = 2u << 20;

}  // namespace

std::array<std::byte, wire::kGpuTrialBytes> gpu_trial(
    const std::array<std::byte, kGpuStampBytes>& stamp) {
  std::array<std::byte, wire::kGpuTrialBytes> trial{};
  std::rotate_copy(stamp.begin(), stamp.begin() + kGpuStampBytes / 2, stamp.end(), trial.begin());
  std::transform(stamp.begin(), stamp.end(), trial.begin() + kGpuStampBytes,
                 [](std::byte value) { return ~value; });
  return trial;
}

GpuArena::GpuArena(std::shared_ptr<GpuRuntime> runtime, int device, uint32_t slots,
                   uint32_t slot_bytes)
    : runtime_(std::move(runtime)), device_(device), slot_bytes_(slot_bytes) {
  about_.vendor = runtime_->vendor() == GpuVendor::kNvidia ? 0 : 1;
  mailboxes_ = gpu_slots_bytes(slots, slot_bytes);
  const uint64_t used = mailboxes_ + uint64_t{kMailboxes} * wire::kGpuMailboxBytes;
  about_.bytes = (used + kPage - 1) / kPage * kPage;
  auto identity = runtime_->identity(device_);
  about_.uuid = identity.uuid;
  about_.pci = std::move(identity.pci);
  const CurrentDevice current(*runtime_, device_);
  address_ = runtime_->allocate(about_.bytes);
  try {
    about_.handle = runtime_->export_memory(address_);
  } catch (...) {
    runtime_->free(address_);
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

wire::GpuArena GpuArena::tell(GpuPacker& packer) {
  wire::GpuArena told = about_;
  told.mailbox = mailboxes_ + uint64_t{told_++ % kMailboxes} * wire::kGpuMailboxBytes;
  if (::getrandom(told.stamp.data(), told.stamp.size(), 0) !=
      static_cast<ssize_t>(told.stamp.size())) {
    throw Error(StatusCode::kNoResources, std::string("getrandom: ") + std::strerror(errno));
  }
  std::vector<std::byte> first(wire::kGpuMailboxBytes);
  std::copy(told.stamp.begin(), told.stamp.end(), first.begin());
  packer.write(mailbox(told), first.data(), first.size());
  return told;
}

}  // namespace kvxfer
