#include "transport/shm/mapped_arena.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <cerrno>
#include <string>

#include "base/unique_fd.h"
#include "kvxfer/status.h"
#include "transport/common/socket.h"

namespace kvxfer {

MappedArena::MappedArena(int memfd, uint64_t bytes) : generation_(fork_generation()) {
  struct stat facts{};
  if (::fstat(memfd, &facts) != 0) {
    throw Error(StatusCode::kInvalid, "the peer's arena is no open file: " + error_text(errno));
  }
  if (bytes == 0 || static_cast<uint64_t>(facts.st_size) < bytes) {
    throw Error(StatusCode::kInvalid, "the peer announced an arena of " + std::to_string(bytes) +
                                          " bytes but its memory has " +
                                          std::to_string(facts.st_size));
  }
  const int seals = ::fcntl(memfd, F_GET_SEALS);
  if (seals < 0 || !(seals & F_SEAL_SHRINK)) {
    throw Error(
        StatusCode::kInvalid,
        "the peer's arena is not sealed against shrinking, which it must be before it can be "
        "mapped: create it with memfd_create(MFD_ALLOW_SEALING) and add F_SEAL_SHRINK");
  }
  void* address = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, memfd, 0);
  if (address == MAP_FAILED) {
    throw Error(
        StatusCode::kNoResources,
        "cannot map the peer's arena of " + std::to_string(bytes) + " bytes: " + error_text(errno));
  }
  ::madvise(address, bytes, MADV_DONTFORK);
  ::madvise(address, bytes, MADV_HUGEPAGE);
  bytes_ = {static_cast<std::byte*>(address), bytes};
}

MappedArena::~MappedArena() {
  // In a forked child the mapping does not exist, and its addresses may hold something else.
  if (bytes_.empty() || generation_ != fork_generation()) return;
  ::munmap(bytes_.data(), bytes_.size());
}

}  // namespace kvxfer
