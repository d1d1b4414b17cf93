#include "engine/gpu_trials.h"

namespace kvxfer {

std::optional<std::string> GpuTrials::find(const Key& key) const {
  const std::lock_guard lock(mutex_);
  const auto known = known_.find(key);
  if (known == known_.end() || Clock::now() >= known->second.until) return stuck_;
  return known->second.problem;
}

void GpuTrials::put(const Key& key, const std::string& problem, TimePoint until) {
  const std::lock_guard lock(mutex_);
  known_[key] = {problem, until};
}

void GpuTrials::end(const std::string& problem) {
  const std::lock_guard lock(mutex_);
  stuck_ = problem;
}

bool GpuTrials::ahead(GpuDirect allowed, const Link& link, Link::DirectUse use) const {
  for (const GpuDirect way : {GpuDirect::kDmaBuf, GpuDirect::kPeerMemory}) {
    if (allowed != GpuDirect::kAuto && allowed != way) continue;
    const auto problem = find({way, use, link.adapters()});
    if (!problem) return true;
    if (problem->empty()) return false;
  }
  return false;
}

}  // namespace kvxfer
