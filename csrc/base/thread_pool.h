#ifndef KVXFER_BASE_THREAD_POOL_H_
#define KVXFER_BASE_THREAD_POOL_H_

#include <cstddef>
#include <functional>
#include <memory>
#include <string>

#include "base/clock.h"

namespace kvxfer {

// A fixed number of threads that run tasks in the order submitted and sleep when there are none.
// They block all signals. Thread-safe. After a fork() the child's copy does nothing.
class ThreadPool {
 public:
  // Threads are named "<name>-<index>", cut to 15 characters. At least one is made.
  // Throws Error(kNoResources).
  ThreadPool(size_t threads, const std::string& name);

  // As stop(). May run on one of the pool's threads, which then ends by itself.
  ~ThreadPool();

  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  // Queues `task`, which must not throw. False, and the task is dropped, after stop().
  bool submit(std::function<void()> task);

  size_t size() const;

  // Runs what is queued to the end, then joins the threads. Idempotent.
  void stop();
  // The same until `deadline`, for others than the pool's threads. False where they are not through
  // by then: they go on by themselves, to the end of the queue, which must not need this object.
  bool stop_until(TimePoint deadline);

 private:
  struct State;
  std::shared_ptr<State> state_;
};

}  // namespace kvxfer

#endif  // KVXFER_BASE_THREAD_POOL_H_
