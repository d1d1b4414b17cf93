#ifndef KVXFER_ENGINE_ARENA_H_
#define KVXFER_ENGINE_ARENA_H_

#include <cstddef>
#include <cstdint>
#include <optional>
#include <thread>
#include <vector>

#include "base/unique_fd.h"

namespace kvxfer {

// Staging memory, cut into slots of equal size, which are handed out most-recently-freed first, so
// that what is written next is still in cache.
// Not thread-safe: guarded by the agent's mutex. Slot memory itself is written without it.
class Arena {
 public:
  // kShared is a memfd that peers of this host may map; kPrivate can have huge pages where the
  // system grants none to shared memory.
  enum Kind { kShared, kPrivate };

  // `lock` pins the memory with mlock(). Throws Error(kNoResources) saying which limit was met.
  Arena(Kind kind, uint64_t bytes, uint32_t slot_bytes, bool lock);
  ~Arena();
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  int fd() const { return fd_.get(); }  // -1: kPrivate
  uint64_t bytes() const { return bytes_; }
  uint32_t slot_bytes() const { return slot_bytes_; }
  uint32_t num_slots() const { return num_slots_; }
  uint32_t num_free() const { return static_cast<uint32_t>(free_.size()); }
  std::byte* slot(uint32_t index) const {
    return base_ + static_cast<uint64_t>(index) * slot_bytes_;
  }

  std::optional<uint32_t> take();
  // A free slot that the calling thread was the last to take by this, if there is one, else as
  // take(): its core's cache holds those bytes.
  std::optional<uint32_t> take_again();
  void give_back(uint32_t slot) { free_.push_back(slot); }

 private:
  UniqueFd fd_;
  const uint64_t generation_;
  uint64_t bytes_;
  uint32_t slot_bytes_;
  uint32_t num_slots_;
  std::byte* base_ = nullptr;
  std::vector<uint32_t> free_;
  std::vector<std::thread::id> taker_;  // [slots], by take_again()
};

}  // namespace kvxfer

#endif  // KVXFER_ENGINE_ARENA_H_
