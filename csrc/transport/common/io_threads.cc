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
  std::vector<std::shared_ptr<EventLoop>> bulk;  // guarded by mutex; null until used
};

IoThreads::IoThreads(size_t bulk) : state_(std::make_unique<State>(bulk)) {}

IoThreads::~IoThreads() {
  // Links may still hold the loops. Data threads end first: they post to the control loop.
  for (const auto& loop : state_->bulk) {
    if (loop) loop->stop();
  }
  state_->control->stop();
}

const std::shared_ptr<EventLoop>& IoThreads::control() const { return state_->control; }

std::shared_ptr<EventLoop> IoThreads::bulk(size_t index) {
  const std::lock_guard lock(state_->mutex);
  index %= state_->bulk.size();
  std::shared_ptr<EventLoop>& loop = state_->bulk[index];
  if (!loop) loop = std::make_shared<EventLoop>("kvx-io-" + std::to_string(index));
  return loop;
}

}  // namespace kvxfer
