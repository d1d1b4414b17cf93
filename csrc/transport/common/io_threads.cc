#include <algorithm>
#include <mutex>
#include <string>

#include "base/event_loop.h"
#include "kvxfer/transport.h"

namespace kvxfer {

struct IoThreads::State {
  explicit State(size_t bulk_threads)
      : control(std::make_shared<EventLoop>("kvx-ctl")), bulk(std::max<size_t>(bulk_threads, 1)) {}

  const std::shared_ptr<EventLoop> control;
  std::mutex mutex;
  bool stopped = false;                          // guarded by mutex
  std::vector<std::shared_ptr<EventLoop>> bulk;  // guarded by mutex; null until used
};

IoThreads::IoThreads(size_t bulk) : state_(std::make_unique<State>(bulk)) {}

IoThreads::~IoThreads() { stop(); }

void IoThreads::stop() {
  std::vector<std::shared_ptr<EventLoop>> loops;
  {
    const std::lock_guard lock(state_->mutex);
    state_->stopped = true;
    loops = state_->bulk;
  }
  // Links may still hold the loops. Data threads end first: they post to the control loop.
  for (const auto& loop : loops) {
    if (loop) loop->stop();
  }
  state_->control->stop();
}

const std::shared_ptr<EventLoop>& IoThreads::control() const { return state_->control; }

std::shared_ptr<EventLoop> IoThreads::bulk(size_t index) {
  const std::lock_guard lock(state_->mutex);
  index %= state_->bulk.size();
  std::shared_ptr<EventLoop>& loop = state_->bulk[index];
  if (!loop) {
    loop = std::make_shared<EventLoop>("kvx-io-" + std::to_string(index));
    if (state_->stopped) loop->stop();
  }
  return loop;
}

}  // namespace kvxfer
