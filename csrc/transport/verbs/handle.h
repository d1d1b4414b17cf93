#ifndef KVXFER_TRANSPORT_VERBS_HANDLE_H_
#define KVXFER_TRANSPORT_VERBS_HANDLE_H_

#include <cstdint>
#include <utility>

#include "base/unique_fd.h"

namespace kvxfer::ibv {

// Owns one object of libibverbs. In a forked child it lets go without a word: the object is the
// parent's, and destroying it there would take it away from the parent. Move-only; not thread-safe.
template <typename T>
class Handle {
 public:
  using Release = int (*)(T*);

  Handle() = default;
  Handle(T* object, Release release)
      : object_(object), release_(release), generation_(fork_generation()) {}
  Handle(Handle&& other) noexcept
      : object_(std::exchange(other.object_, nullptr)),
        release_(other.release_),
        generation_(other.generation_) {}
  Handle& operator=(Handle&& other) noexcept {
    if (this != &other) {
      reset();
      object_ = std::exchange(other.object_, nullptr);
      release_ = other.release_;
      generation_ = other.generation_;
    }
    return *this;
  }
  ~Handle() { reset(); }

  void reset() noexcept {
    T* object = std::exchange(object_, nullptr);
    if (object && generation_ == fork_generation()) release_(object);
  }

  T* get() const { return object_; }
  T* operator->() const { return object_; }
  explicit operator bool() const { return object_ != nullptr; }

 private:
  T* object_ = nullptr;
  Release release_ = nullptr;
  uint64_t generation_ = 0;
};

}  // namespace kvxfer::ibv

#endif  // KVXFER_TRANSPORT_VERBS_HANDLE_H_
