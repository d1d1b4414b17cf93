#include "base/unique_fd.h"

#include <pthread.h>
#include <unistd.h>

#include <atomic>
#include <mutex>
#include <utility>
#include <vector>

namespace kvxfer {
namespace {

std::atomic<uint64_t> g_generation{0};

// Which descriptors UniqueFds own. Never destroyed: UniqueFds in static objects may outlive it.
struct Registry {
  Registry() {
    pthread_atfork([] { instance().mutex.lock(); }, [] { instance().mutex.unlock(); },
                   [] { instance().after_fork(); });
  }

  static Registry& instance() {
    static Registry* registry = new Registry;
    return *registry;
  }

  void after_fork() {
    for (size_t fd = 0; fd < owned.size(); ++fd) {
      if (owned[fd]) ::close(static_cast<int>(fd));
      owned[fd] = false;
    }
    g_generation.fetch_add(1, std::memory_order_relaxed);
    mutex.unlock();
  }

  void set(int fd, bool value) {
    const auto index = static_cast<size_t>(fd);
    if (owned.size() <= index) owned.resize(index + 1);
    owned[index] = value;
  }

  std::mutex mutex;
  std::vector<bool> owned;
};

// Forks count from when the library is loaded, not from the first descriptor.
[[maybe_unused]] const Registry& g_registry = Registry::instance();

}  // namespace

uint64_t fork_generation() { return g_generation.load(std::memory_order_relaxed); }

UniqueFd::UniqueFd(int fd) {
  if (fd < 0) return;
  Registry& registry = Registry::instance();
  const std::lock_guard lock(registry.mutex);
  registry.set(fd, true);
  fd_ = fd;
  generation_ = fork_generation();
}

UniqueFd::UniqueFd(UniqueFd&& other) noexcept
    : fd_(std::exchange(other.fd_, -1)), generation_(other.generation_) {}

UniqueFd& UniqueFd::operator=(UniqueFd&& other) noexcept {
  if (this != &other) {
    reset();
    fd_ = std::exchange(other.fd_, -1);
    generation_ = other.generation_;
  }
  return *this;
}

int UniqueFd::release() noexcept {
  const int fd = std::exchange(fd_, -1);
  if (fd < 0) return -1;
  Registry& registry = Registry::instance();
  const std::lock_guard lock(registry.mutex);
  if (generation_ != fork_generation()) return -1;
  registry.set(fd, false);
  return fd;
}

void UniqueFd::reset() noexcept {
  const int fd = std::exchange(fd_, -1);
  if (fd < 0) return;
  Registry& registry = Registry::instance();
  // The lock spans the close: a fork in between would copy a descriptor that nobody closes, and the
  // number could be taken again before it is unregistered.
  const std::lock_guard lock(registry.mutex);
  if (generation_ != fork_generation()) return;
  registry.set(fd, false);
  ::close(fd);
}

}  // namespace kvxfer
