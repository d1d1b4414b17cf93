#include "engine/arena.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <numeric>
#include <string>

#include "kvxfer/status.h"

namespace kvxfer {
namespace {

std::string lock_limit() {
  rlimit limit{};
  if (getrlimit(RLIMIT_MEMLOCK, &limit) != 0) return "unknown";
  return limit.rlim_cur == RLIM_INFINITY ? "unlimited"
                                         : std::to_string(limit.rlim_cur / 1024) + " KiB";
}

[[noreturn]] void fail(const char* step, uint64_t bytes, const std::string& advice) {
  throw Error(StatusCode::kNoResources, "staging arena of " + std::to_string(bytes >> 20) +
                                            " MiB: " + step + ": " + std::strerror(errno) + "; " +
                                            advice);
}

}  // namespace

Arena::Arena(Kind kind, uint64_t bytes, uint32_t slot_bytes, bool lock)
    : generation_(fork_generation()),
      bytes_(bytes / slot_bytes * slot_bytes),
      slot_bytes_(slot_bytes),
      num_slots_(bytes / slot_bytes) {
  if (num_slots_ == 0) {
    throw Error(StatusCode::kInvalid, "arena_bytes is " + std::to_string(bytes) +
                                          ", less than one chunk of " + std::to_string(slot_bytes) +
                                          ": raise arena_bytes or lower chunk_bytes");
  }
  taker_.resize(num_slots_);
  free_.resize(num_slots_);  // room for all of them, so that give_back() allocates nothing
  std::iota(free_.rbegin(), free_.rend(), 0u);
  const std::string advice = "lower arena_bytes, or give the process more memory";
  if (kind == kShared) {
    fd_ = UniqueFd(memfd_create("kvxfer-arena", MFD_CLOEXEC | MFD_ALLOW_SEALING));
    if (!fd_) fail("memfd_create", bytes_, "raise the limit of open files (ulimit -n)");
    if (ftruncate(fd_.get(), static_cast<off_t>(bytes_)) != 0) fail("ftruncate", bytes_, advice);
    // Peers map it: without the seal a shrinking file would kill them with SIGBUS.
    if (fcntl(fd_.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0)
      fail("seal", bytes_, advice);
  }
  const int flags = kind == kShared ? MAP_SHARED : MAP_PRIVATE | MAP_ANONYMOUS;
  void* mapped = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, flags, fd_.get(), 0);
  if (mapped == MAP_FAILED) fail("mmap", bytes_, advice);
  madvise(mapped, bytes_, MADV_HUGEPAGE);
  madvise(mapped, bytes_, MADV_DONTFORK);
  if (lock && mlock(mapped, bytes_) != 0) {
    const int error = errno;
    munmap(mapped, bytes_);
    errno = error;
    fail("mlock", bytes_,
         "the limit of locked memory is " + lock_limit() +
             ": raise it (ulimit -l unlimited, or LimitMEMLOCK= "
             "of the service), lower arena_bytes, or set lock_arena=False");
  }
  base_ = static_cast<std::byte*>(mapped);
}

Arena::~Arena() {
  // In a forked child the mapping does not exist, and its addresses may hold something else.
  if (generation_ == fork_generation()) munmap(base_, bytes_);
}

std::optional<uint32_t> Arena::take_again() {
  const std::thread::id self = std::this_thread::get_id();
  const auto found = std::find_if(free_.rbegin(), free_.rend(),
                                  [&](uint32_t slot) { return taker_[slot] == self; });
  if (found != free_.rend()) std::iter_swap(found, free_.rbegin());
  const auto slot = take();
  if (slot) taker_[*slot] = self;
  return slot;
}

std::optional<uint32_t> Arena::take() {
  if (free_.empty()) return std::nullopt;
  const uint32_t slot = free_.back();
  free_.pop_back();
  return slot;
}

}  // namespace kvxfer
