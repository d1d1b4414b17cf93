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
  running_ = true;
}

void GpuGate::wait(std::shared_ptr<GpuEvent> event, TimePoint deadline, Opened opened) {
  const std::lock_guard lock(mutex_);
  if (stopped_) return;
  added_.push_back({std::move(event), deadline, std::move(opened), Clock::now()});
  changed_->notify_one();
}

bool GpuGate::stop_until(TimePoint deadline) {
  if (generation_ != fork_generation()) return true;
  std::unique_lock lock(mutex_);
  stopped_ = true;
  changed_->notify_all();
  const auto is_over = [&] { return !running_; };
  if (deadline == kNever) changed_->wait(lock, is_over);
  const bool ended = changed_->wait_until(lock, deadline, is_over);
  lock.unlock();
  if (thread_) ended ? thread_->join() : thread_->leave();
  return ended;
}

void GpuGate::run() {
  std::vector<Waiting> waiting;
  std::unique_lock lock(mutex_);
  const auto woken = [&] { return stopped_ || !added_.empty(); };
  while (true) {
    if (waiting.empty()) {
      changed_->wait(lock, woken);
    } else {
      const Duration age = Clock::now() - waiting.back().since;  // in the order of wait()
      changed_->wait_for(lock, std::clamp(age / 8, kSoonest, kLatest), woken);
    }
    std::move(added_.begin(), added_.end(), std::back_inserter(waiting));
    added_.clear();
    const bool stopped = stopped_;
    lock.unlock();
    if (stopped) waiting.clear();  // the driver's calls, too
    std::erase_if(waiting, [this](const Waiting& entry) {
      std::string failure;
      try {
        if (!entry.event->happened()) {
          if (Clock::now() < entry.deadline) return false;
          failure = "the stream did not get there in time";
        }
      } catch (const Error& error) {
        failure = error.what();
      }
      if (!is_stopped()) entry.opened(failure);
      return true;
    });
    lock.lock();
    if (stopped) break;
  }
  running_ = false;
  changed_->notify_all();
}

bool GpuGate::is_stopped() {
  const std::lock_guard lock(mutex_);
  return stopped_;
}

}  // namespace kvxfer
