#ifndef KVXFER_ENGINE_RECORDER_H_
#define KVXFER_ENGINE_RECORDER_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string_view>

#include "base/clock.h"
#include "kvxfer/trace.h"

namespace kvxfer {

// Details of an event. `began` set: it took from then until now.
struct TraceNote {
  uint32_t peer = 0;
  uint32_t chunk = kNoChunk;
  uint64_t bytes = 0;
  TimePoint began{};
  StatusCode code = StatusCode::kOk;
  std::string_view name{};
};

// The last events of an agent, in a ring of fixed size, and counts of all of them. Thread-safe:
// its mutex is a leaf, under which nothing is called. Noting an event takes well under a
// microsecond, and no memory.
class Recorder {
 public:
  static constexpr uint32_t kCapacity = 8192;

  explicit Recorder(uint32_t capacity = kCapacity);

  void add(TraceKind kind, const std::array<std::byte, 16>& generation, const TraceNote& note = {});

  Trace trace() const;  // oldest first
  AgentMetrics metrics() const;

 private:
  void count(const TraceEvent& event);

  const uint32_t capacity_;
  const TimePoint began_;
  const int64_t unix_nanos_;
  mutable std::mutex mutex_;
  const std::unique_ptr<TraceEvent[]> ring_;
  uint64_t written_ = 0;
  AgentMetrics metrics_;
};

}  // namespace kvxfer

#endif  // KVXFER_ENGINE_RECORDER_H_
