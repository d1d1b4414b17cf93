#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "bytes.h"
#include "encoding.h"
#include "kvxfer/panel_plan.h"
#include "register.h"

namespace py = pybind11;

namespace kvxfer::bindings {
namespace {

using DigestTuple = std::pair<uint64_t, uint64_t>;

DigestTuple to_tuple(const Digest& digest) { return {digest.sum, digest.mix}; }

PanelFormat make_format(const std::vector<EncodingTuple>& encodings, uint32_t panel_tokens,
                        uint32_t raw_until, uint32_t raw_from, const std::string& producer_element,
                        std::vector<float> producer_scales, uint8_t codec) {
  PanelFormat format;
  for (const EncodingTuple& encoding : encodings) {
    format.encodings.push_back(to_encoding(encoding));
  }
  format.panel_tokens = panel_tokens;
  format.raw_until = raw_until;
  format.raw_from = raw_from;
  format.producer_element = element_from_name(producer_element);
  format.producer_scales = std::move(producer_scales);
  format.codec = codec;
  return format;
}

auto pack_into(const PanelPlan& plan, uint32_t begin, uint32_t end, const py::buffer& wire,
               uint64_t seed, bool with_digest, bool stream) {
  const Bytes bytes(wire, true);
  bytes.require(0, plan.most_bytes(begin, end));
  const py::gil_scoped_release unlocked;
  const CodedChunk chunk = pack_panels(plan, begin, end, bytes.data(), seed, with_digest, stream);
  return std::tuple(chunk.bytes, chunk.exceptions, to_tuple(chunk.digest));
}

auto unpack_from(const PanelPlan& plan, uint32_t begin, uint32_t end, const py::buffer& wire,
                 uint64_t seed, bool with_digest) {
  const Bytes bytes(wire, false);
  const py::gil_scoped_release unlocked;
  const DecodedChunk chunk =
      unpack_panels(plan, begin, end, bytes.data(), bytes.size(), seed, with_digest);
  return std::tuple(to_tuple(chunk.digest), std::pair(chunk.loss.clamped, chunk.loss.inexact),
                    chunk.exceptions);
}

}  // namespace

void register_panel(py::module_& module) {
  py::class_<PanelFormat>(module, "PanelFormat", "What two sides agree on about coded chunks.")
      .def(py::init(&make_format), py::kw_only(), py::arg("encodings"),
           py::arg("panel_tokens") = 64, py::arg("raw_until") = 0, py::arg("raw_from") = UINT32_MAX,
           py::arg("producer_element") = "bfloat16",
           py::arg("producer_scales") = std::vector<float>(), py::arg("codec") = 0);
  py::class_<PanelPlan>(module, "PanelPlan", "Maps panels of the wire to one side's memory.")
      .def(py::init([](const CacheLayout& layout, const BlockTable& table, const Slice& slice,
                       std::vector<uint32_t> plane_of, const PanelFormat& format) {
             return PanelPlan(layout, table, slice, std::move(plane_of), format);
           }),
           py::arg("layout"), py::arg("table"), py::arg("slice"), py::arg("plane_of"),
           py::arg("format"))
      .def("num_panels", &PanelPlan::num_panels)
      .def("panels_per_layer", &PanelPlan::panels_per_layer)
      .def("memory_bytes", &PanelPlan::memory_bytes, py::arg("begin"), py::arg("end"))
      .def("most_bytes", &PanelPlan::most_bytes, py::arg("begin"), py::arg("end"))
      .def(
          "zero_tail", [](const PanelPlan& plan) { zero_tail(plan); },
          py::call_guard<py::gil_scoped_release>());
  module.def("pack_panels", &pack_into, py::arg("plan"), py::arg("begin"), py::arg("end"),
             py::arg("wire"), py::arg("seed") = 0, py::arg("with_digest") = true,
             py::arg("stream") = false);
  module.def("unpack_panels", &unpack_from, py::arg("plan"), py::arg("begin"), py::arg("end"),
             py::arg("wire"), py::arg("seed") = 0, py::arg("with_digest") = true);
}

}  // namespace kvxfer::bindings
