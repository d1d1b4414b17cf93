#include "engine/recorder.h"

#include <algorithm>
#include <bit>
#include <chrono>
#include <cstring>

namespace kvxfer {
namespace {

// SipHash-2-4 of an empty message under the generation as key: it tells requests apart, and nothing
// of the generation follows from it.
uint64_t request_of(const std::array<std::byte, 16>& generation) {
  uint64_t key[2];
  std::memcpy(key, generation.data(), sizeof(key));
  uint64_t v0 = key[0] ^ 0x736F6D6570736575u;
  uint64_t v1 = key[1] ^ 0x646F72616E646F6Du;
  uint64_t v2 = key[0] ^ 0x6C7967656E657261u;
  uint64_t v3 = key[1] ^ 0x7465646279746573u;
  for (int round = 0; round < 6; ++round) {
    if (round == 2) v2 ^= 0xFF;
    v0 += v1;
    v2 += v3;
    v1 = std::rotl(v1, 13) ^ v0;
    v3 = std::rotl(v3, 16) ^ v2;
    v0 = std::rotl(v0, 32);
    v2 += v1;
    v0 += v3;
    v1 = std::rotl(v1, 17) ^ v2;
    v3 = std::rotl(v3, 21) ^ v0;
    v2 = std::rotl(v2, 32);
  }
  return v0 ^ v1 ^ v2 ^ v3;
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
