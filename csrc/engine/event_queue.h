#ifndef KVXFER_ENGINE_EVENT_QUEUE_H_
#define KVXFER_ENGINE_EVENT_QUEUE_H_

#include <cstdint>
#include <vector>

#include "base/unique_fd.h"

namespace kvxfer {

// Handles of what has ended, behind an eventfd for engines with a loop of their own. Collects
// nothing until somebody asks for the descriptor, so that it cannot grow unread.
// Not thread-safe: guarded by the agent's mutex.
class EventQueue {
 public:
  int fd();
  void push(uint64_t handle);
  std::vector<uint64_t> drain();

 private:
  UniqueFd fd_;
  std::vector<uint64_t> handles_;
};

// A new eventfd. Throws Error(kNoResources).
UniqueFd make_event();
// Makes an eventfd readable, for good unless it is read.
void signal_event(const UniqueFd& event);

}  // namespace kvxfer

#endif  // KVXFER_ENGINE_EVENT_QUEUE_H_
