// For test_growth.py: a thread that first throws when the process has no memory left. In a library
// that is loaded late, as the Python module is: for those of a program the C library has memory.

#include <sys/resource.h>

#include <atomic>
#include <cstdlib>
#include <memory>
#include <thread>

#include "base/thread.h"

namespace {

void take_all_memory() {
  rlimit limit{};
  getrlimit(RLIMIT_AS, &limit);
  limit.rlim_cur = 1 << 20;
  setrlimit(RLIMIT_AS, &limit);
  for (size_t bytes = 1 << 20; bytes >= 16; bytes /= 2) {
    while (std::malloc(bytes) != nullptr) {
    }
  }
}

}  // namespace

// 0 when a thread of ours, or one that is not prepared, has caught what it threw. No promises: they
// would prepare it.
extern "C" int kvxfer_throw_late(bool ours) {
  enum State { kNone, kStarted, kTaken };
  std::atomic<State> state = kNone;
  int caught = 1;
  const auto body = [&] {
    state = kStarted;
    while (state != kTaken) std::this_thread::yield();
    try {
      throw 0;
    } catch (int thrown) {
      caught = thrown;
    }
  };
  std::unique_ptr<kvxfer::Thread> prepared;
  std::thread other;
  if (ours) {
    prepared = std::make_unique<kvxfer::Thread>("late", body);
  } else {
    other = std::thread(body);
  }
  while (state != kStarted) std::this_thread::yield();
  take_all_memory();
  state = kTaken;
  if (ours) {
    prepared->join();
  } else {
    other.join();
  }
  return caught;
}
