#include "engine/recorder.h"

#include <algorithm>
#include <chrono>
#include <cstring>

namespace kvxfer {
namespace {

// Halves of a generation, mixed: 64 bits that tell requests apart, but not what to ask for.
uint64_t request_of(const std::array<std::byte, 16>& generation) {
  uint64_t halves[2];
  std::memcpy(halves, generation.data(), sizeof(halves));
  return (halves[0] ^ (halves[1] << 29 | halves[1] >> 35)) * 0x9E3779B97F4A7C15u;
}

int64_t nanos(Duration duration) {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(duration).count();
}

Histogram* histogram_of(AgentMetrics& metrics, TraceKind kind) {
  switch (kind) {
    case TraceKind::kPack: return &metrics.pack_seconds;
    case TraceKind::kWrite: return &metrics.write_seconds;
    case TraceKind::kVerify: return &metrics.verify_seconds;
    case TraceKind::kRelease:
    case TraceKind::kExpire: return &metrics.offer_seconds;
    case TraceKind::kPublish:
    case TraceKind::kFail: return &metrics.fetch_seconds;
    default: return nullptr;
  }
}

}  // namespace

const char* trace_kind_name(TraceKind kind) {
  constexpr std::array<const char*, kNumTraceKinds> kNames = {
      "offer",  "serve", "pack",   "write",  "commit",  "refuse", "release",
      "expire", "fetch", "accept", "verify", "publish", "fail"};
  return kNames[static_cast<size_t>(kind)];
}

double Histogram::bound(size_t bucket) { return 1e-5 * static_cast<double>(uint64_t{1} << bucket); }

void Histogram::add(double seconds) {
  size_t bucket = 0;
  while (bucket < kBounds && seconds > bound(bucket)) ++bucket;
  ++counts[bucket];
  sum += seconds;
}

Recorder::Recorder(uint32_t capacity)
    : capacity_(capacity),
      began_(Clock::now()),
      unix_nanos_(std::chrono::duration_cast<std::chrono::nanoseconds>(
                      std::chrono::system_clock::now().time_since_epoch())
                      .count()),
      ring_(std::make_unique<TraceEvent[]>(capacity)) {}

void Recorder::add(TraceKind kind, const std::array<std::byte, 16>& generation,
                   const TraceNote& note) {
  const TimePoint now = Clock::now();
  TraceEvent event;
  event.nanos = nanos(now - began_);
  if (note.began != TimePoint{})
    event.duration_nanos = std::max<int64_t>(nanos(now - note.began), 1);
  event.request = request_of(generation);
  event.bytes = note.bytes;
  event.peer = note.peer;
  event.chunk = note.chunk;
  event.kind = kind;
  event.code = note.code;
  note.name.copy(event.name.data(), event.name.size());
  const std::lock_guard lock(mutex_);
  ring_[written_++ % capacity_] = event;
  count(event);
}

void Recorder::count(const TraceEvent& event) {
  ++metrics_.counts[static_cast<size_t>(event.kind)];
  if (event.kind == TraceKind::kPublish || event.kind == TraceKind::kFail) {
    ++metrics_.fetch_ends[event.code];
  } else if (event.kind == TraceKind::kRelease || event.kind == TraceKind::kExpire) {
    ++metrics_.offer_ends[event.code];
  } else if (event.kind == TraceKind::kRefuse) {
    ++metrics_.refusals[event.code];
  }
  Histogram* const histogram = histogram_of(metrics_, event.kind);
  if (histogram != nullptr && event.duration_nanos > 0) {
    histogram->add(static_cast<double>(event.duration_nanos) * 1e-9);
  }
}

Trace Recorder::trace() const {
  Trace trace;
  trace.unix_nanos = unix_nanos_;
  const std::lock_guard lock(mutex_);
  const uint64_t kept = std::min<uint64_t>(written_, capacity_);
  trace.dropped = written_ - kept;
  trace.events.reserve(kept);
  for (uint64_t i = trace.dropped; i < written_; ++i) trace.events.push_back(ring_[i % capacity_]);
  return trace;
}

AgentMetrics Recorder::metrics() const {
  const std::lock_guard lock(mutex_);
  return metrics_;
}

}  // namespace kvxfer
