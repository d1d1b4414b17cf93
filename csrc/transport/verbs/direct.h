#ifndef KVXFER_TRANSPORT_VERBS_DIRECT_H_
#define KVXFER_TRANSPORT_VERBS_DIRECT_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "kvxfer/transport.h"
#include "transport/verbs/address.h"
#include "transport/verbs/loopback.h"
#include "transport/verbs/memory.h"

namespace kvxfer::ibv {

// Registrations, in order of their addresses.
class LocalMemory final : public DirectMemory {
 public:
  // `rails`: those of the fabric, in the order in which the peer knows them.
  LocalMemory(std::vector<std::shared_ptr<VerbsMemory>> parts, const std::vector<Rail>& rails,
              std::shared_ptr<Loopbacks> loopbacks)
      : parts_(std::move(parts)), loopbacks_(std::move(loopbacks)) {
    for (const Rail& rail : rails) nic_of_rail_.push_back(rail.nic_index);
  }

  std::vector<std::byte> keys() const override;

  size_t adapters() const override { return loopbacks_->adapters(); }
  std::string adapter_name(size_t adapter) const override { return loopbacks_->name(adapter); }
  void put(size_t adapter, std::byte* to, std::span<const std::byte> bytes,
           double seconds) const override;
  void get(size_t adapter, const std::byte* from, std::span<std::byte> bytes,
           double seconds) const override;

  // Whether all of it is registered, in one part or in several that touch.
  bool holds(const std::byte* address, uint64_t bytes) const;
  // The part that an address is in, which has to be in one.
  const VerbsMemory& part_of(const std::byte* address) const { return *find(address); }

 private:
  const VerbsMemory* find(const std::byte* address) const;
  void check_registered(const std::byte* address, uint64_t bytes) const;

  const std::vector<std::shared_ptr<VerbsMemory>> parts_;
  const std::shared_ptr<Loopbacks> loopbacks_;
  std::vector<size_t> nic_of_rail_;
};

// Memory of the peer, in regions that are registered in pieces of equal size.
class Target final : public RemoteMemory {
 public:
  // The peer's arena.
  explicit Target(const EndpointAddress& address);
  // From what LocalMemory::keys() says, or anything else, by a peer with so many rails. Throws
  // Error(kProtocol).
  Target(std::span<const std::byte> keys, size_t rails);

  // Whether all of it is registered, in one region or in several that touch.
  bool holds(uint64_t offset, uint64_t bytes) const;

  // Of a place that it holds: as remote address; bytes to the end of its piece; the key.
  uint64_t address(uint64_t offset) const { return base_ + offset; }
  uint64_t piece_left(uint64_t offset) const {
    const Region& region = *find(offset);
    const uint64_t into = offset - region.offset;
    return std::min(piece_bytes_ - into % piece_bytes_, region.bytes - into);
  }
  uint32_t rkey(size_t rail, uint64_t offset) const {
    const Region& region = *find(offset);
    return rkeys_[rail][region.first_key + (offset - region.offset) / piece_bytes_];
  }

 private:
  struct Region {
    uint64_t offset = 0, bytes = 0;
    size_t first_key = 0;
  };
  const Region* find(uint64_t offset) const;

  uint64_t base_ = 0;
  uint64_t piece_bytes_ = 0;
  std::vector<Region> regions_;               // ascending
  std::vector<std::vector<uint32_t>> rkeys_;  // [rail][pieces of all regions]
};

}  // namespace kvxfer::ibv

#endif  // KVXFER_TRANSPORT_VERBS_DIRECT_H_
