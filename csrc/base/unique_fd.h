#ifndef KVXFER_BASE_UNIQUE_FD_H_
#define KVXFER_BASE_UNIQUE_FD_H_

#include <cstdint>

namespace kvxfer {

// Counts the forks between this process and the first one that loaded the library. An object that
// was made under another value belongs to an ancestor: its threads do not exist here and its file
// descriptors are closed. Async-signal-safe.
uint64_t fork_generation();

// Owns a file descriptor. Move-only; not thread-safe.
//
// A forked child must not keep its parent's sockets open, for peers would then not notice the
// parent's death. So every descriptor owned by a UniqueFd is closed in the child of a fork(),
// before fork() returns there; a UniqueFd copied by the fork owns nothing, even when the number is
// used again. (exec is dealt with by O_CLOEXEC, which whoever opens a descriptor sets.)
class UniqueFd {
 public:
  UniqueFd() = default;
  explicit UniqueFd(int fd);  // negative: owns nothing
  UniqueFd(UniqueFd&& other) noexcept;
  UniqueFd& operator=(UniqueFd&& other) noexcept;
  ~UniqueFd() { reset(); }

  // The descriptor, or -1 when nothing is owned in this process.
  int get() const { return generation_ == fork_generation() ? fd_ : -1; }
  explicit operator bool() const { return get() >= 0; }

  // Gives up ownership without closing.
  int release() noexcept;
  void reset() noexcept;

 private:
  int fd_ = -1;
  uint64_t generation_ = 0;
};

}  // namespace kvxfer

#endif  // KVXFER_BASE_UNIQUE_FD_H_
