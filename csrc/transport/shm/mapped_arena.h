#ifndef KVXFER_TRANSPORT_SHM_MAPPED_ARENA_H_
#define KVXFER_TRANSPORT_SHM_MAPPED_ARENA_H_

#include <cstddef>
#include <cstdint>
#include <span>

namespace kvxfer {

// A peer's arena in our address space. Owns the mapping, not the descriptor.
class MappedArena {
 public:
  MappedArena() = default;

  // Maps `bytes` bytes of the memfd. Throws Error(kInvalid) unless it is that large and sealed
  // against shrinking: a peer that could shrink it could kill us with SIGBUS. Throws
  // Error(kNoResources) when it cannot be mapped.
  MappedArena(int memfd, uint64_t bytes);
  ~MappedArena();

  MappedArena(const MappedArena&) = delete;
  MappedArena& operator=(const MappedArena&) = delete;

  std::span<std::byte> bytes() const { return bytes_; }

 private:
  std::span<std::byte> bytes_;
  uint64_t generation_ = 0;
};

}  // namespace kvxfer

#endif  // KVXFER_TRANSPORT_SHM_MAPPED_ARENA_H_
