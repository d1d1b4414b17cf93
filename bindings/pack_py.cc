#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <string>
#include <utility>

#include "kvxfer/digest.h"
#include "kvxfer/pack.h"
#include "kvxfer/status.h"
#include "register.h"

namespace py = pybind11;

namespace kvxfer::bindings {
namespace {

using DigestTuple = std::pair<uint64_t, uint64_t>;

DigestTuple to_tuple(const Digest& digest) { return {digest.sum, digest.mix}; }

// A contiguous buffer's bytes, held as long as this lives.
class Bytes {
 public:
  Bytes(const py::buffer& object, bool writable) {
    const int flags = writable ? PyBUF_CONTIG : PyBUF_CONTIG_RO;
    if (PyObject_GetBuffer(object.ptr(), &view_, flags) != 0) throw py::error_already_set();
  }
  ~Bytes() { PyBuffer_Release(&view_); }
  Bytes(const Bytes&) = delete;
  Bytes& operator=(const Bytes&) = delete;

  std::byte* data() const { return static_cast<std::byte*>(view_.buf); }
  size_t size() const { return static_cast<size_t>(view_.len); }

  void require(uint64_t begin, uint64_t end) const {
    if (end >= begin && end - begin <= size()) return;
    throw Error(StatusCode::kInvalid, "wire bytes [" + std::to_string(begin) + ", " +
                                          std::to_string(end) + ") do not fit in a buffer of " +
                                          std::to_string(size()) + " bytes");
  }

 private:
  Py_buffer view_ = {};
};

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
