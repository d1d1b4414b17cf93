#ifndef KVXFER_BINDINGS_TRACE_RECORDS_H_
#define KVXFER_BINDINGS_TRACE_RECORDS_H_

#include <cstdint>
#include <string>
#include <tuple>
#include <vector>

#include "kvxfer/agent.h"

namespace kvxfer::bindings {

// As kvxfer/telemetry.py takes an event: nanos, duration, kind, request, offer, peer, chunk, bytes,
// status.
using TraceRecord = std::tuple<int64_t, int64_t, std::string, uint64_t, std::string, uint32_t,
                               uint32_t, uint64_t, std::string>;
// Wall clock of the beginning in nanoseconds, events that are gone, events.
using TraceTuple = std::tuple<int64_t, uint64_t, std::vector<TraceRecord>>;

TraceTuple trace_of(const Agent& agent);

}  // namespace kvxfer::bindings

#endif  // KVXFER_BINDINGS_TRACE_RECORDS_H_
