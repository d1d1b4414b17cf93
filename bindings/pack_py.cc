#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <string>
#include <utility>

#include "bytes.h"
#include "kvxfer/digest.h"
#include "kvxfer/pack.h"
#include "kvxfer/status.h"
#include "register.h"

namespace py = pybind11;

namespace kvxfer::bindings {
namespace {

using DigestTuple = std::pair<uint64_t, uint64_t>;

DigestTuple to_tuple(const Digest& digest) { return {digest.sum, digest.mix}; }

DigestTuple pack_into(const CopyPlan& plan, uint64_t begin, uint64_t end, const py::buffer& wire,
                      uint64_t seed, bool with_digest, bool stream) {
  const Bytes bytes(wire, true);
  bytes.require(begin, end);
  const py::gil_scoped_release unlocked;
  return to_tuple(pack(plan, begin, end, bytes.data(), seed, with_digest, stream));
}

DigestTuple unpack_from(const CopyPlan& plan, uint64_t begin, uint64_t end, const py::buffer& wire,
                        uint64_t seed, bool with_digest) {
  const Bytes bytes(wire, false);
  bytes.require(begin, end);
  const py::gil_scoped_release unlocked;
  return to_tuple(unpack(plan, begin, end, bytes.data(), seed, with_digest));
}

DigestTuple digest_of(const py::buffer& data, uint64_t seed) {
  const Bytes bytes(data, false);
  const py::gil_scoped_release unlocked;
  return to_tuple(digest({bytes.data(), bytes.size()}, seed));
}

}  // namespace

void register_pack(py::module_& module) {
  module.def("pack", &pack_into, py::arg("plan"), py::arg("begin"), py::arg("end"), py::arg("wire"),
             py::arg("seed") = 0, py::arg("with_digest") = true, py::arg("stream") = false);
  module.def("unpack", &unpack_from, py::arg("plan"), py::arg("begin"), py::arg("end"),
             py::arg("wire"), py::arg("seed") = 0, py::arg("with_digest") = true);
  module.def("zero_tail", &zero_tail, py::arg("plan"), py::call_guard<py::gil_scoped_release>());
  module.def("digest", &digest_of, py::arg("data"), py::arg("seed") = 0);
  module.def("simd_variants", &simd_variants);
  module.def("simd_variant", &simd_variant);
  module.def("set_simd_variant", &set_simd_variant, py::arg("name"));
}

}  // namespace kvxfer::bindings
