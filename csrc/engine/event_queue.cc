#include "engine/event_queue.h"

#include <sys/eventfd.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <string>
#include <utility>

#include "kvxfer/status.h"

namespace kvxfer {

UniqueFd make_event() {
  UniqueFd event(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!event) {
    throw Error(StatusCode::kNoResources, std::string("eventfd: ") + std::strerror(errno) +
                                              "; raise the limit of open files (ulimit -n)");
  }
  return event;
}

void signal_event(const UniqueFd& event) {
  if (!event) return;
  const uint64_t one = 1;
  // Cannot fail but by overflow, in which case the descriptor is readable already.
  [[maybe_unused]] const ssize_t written = write(event.get(), &one, sizeof(one));
}

int EventQueue::fd() {
  if (!fd_) fd_ = make_event();
  return fd_.get();
}

void EventQueue::push(uint64_t handle) {
  if (!fd_) return;
  handles_.push_back(handle);
  signal_event(fd_);
}

std::vector<uint64_t> EventQueue::drain() {
  if (fd_) {
    uint64_t count = 0;
    [[maybe_unused]] const ssize_t got = read(fd_.get(), &count, sizeof(count));
  }
  return std::exchange(handles_, {});
}

}  // namespace kvxfer
