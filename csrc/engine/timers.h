#ifndef KVXFER_ENGINE_TIMERS_H_
#define KVXFER_ENGINE_TIMERS_H_

#include <functional>
#include <map>
#include <utility>

#include "base/clock.h"

namespace kvxfer {

// Deadlines in the order they fall due. Not thread-safe: guarded by the agent's mutex, which is
// also held while an action runs.
class Timers {
 public:
  using Action = std::function<void()>;
  using Id = std::multimap<TimePoint, Action>::iterator;

  Id add(TimePoint when, Action action) { return due_.emplace(when, std::move(action)); }
  void cancel(Id id) { due_.erase(id); }
  TimePoint next() const { return due_.empty() ? kNever : due_.begin()->first; }

  // An action may add and cancel timers; its own is gone when it runs.
  void run_due(TimePoint now) {
    while (!due_.empty() && due_.begin()->first <= now) {
      Action action = std::move(due_.begin()->second);
      due_.erase(due_.begin());
      action();
    }
  }

 private:
  std::multimap<TimePoint, Action> due_;
};

}  // namespace kvxfer

#endif  // KVXFER_ENGINE_TIMERS_H_
