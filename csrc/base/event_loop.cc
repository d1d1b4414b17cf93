#include "base/event_loop.h"

#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <condition_variable>
#include <cstring>
#include <map>
#include <mutex>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/thread.h"
#include "base/unique_fd.h"
#include "kvxfer/status.h"

namespace kvxfer {
namespace {

struct Entry {
  int fd = -1;
  EventLoop::Handler handler;
  uint32_t serial = 0;
};

// An event that epoll reported before its descriptor was removed, and perhaps used again, must not
// reach the new handler: the serial tells them apart.
uint64_t event_key(int fd, uint32_t serial) {
  return static_cast<uint64_t>(serial) << 32 | static_cast<uint32_t>(fd);
}

constexpr uint64_t kWakeKey = ~uint64_t{0};

}  // namespace

// Shared with the thread, so that a loop may be destroyed by one of its own handlers.
struct EventLoop::State {
  UniqueFd epoll;
  UniqueFd wake_fd;
  std::unique_ptr<Thread> thread;
  const uint64_t generation = fork_generation();

  std::mutex mutex;
  std::condition_variable idle;                             // `running` changed
  std::unordered_map<int, std::shared_ptr<Entry>> entries;  // guarded by mutex
  std::shared_ptr<Entry> running;                           // guarded by mutex
  std::vector<Task> tasks;                                  // guarded by mutex
  std::multimap<TimePoint, Task> timers;                    // guarded by mutex
  uint32_t next_serial = 0;                                 // guarded by mutex
  bool signalled = false;                                   // guarded by mutex
  bool stopping = false;                                    // guarded by mutex
  bool stopped = false;                                     // guarded by mutex

  std::mutex join_mutex;

  std::shared_ptr<Tick> tick;  // the loop's thread only

  bool in_loop() const { return thread && thread->is_current(); }

  // A forked child finds the mutex in whatever state the fork found it, so it touches nothing.
  bool foreign() const { return generation != fork_generation(); }

  void signal_locked() {
    if (std::exchange(signalled, true)) return;
    const uint64_t one = 1;
    // Can only fail when the counter is full, and then the loop is awake already.
    static_cast<void>(!::write(wake_fd.get(), &one, sizeof(one)));
  }

  // Returns false when there is nothing left and the loop is to stop.
  bool run_tasks() {
    std::vector<Task> batch;
    {
      const std::lock_guard lock(mutex);
      if (tasks.empty() && stopping) {
        stopped = true;
        return false;
      }
      batch.swap(tasks);
      if (!timers.empty()) {
        const auto due = timers.upper_bound(Clock::now());
        for (auto it = timers.begin(); it != due; ++it) batch.push_back(std::move(it->second));
        timers.erase(timers.begin(), due);
      }
    }
    for (Task& task : batch) {
      task();
      task = nullptr;
    }
    return true;
  }

  void dispatch(const epoll_event& event) {
    if (event.data.u64 == kWakeKey) {
      uint64_t count;
      static_cast<void>(!::read(wake_fd.get(), &count, sizeof(count)));
      const std::lock_guard lock(mutex);
      signalled = false;
      return;
    }
    std::shared_ptr<Entry> entry;
    {
      const std::lock_guard lock(mutex);
      const auto found = entries.find(static_cast<int>(event.data.u64 & 0xffffffffu));
      if (found == entries.end() || found->second->serial != event.data.u64 >> 32) return;
      entry = found->second;
      running = entry;
    }
    entry->handler(event.events);
    {
      const std::lock_guard lock(mutex);
      running = nullptr;
    }
    idle.notify_all();
  }

  void run() {
    std::array<epoll_event, 64> events;
    TimePoint next = kNever;
    bool more_tasks = false;
    while (true) {
      const int timeout = more_tasks ? 0 : millis_until(next, Clock::now());
      const int count = ::epoll_wait(epoll.get(), events.data(), events.size(), timeout);
      for (int i = 0; i < count; ++i) dispatch(events[static_cast<size_t>(i)]);
      if (!run_tasks()) break;
      const std::shared_ptr<Tick> current = tick;  // it may replace itself
      next = current ? (*current)() : kNever;
      const std::lock_guard lock(mutex);
      more_tasks = !tasks.empty() || stopping;
      if (!timers.empty()) next = std::min(next, timers.begin()->first);
    }
    // What the handlers captured is destroyed here, outside the lock, for it may call back.
    std::unordered_map<int, std::shared_ptr<Entry>> forgotten;
    std::multimap<TimePoint, Task> dropped;
    {
      const std::lock_guard lock(mutex);
      forgotten.swap(entries);
      dropped.swap(timers);
    }
    tick = nullptr;
  }
};

EventLoop::EventLoop(const std::string& name) : state_(std::make_shared<State>()) {
  state_->epoll = UniqueFd(::epoll_create1(EPOLL_CLOEXEC));
  state_->wake_fd = UniqueFd(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  epoll_event event{};
  event.events = EPOLLIN;
  event.data.u64 = kWakeKey;
  if (!state_->epoll || !state_->wake_fd ||
      ::epoll_ctl(state_->epoll.get(), EPOLL_CTL_ADD, state_->wake_fd.get(), &event) != 0) {
    throw Error(StatusCode::kNoResources, "cannot set up the event loop '" + name +
                                              "': " + std::strerror(errno) +
                                              "; check the limit on open files (ulimit -n)");
  }
  state_->thread = std::make_unique<Thread>(name, [state = state_] { state->run(); });
}

EventLoop::~EventLoop() { stop(); }

void EventLoop::add(int fd, uint32_t events, Handler handler) {
  State& state = *state_;
  if (state.foreign()) return;
  auto entry = std::make_shared<Entry>();
  entry->fd = fd;
  entry->handler = std::move(handler);
  const std::lock_guard lock(state.mutex);
  entry->serial = state.next_serial++ & 0x7fffffffu;
  epoll_event event{};
  event.events = events;
  event.data.u64 = event_key(fd, entry->serial);
  if (::epoll_ctl(state.epoll.get(), EPOLL_CTL_ADD, fd, &event) != 0) {
    throw Error(StatusCode::kNoResources,
                "cannot watch file descriptor " + std::to_string(fd) + ": " + std::strerror(errno));
  }
  state.entries[fd] = std::move(entry);
}

void EventLoop::modify(int fd, uint32_t events) {
  State& state = *state_;
  if (state.foreign()) return;
  const std::lock_guard lock(state.mutex);
  const auto found = state.entries.find(fd);
  if (found == state.entries.end()) return;
  epoll_event event{};
  event.events = events;
  event.data.u64 = event_key(fd, found->second->serial);
  ::epoll_ctl(state.epoll.get(), EPOLL_CTL_MOD, fd, &event);
}

void EventLoop::remove(int fd) {
  State& state = *state_;
  if (state.foreign()) return;
  std::shared_ptr<Entry> entry;
  std::unique_lock lock(state.mutex);
  const auto found = state.entries.find(fd);
  if (found != state.entries.end()) {
    entry = std::move(found->second);
    state.entries.erase(found);
    ::epoll_ctl(state.epoll.get(), EPOLL_CTL_DEL, fd, nullptr);
  }
  // Also when it is gone: the handler may have removed itself and still be running.
  if (!in_loop()) {
    state.idle.wait(lock, [&] { return !state.running || state.running->fd != fd; });
  }
  lock.unlock();
}

bool EventLoop::post(Task task) {
  const std::shared_ptr<State> state = state_;  // the task may destroy the loop
  if (state->foreign()) return false;
  const std::lock_guard lock(state->mutex);
  if (state->stopped) return false;
  state->tasks.push_back(std::move(task));
  if (!state->in_loop()) state->signal_locked();
  return true;
}

bool EventLoop::post_at(TimePoint when, Task task) {
  State& state = *state_;
  if (state.foreign()) return false;
  const std::lock_guard lock(state.mutex);
  if (state.stopped) return false;
  const auto timer = state.timers.emplace(when, std::move(task));
  if (timer == state.timers.begin() && !in_loop()) state.signal_locked();
  return true;
}

void EventLoop::wake() {
  State& state = *state_;
  if (state.foreign()) return;
  const std::lock_guard lock(state.mutex);
  if (!state.stopped) state.signal_locked();
}

void EventLoop::set_tick(Tick tick) {
  std::shared_ptr<Tick> shared = tick ? std::make_shared<Tick>(std::move(tick)) : nullptr;
  if (in_loop()) {
    state_->tick = std::move(shared);
    wake();
    return;
  }
  std::mutex mutex;
  std::condition_variable changed;
  bool done = false;
  const bool posted = post([&] {
    state_->tick.swap(shared);
    const std::lock_guard lock(mutex);
    done = true;
    changed.notify_one();
  });
  if (!posted) return;
  std::unique_lock lock(mutex);
  changed.wait(lock, [&] { return done; });
}

bool EventLoop::in_loop() const { return state_->in_loop(); }

void EventLoop::stop() {
  const std::shared_ptr<State> state = state_;
  if (state->foreign()) {
    if (state->thread) state->thread->join();
    return;
  }
  {
    const std::lock_guard lock(state->mutex);
    state->stopping = true;
    if (!state->stopped) state->signal_locked();
  }
  const std::lock_guard lock(state->join_mutex);
  if (state->thread) state->thread->join();
}

}  // namespace kvxfer
