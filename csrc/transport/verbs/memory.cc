#include "transport/verbs/memory.h"

#include <sys/resource.h>

#include <algorithm>
#include <cerrno>
#include <string>
#include <utility>

#include "kvxfer/status.h"
#include "transport/common/socket.h"

namespace kvxfer {
namespace {

// Registrations of 2 GiB and more fail on some adapters, whatever they announce.
constexpr uint64_t kLargestPiece = 1u << 30;
constexpr uint64_t kPage = 4096;

std::string lock_limit() {
  rlimit limit{};
  if (::getrlimit(RLIMIT_MEMLOCK, &limit) != 0) return "unknown";
  return limit.rlim_cur == RLIM_INFINITY ? "unlimited"
                                         : std::to_string(limit.rlim_cur / 1024) + " KiB";
}

}  // namespace

VerbsMemory::VerbsMemory(std::vector<std::shared_ptr<ibv::Nic>> nics, std::span<std::byte> memory,
                         VerbsAccess access, bool relaxed_ordering, int dmabuf_fd,
                         uint64_t dmabuf_offset, std::shared_ptr<void> owner, uint64_t shift)
    : owner_(std::move(owner)),
      nics_(std::move(nics)),
      memory_(memory),
      shift_(shift),
      piece_bytes_(kLargestPiece) {
  for (const auto& nic : nics_) {
    if (nic->attr.max_mr_size == 0) continue;  // not told
    piece_bytes_ = std::min(piece_bytes_, std::max(nic->attr.max_mr_size / kPage * kPage, kPage));
  }
  unsigned flags = access == VerbsAccess::kArena ? ibv::kLocalWrite | ibv::kRemoteWrite : 0;
  if (relaxed_ordering) flags |= ibv::kRelaxedOrdering;
  for (const auto& nic : nics_) {
    auto& pieces = mrs_.emplace_back();
    for (uint64_t at = 0; at < memory_.size(); at += piece_bytes_) {
      const uint64_t size = std::min<uint64_t>(piece_bytes_, memory_.size() - at);
      std::byte* address = memory_.data() + at;
      const uint64_t iova = remote_address() + at;
      if (dmabuf_fd >= 0 && !nic->library->reg_dmabuf_mr) {
        throw Error(StatusCode::kNoResources, "'" + nic->library->path +
                                                  "' cannot register memory of a GPU: that takes "
                                                  "rdma-core 34 or newer");
      }
      errno = 0;
      ibv::Mr* mr = dmabuf_fd >= 0
                        ? nic->library->reg_dmabuf_mr(nic->pd.get(), dmabuf_offset + at, size, iova,
                                                      dmabuf_fd, static_cast<int>(flags))
                        : nic->library->reg_mr_iova2(nic->pd.get(), address, size, iova, flags);
      if (!mr) {
        const int error = errno;
        throw Error(StatusCode::kNoResources,
                    "cannot register " + std::to_string(size) + " bytes with RDMA device '" +
                        nic->name + "': " + error_text(error) + "; the limit of locked memory is " +
                        lock_limit() +
                        ": raise it (ulimit -l unlimited, or LimitMEMLOCK= of the service)");
      }
      pieces.emplace_back(mr, nic->library->dereg_mr);
    }
  }
}

std::vector<uint32_t> VerbsMemory::rkeys(size_t nic) const {
  std::vector<uint32_t> keys;
  for (const auto& mr : mrs_[nic]) keys.push_back(mr->rkey);
  return keys;
}

}  // namespace kvxfer
