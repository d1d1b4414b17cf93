#include "engine/gpu_gate.h"

#include <chrono>
#include <iterator>
#include <utility>

#include "kvxfer/status.h"

namespace kvxfer {
namespace {

// Far less than a chunk takes, and two thousandths of a core.
constexpr std::chrono::microseconds kRest(100);

}  // namespace

void GpuGate::wait(std::shared_ptr<GpuEvent> event, TimePoint deadline, Opened opened) {
  const std::lock_guard lock(mutex_);
  if (stopped_) return;
  added_.push_back({std::move(event), deadline, std::move(opened)});
  if (!thread_) thread_ = std::make_unique<Thread>("kvx-gpu-gate", [this] { run(); });
  changed_->notify_one();
}

void GpuGate::stop() {
  if (generation_ != fork_generation()) return;
  {
    const std::lock_guard lock(mutex_);
    stopped_ = true;
    changed_->notify_one();
  }
  if (thread_) thread_->join();
  added_.clear();
}

void GpuGate::run() {
  std::vector<Waiting> waiting;
  std::unique_lock lock(mutex_);
  while (!stopped_) {
    if (waiting.empty()) {
      changed_->wait(lock, [&] { return stopped_ || !added_.empty(); });
    } else {
      changed_->wait_for(lock, kRest, [&] { return stopped_; });
    }
    if (stopped_) return;
    std::move(added_.begin(), added_.end(), std::back_inserter(waiting));
    added_.clear();
    lock.unlock();
    std::erase_if(waiting, [](const Waiting& entry) {
      std::string failure;
      try {
        if (!entry.event->happened()) {
          if (Clock::now() < entry.deadline) return false;
          failure = "the stream did not get there in time";
        }
      } catch (const Error& error) {
        failure = error.what();
      }
      entry.opened(failure);
      return true;
    });
    lock.lock();
  }
}

}  // namespace kvxfer
