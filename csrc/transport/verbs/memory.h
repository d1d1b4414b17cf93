#ifndef KVXFER_TRANSPORT_VERBS_MEMORY_H_
#define KVXFER_TRANSPORT_VERBS_MEMORY_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "kvxfer/verbs.h"
#include "transport/verbs/rail.h"

namespace kvxfer {

// Memory registered with every adapter of a fabric, in pieces of equal size: adapters limit what
// one registration may cover. Immutable.
class VerbsMemory {
 public:
  // Throws Error(kNoResources). `owner` is let go of when the adapters can't reach the memory any
  // more. `shift`: adapters and peers have it at so much higher addresses; a multiple of the
  // largest page that is to be made use of.
  VerbsMemory(std::vector<std::shared_ptr<ibv::Nic>> nics, const DirectSpan& span,
              VerbsAccess access, bool relaxed_ordering, std::shared_ptr<void> owner,
              uint64_t shift = 0);

  VerbsMemory(const VerbsMemory&) = delete;
  VerbsMemory& operator=(const VerbsMemory&) = delete;

  std::span<std::byte> memory() const { return memory_; }
  // Where adapters have it, and peers.
  uint64_t remote_address() const { return reinterpret_cast<uint64_t>(memory_.data()) + shift_; }
  uint64_t piece_bytes() const { return piece_bytes_; }
  bool holds(std::span<const std::byte> part) const {
    return part.data() >= memory_.data() &&
           part.data() + part.size() <= memory_.data() + memory_.size();
  }

  uint32_t lkey(size_t nic, const std::byte* address) const {
    const auto piece = static_cast<uint64_t>(address - memory_.data()) / piece_bytes_;
    return mrs_[nic][piece]->lkey;
  }
  uint32_t rkey(size_t nic, const std::byte* address) const {
    const auto piece = static_cast<uint64_t>(address - memory_.data()) / piece_bytes_;
    return mrs_[nic][piece]->rkey;
  }
  uint64_t remote_address(const std::byte* address) const {
    return reinterpret_cast<uint64_t>(address) + shift_;
  }
  // Bytes from `address` to the end of its piece.
  uint64_t piece_left(const std::byte* address) const {
    const auto into = static_cast<uint64_t>(address - memory_.data());
    return std::min(piece_bytes_ - into % piece_bytes_, memory_.size() - into);
  }
  std::vector<uint32_t> rkeys(size_t nic) const;

 private:
  const std::shared_ptr<void> owner_;  // first: goes last
  const std::vector<std::shared_ptr<ibv::Nic>> nics_;
  const std::span<std::byte> memory_;
  const uint64_t shift_;
  uint64_t piece_bytes_ = 0;
  std::vector<std::vector<ibv::Handle<ibv::Mr>>> mrs_;  // [nic][piece]
};

}  // namespace kvxfer

#endif  // KVXFER_TRANSPORT_VERBS_MEMORY_H_
