#ifndef KVXFER_BASE_EVENT_LOOP_H_
#define KVXFER_BASE_EVENT_LOOP_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "base/clock.h"

namespace kvxfer {

// One thread that waits on file descriptors, tasks and timers, and sleeps when there is nothing to
// do. Handlers, tasks and the tick run on that thread, one at a time, with no lock held; they must
// not throw. The thread blocks all signals.
//
// Thread-safe unless said otherwise. After a fork() the child's copy does nothing.
class EventLoop {
 public:
  using Handler = std::function<void(uint32_t events)>;  // EPOLLIN, EPOLLOUT, EPOLLERR, ...
  using Task = std::function<void()>;
  using Tick = std::function<TimePoint()>;

  // `name` is the thread's, up to 15 characters. Throws Error(kNoResources).
  explicit EventLoop(const std::string& name);

  // As stop(). May run on the loop's own thread, which then ends by itself.
  ~EventLoop();

  EventLoop(const EventLoop&) = delete;
  EventLoop& operator=(const EventLoop&) = delete;

  // Calls `handler` whenever `fd` has one of `events` (level-triggered). The caller keeps owning
  // the descriptor and removes it before closing it. Throws Error(kNoResources) when epoll refuses.
  void add(int fd, uint32_t events, Handler handler);

  // Changes what is waited for. Nothing happens when `fd` is not there (any more).
  void modify(int fd, uint32_t events);

  // Forgets `fd`. On the loop's thread at once, also from inside the handler itself. From another
  // thread it returns when the handler is not running and never will again, so the caller must hold
  // nothing that the handler waits for.
  void remove(int fd);

  // Runs `task` on the loop's thread, in the order posted. False, and the task is dropped, once the
  // loop has stopped; what was accepted is run.
  bool post(Task task);

  // The same, not before `when`. What is not yet due when the loop stops is dropped.
  bool post_at(TimePoint when, Task task);

  // Makes the loop go round once, so that the tick is called.
  void wake();

  // `tick` runs after each wake-up, behind the handlers and tasks, and returns when it wants to be
  // called next at the latest (kNever: when something happens). Replacing it from another thread
  // returns when the old one is not running. Null: no tick.
  void set_tick(Tick tick);

  bool in_loop() const;

  // Runs the tasks that are queued and joins the thread. Descriptors are forgotten. On the loop's
  // own thread it returns at once and the thread ends by itself.
  void stop();

 private:
  struct State;
  std::shared_ptr<State> state_;
};

}  // namespace kvxfer

#endif  // KVXFER_BASE_EVENT_LOOP_H_
