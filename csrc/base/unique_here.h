#ifndef KVXFER_BASE_UNIQUE_HERE_H_
#define KVXFER_BASE_UNIQUE_HERE_H_

#include <cstdint>
#include <memory>

#include "base/unique_fd.h"

namespace kvxfer {

// Deletes only in the process that it was made in.
struct DeleteHere {
  uint64_t generation = fork_generation();

  template <class T>
  void operator()(T* object) const {
    if (generation == fork_generation()) delete object;
  }
};

// For a condition variable that threads wait for: its destruction waits until they have left, and a
// forked child does not have them. There it is leaked.
template <class T>
using UniqueHere = std::unique_ptr<T, DeleteHere>;

}  // namespace kvxfer

#endif  // KVXFER_BASE_UNIQUE_HERE_H_
