#ifndef KVXFER_ENGINE_GPU_TRIALS_H_
#define KVXFER_ENGINE_GPU_TRIALS_H_

#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <tuple>

#include "base/clock.h"
#include "kvxfer/agent.h"
#include "kvxfer/transport.h"

namespace kvxfer {

// Ways to register a GPU's memory with adapters that were tried on scratch memory, with what is
// wrong with them, if anything. Thread-safe.
class GpuTrials {
 public:
  struct Key {
    GpuDirect way = GpuDirect::kOff;
    Link::DirectUse use = Link::DirectUse::kSource;
    std::string adapters;  // of the link
    auto operator<=>(const Key&) const = default;
  };

  // What is wrong; empty: nothing. None: it is to be tried, for the first time or again.
  std::optional<std::string> find(const Key& key) const;
  // Holds until then.
  void put(const Key& key, const std::string& problem, TimePoint until);
  // The device is stuck: nothing is tried any more, and this is wrong with all that would be.
  void end(const std::string& problem);

  // Whether to register memory, in the ways that are allowed, begins with a trial.
  bool ahead(GpuDirect allowed, const Link& link, Link::DirectUse use) const;

 private:
  struct Outcome {
    std::string problem;
    TimePoint until = kNever;
  };

  mutable std::mutex mutex_;
  std::map<Key, Outcome> known_;
  std::optional<std::string> stuck_;  // why nothing is tried
};

}  // namespace kvxfer

#endif  // KVXFER_ENGINE_GPU_TRIALS_H_
