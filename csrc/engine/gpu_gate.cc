#include "engine/gpu_gate.h"

#include <algorithm>
#include <chrono>
#include <iterator>
#include <utility>

#include "kvxfer/status.h"

namespace kvxfer {
namespace {

constexpr Duration kSoonest = std::chrono::microseconds(20), kLatest = std::chrono::milliseconds(1);

}  // namespace

void GpuGate::start() {
  const std::lock_guard lock(mutex_);
  if (stopped_ || thread_) return;
  thread_ = std::make_unique<Thread>("kvx-gpu-gate", [this] { run(); });
}

void GpuGate::wait(std::shared_ptr<GpuEvent> event, TimePoint deadline, Opened opened) {
  const std::lock_guard lock(mutex_);
  if (stopped_) return;
  added_.push_back({std::move(event), deadline, std::move(opened), Clock::now()});
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
  const auto woken = [&] { return stopped_ || !added_.empty(); };
  while (!stopped_) {
    if (waiting.empty()) {
      changed_->wait(lock, woken);
    } else {
      const Duration age = Clock::now() - waiting.back().since;  // in the order of wait()
      changed_->wait_for(lock, std::clamp(age / 8, kSoonest, kLatest), woken);
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
