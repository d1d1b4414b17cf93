#include "base/thread_pool.h"

#include <algorithm>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <utility>
#include <vector>

#include "base/thread.h"
#include "base/unique_fd.h"

namespace kvxfer {

// Shared with the threads, so that a pool may be destroyed by one of its own tasks.
struct ThreadPool::State {
  std::mutex mutex;
  std::condition_variable wanted, ended;
  std::deque<std::function<void()>> queue;  // guarded by mutex
  size_t idle = 0;                          // guarded by mutex
  bool stopping = false;                    // guarded by mutex
  size_t running = 0;                       // guarded by mutex; threads
  std::mutex join_mutex;
  std::vector<std::unique_ptr<Thread>> threads;  // guarded by join_mutex
  size_t size = 0;
  const uint64_t generation = fork_generation();

  // A forked child finds the mutex in whatever state the fork found it, so it touches nothing.
  bool foreign() const { return generation != fork_generation(); }

  void stop() {
    {
      const std::lock_guard lock(mutex);
      stopping = true;
    }
    wanted.notify_all();
  }
  std::vector<std::unique_ptr<Thread>> take_threads() {
    const std::lock_guard lock(join_mutex);
    return std::exchange(threads, {});
  }

  void run() {
    std::unique_lock lock(mutex);
    while (true) {
      if (!queue.empty()) {
        std::function<void()> task = std::move(queue.front());
        queue.pop_front();
        lock.unlock();
        task();
        task = nullptr;  // what it captured may need the lock to be destroyed
        lock.lock();
      } else if (stopping) {
        --running;
        ended.notify_all();
        return;
      } else {
        ++idle;
        wanted.wait(lock);
        --idle;
      }
    }
  }
};

ThreadPool::ThreadPool(size_t threads, const std::string& name)
    : state_(std::make_shared<State>()) {
  state_->size = std::max<size_t>(threads, 1);
  state_->threads.reserve(state_->size);  // a thread that is dropped in the loop waits for ever
  try {
    for (size_t i = 0; i < state_->size; ++i) {
      state_->threads.push_back(std::make_unique<Thread>(name + "-" + std::to_string(i),
                                                         [state = state_] { state->run(); }));
      const std::lock_guard lock(state_->mutex);
      ++state_->running;
    }
  } catch (...) {
    stop();
    throw;
  }
}

ThreadPool::~ThreadPool() { stop(); }

bool ThreadPool::submit(std::function<void()> task) {
  const std::shared_ptr<State> state = state_;  // the task may destroy the pool
  if (state->foreign()) return false;
  bool notify = false;
  {
    const std::lock_guard lock(state->mutex);
    if (state->stopping) return false;
    state->queue.push_back(std::move(task));
    notify = state->idle > 0;
  }
  if (notify) state->wanted.notify_one();
  return true;
}

size_t ThreadPool::size() const { return state_->size; }

void ThreadPool::stop() {
  const std::shared_ptr<State> state = state_;
  if (state->foreign()) {
    for (auto& thread : state->threads) thread->join();
    return;
  }
  state->stop();
  for (auto& thread : state->take_threads()) thread->join();
}

bool ThreadPool::stop_until(TimePoint deadline) {
  const std::shared_ptr<State> state = state_;
  if (!state->foreign()) {
    state->stop();
    std::unique_lock lock(state->mutex);
    if (!state->ended.wait_until(lock, deadline, [&] { return state->running == 0; })) {
      lock.unlock();
      for (auto& thread : state->take_threads()) thread->leave();
      return false;
    }
  }
  stop();
  return true;
}

}  // namespace kvxfer
