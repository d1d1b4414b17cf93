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

// What to do about a registration that failed.
std::string advice(const DirectSpan& span, int error) {
  const std::string locked = "the limit of locked memory is " + lock_limit() +
                             ": raise it (ulimit -l unlimited, or LimitMEMLOCK= of the service)";
  if (!span.on_gpu) return locked;
  if (error == ENOMEM) {
    return "the GPU's BAR may be too small for it (large BAR, above 4G decoding), or " + locked;
  }
  if (error == EPERM || error == EACCES) {
    return "the process may not: check the limits of its container, and /dev/infiniband";
  }
  if (span.dmabuf < 0) {
    if (error == EINVAL || error == EFAULT) {
      return "no peer-memory module knows the address: load nvidia-peermem, or amdgpu with a "
             "kernel "
             "whose ib_core has peer memory; adapters that need a dma-buf (Pensando) say the same";
    }
    return "a peer-memory module has refused it";
  }
  if (error == EOPNOTSUPP || error == ENOSYS || error == ENOTTY || error == EPROTONOSUPPORT) {
    return "the adapter's driver, or a kernel before 5.12, cannot register dma-bufs";
  }
  if (error == EINVAL || error == EFAULT || error == ENXIO) {
    return "the kernel cannot map the GPU's memory for the adapter: it needs "
           "CONFIG_DMABUF_MOVE_NOTIFY and CONFIG_PCI_P2PDMA, and PCIe that lets the two reach each "
           "other (no ACS redirect, IOMMU off or in pass-through)";
  }
  return "the GPU's driver has given up the dma-buf, or lacks what the adapter needs of it";
}

}  // namespace

VerbsMemory::VerbsMemory(std::vector<std::shared_ptr<ibv::Nic>> nics, const DirectSpan& span,
                         VerbsAccess access, bool relaxed_ordering, std::shared_ptr<void> owner,
                         uint64_t shift)
    : owner_(std::move(owner)),
      nics_(std::move(nics)),
      memory_(span.memory),
      shift_(shift),
      piece_bytes_(kLargestPiece) {
  for (const auto& nic : nics_) {
    if (nic->attr.max_mr_size == 0) continue;  // not told
    piece_bytes_ = std::min(piece_bytes_, std::max(nic->attr.max_mr_size / kPage * kPage, kPage));
  }
  unsigned flags = access == VerbsAccess::kArena ? ibv::kLocalWrite | ibv::kRemoteWrite : 0;
  if (relaxed_ordering) flags |= ibv::kRelaxedOrdering;
  const bool by_dmabuf = span.dmabuf >= 0;
  for (const auto& nic : nics_) {
    if (by_dmabuf && !nic->library->reg_dmabuf_mr) {
      throw Error(StatusCode::kNoResources, "'" + nic->library->path +
                                                "' cannot register dma-bufs: that takes rdma-core "
                                                "34 or newer");
    }
    auto& pieces = mrs_.emplace_back();
    for (uint64_t at = 0; at < memory_.size(); at += piece_bytes_) {
      const uint64_t size = std::min<uint64_t>(piece_bytes_, memory_.size() - at);
      const uint64_t iova = remote_address() + at;
      errno = 0;
      ibv::Mr* mr =
          by_dmabuf
              ? nic->library->reg_dmabuf_mr(nic->pd.get(), span.offset + at, size, iova,
                                            span.dmabuf, static_cast<int>(flags))
              : nic->library->reg_mr_iova2(nic->pd.get(), memory_.data() + at, size, iova, flags);
      if (!mr) {
        const int error = errno;
        throw Error(StatusCode::kNoResources,
                    "cannot register " + std::to_string(size) + " bytes" +
                        (span.on_gpu ? " of a GPU" : "") + " with RDMA device '" + nic->name +
                        "': " + error_text(error) + "; " + advice(span, error));
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
