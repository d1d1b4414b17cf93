#ifndef KVXFER_TRACE_H_
#define KVXFER_TRACE_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "kvxfer/status.h"

namespace kvxfer {

// What an agent's flight recorder notes. Append, never renumber: traces name them.
enum class TraceKind : uint8_t {
  kOffer,    // producer: blocks are on offer
  kServe,    // producer: a fetch was accepted, and will be answered
  kPack,     // producer: a chunk was packed
  kWrite,    // producer: a transport has taken a chunk out of the staging memory
  kCommit,   // producer: a chunk was announced to its consumer
  kRefuse,   // producer: a fetch was refused
  kRelease,  // producer: an offer has ended
  kExpire,   // producer: the same, because its lease did
  kFetch,    // consumer: a fetch began
  kAccept,   // consumer: its producer has accepted it
  kVerify,   // consumer: a chunk was unpacked and its digest compared
  kPublish,  // consumer: a fetch has ended well, and its blocks may be used
  kFail,     // consumer: a fetch has ended, and they may not
};
constexpr size_t kNumTraceKinds = static_cast<size_t>(TraceKind::kFail) + 1;
const char* trace_kind_name(TraceKind kind);  // "offer", "pack", ...

constexpr uint32_t kNoChunk = UINT32_MAX;
constexpr size_t kTraceName = 22;

// One event. Plain memory, so that noting one allocates nothing.
struct TraceEvent {
  int64_t nanos = 0;           // steady, since the recorder began
  int64_t duration_nanos = 0;  // that it took until then; 0 where it took no time
  uint64_t request =
      0;  // follows from the generation, which it does not reveal: equal on both sides
  uint64_t bytes = 0;
  uint32_t peer = 0;  // PeerId; 0: none
  uint32_t chunk = kNoChunk;
  TraceKind kind = TraceKind::kOffer;
  StatusCode code = StatusCode::kOk;
  std::array<char, kTraceName> name{};  // of the offer, cut off; "" where the request says it
};

struct Trace {
  int64_t unix_nanos = 0;  // wall clock when the recorder began
  uint64_t dropped = 0;    // events that newer ones have taken the place of
  std::vector<TraceEvent> events;
};

// How often something took how long. Counts are not cumulative.
struct Histogram {
  static constexpr size_t kBounds = 22;
  static double bound(size_t bucket);  // seconds, upper: 10 us, 20 us, ... 21 s

  std::array<uint64_t, kBounds + 1> counts{};  // the last: longer than all bounds
  double sum = 0;                              // seconds

  void add(double seconds);
};

// Since the agent began.
struct AgentMetrics {
  std::array<uint64_t, kNumTraceKinds> counts{};
  std::map<StatusCode, uint64_t> fetch_ends, offer_ends, refusals;
  Histogram fetch_seconds, offer_seconds, pack_seconds, write_seconds, verify_seconds;
};

}  // namespace kvxfer

#endif  // KVXFER_TRACE_H_
