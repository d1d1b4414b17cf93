#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstring>
#include <map>

#include "register.h"
#include "trace_records.h"

namespace py = pybind11;

namespace kvxfer::bindings {
namespace {

using HistogramTuple = std::tuple<std::vector<double>, std::vector<uint64_t>, double>;

HistogramTuple to_tuple(const Histogram& histogram) {
  std::vector<double> bounds;
  for (size_t i = 0; i < Histogram::kBounds; ++i) bounds.push_back(Histogram::bound(i));
  return {bounds, {histogram.counts.begin(), histogram.counts.end()}, histogram.sum};
}

std::map<std::string, uint64_t> by_name(const std::map<StatusCode, uint64_t>& counts) {
  std::map<std::string, uint64_t> named;
  for (const auto& [code, count] : counts) named[status_name(code)] = count;
  return named;
}

// An offer's id is cut off somewhere, perhaps within a character: what is no text is left out.
std::string as_text(const std::array<char, kTraceName>& name) {
  const std::string raw(name.data(), strnlen(name.data(), name.size()));
  const auto decoded = py::reinterpret_steal<py::object>(
      PyUnicode_DecodeUTF8(raw.data(), static_cast<Py_ssize_t>(raw.size()), "ignore"));
  if (!decoded) throw py::error_already_set();
  return decoded.cast<std::string>();
}

}  // namespace

TraceTuple trace_of(const Agent& agent) {
  Trace trace;
  {
    const py::gil_scoped_release release;
    trace = agent.trace();
  }
  std::vector<TraceRecord> records;
  records.reserve(trace.events.size());
  for (const TraceEvent& event : trace.events) {
    records.emplace_back(event.nanos, event.duration_nanos, trace_kind_name(event.kind),
                         event.request, as_text(event.name), event.peer, event.chunk, event.bytes,
                         status_name(event.code));
  }
  return {trace.unix_nanos, trace.dropped, std::move(records)};
}

void register_trace(py::module_& module) {
  py::class_<AgentMetrics>(module, "AgentMetrics")
      .def_property_readonly("counts",
                             [](const AgentMetrics& metrics) {
                               std::map<std::string, uint64_t> counts;
                               for (size_t i = 0; i < kNumTraceKinds; ++i)
                                 counts[trace_kind_name(static_cast<TraceKind>(i))] =
                                     metrics.counts[i];
                               return counts;
                             })
      .def_property_readonly("fetch_ends",
                             [](const AgentMetrics& m) { return by_name(m.fetch_ends); })
      .def_property_readonly("offer_ends",
                             [](const AgentMetrics& m) { return by_name(m.offer_ends); })
      .def_property_readonly("refusals", [](const AgentMetrics& m) { return by_name(m.refusals); })
      .def_property_readonly("fetch_seconds",
                             [](const AgentMetrics& m) { return to_tuple(m.fetch_seconds); })
      .def_property_readonly("offer_seconds",
                             [](const AgentMetrics& m) { return to_tuple(m.offer_seconds); })
      .def_property_readonly("pack_seconds",
                             [](const AgentMetrics& m) { return to_tuple(m.pack_seconds); })
      .def_property_readonly("write_seconds",
                             [](const AgentMetrics& m) { return to_tuple(m.write_seconds); })
      .def_property_readonly("verify_seconds",
                             [](const AgentMetrics& m) { return to_tuple(m.verify_seconds); });
}

}  // namespace kvxfer::bindings
