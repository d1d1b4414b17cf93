#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "kvxfer/codec.h"
#include "kvxfer/status.h"
#include "register.h"

namespace py = pybind11;

namespace kvxfer::bindings {
namespace {

using EncodingTuple = std::tuple<std::string, std::string, uint16_t>;
using StoredTuple = std::pair<std::string, float>;
using LossTuple = std::pair<uint64_t, uint64_t>;

template <class Enum>
Enum from_name(const std::string& name, uint32_t count, const char* (*name_of)(Enum)) {
  std::string known;
  for (uint32_t i = 0; i < count; ++i) {
    const auto value = static_cast<Enum>(i);
    if (name == name_of(value)) return value;
    known += (i == 0 ? "" : ", ") + std::string(name_of(value));
  }
  throw Error(StatusCode::kInvalid, "\"" + name + "\" is not one of " + known);
}

Encoding to_encoding(const EncodingTuple& encoding) {
  const auto& [scheme, scale, group] = encoding;
  return {from_name(scheme, kNumSchemes, &scheme_name), from_name(scale, 3, &scale_format_name),
          group};
}

Stored to_stored(const StoredTuple& stored) {
  return {element_from_name(stored.first), stored.second};
}

LossTuple to_tuple(const Loss& loss) { return {loss.clamped, loss.inexact}; }

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

  // Throws unless `bytes` of them from `offset` on are there.
  std::byte* at(uint64_t offset, uint64_t bytes) const {
    const auto size = static_cast<uint64_t>(view_.len);
    if (bytes <= size && offset <= size - bytes) return static_cast<std::byte*>(view_.buf) + offset;
    throw Error(StatusCode::kInvalid, std::to_string(bytes) + " bytes at offset " +
                                          std::to_string(offset) + " do not lie in a buffer of " +
                                          std::to_string(size) + " bytes");
  }

 private:
  Py_buffer view_ = {};
};

std::vector<std::byte*> rows_at(const Bytes& memory, const std::vector<uint64_t>& offsets,
                                uint64_t bytes) {
  std::vector<std::byte*> rows;
  for (const uint64_t offset : offsets) rows.push_back(memory.at(offset, bytes));
  return rows;
}

uint64_t bytes_of_panel(const EncodingTuple& encoding, const std::string& element, uint32_t rows,
                        uint32_t content) {
  const Encoding checked = to_encoding(encoding);
  const ElementType type = element_from_name(element);
  check_encoding(checked, type);
  return panel_bytes(checked, type, rows, content);
}

std::pair<py::bytes, std::vector<uint32_t>> encode(const EncodingTuple& encoding,
                                                   const std::string& element,
                                                   const py::buffer& memory,
                                                   const std::vector<uint64_t>& offsets,
                                                   uint32_t content) {
  const Bytes bytes(memory, false);
  const ElementType type = element_from_name(element);
  const auto rows = rows_at(bytes, offsets, content * element_bytes(type));
  const auto count = static_cast<uint32_t>(rows.size());
  std::string coded(bytes_of_panel(encoding, element, count, content), '\0');
  RowMask mask;
  {
    const py::gil_scoped_release unlocked;
    mask = encode_panel(to_encoding(encoding), type, rows.data(), count, content,
                        reinterpret_cast<std::byte*>(coded.data()));
  }
  std::vector<uint32_t> marked;
  for (uint32_t r = 0; r < count; ++r) {
    if (mask[r]) marked.push_back(r);
  }
  return {py::bytes(coded), marked};
}

LossTuple decode(const EncodingTuple& encoding, const StoredTuple& from, const StoredTuple& to,
                 const py::buffer& coded, const py::buffer& memory,
                 const std::vector<uint64_t>& offsets, uint32_t content,
                 const std::vector<uint32_t>& left_out) {
  const Bytes source(coded, false);
  const Bytes target(memory, true);
  const Stored wanted = to_stored(to);
  const auto rows = rows_at(target, offsets, content * element_bytes(wanted.element));
  const auto count = static_cast<uint32_t>(rows.size());
  const std::byte* panel = source.at(0, bytes_of_panel(encoding, from.first, count, content));
  RowMask mask;
  for (const uint32_t row : left_out) {
    if (row >= kMaxPanelRows || row >= count) {
      throw Error(StatusCode::kInvalid, "row " + std::to_string(row) +
                                            " is left out of a panel of " + std::to_string(count) +
                                            " rows");
    }
    mask.set(row);
  }
  const py::gil_scoped_release unlocked;
  return to_tuple(decode_panel(to_encoding(encoding), to_stored(from), wanted, panel, count,
                               content, rows.data(), mask));
}

LossTuple convert(const StoredTuple& from, const StoredTuple& to, const py::buffer& source,
                  const py::buffer& target, uint32_t count) {
  const Bytes read(source, false);
  const Bytes written(target, true);
  const Stored given = to_stored(from);
  const Stored wanted = to_stored(to);
  const std::byte* elements = read.at(0, count * element_bytes(given.element));
  std::byte* converted = written.at(0, count * element_bytes(wanted.element));
  const py::gil_scoped_release unlocked;
  return to_tuple(convert_row(given, wanted, elements, count, converted));
}

}  // namespace

void register_codec(py::module_& module) {
  module.def("panel_bytes", &bytes_of_panel, py::arg("encoding"), py::arg("element"),
             py::arg("rows"), py::arg("content"));
  module.def("encode_panel", &encode, py::arg("encoding"), py::arg("element"), py::arg("memory"),
             py::arg("offsets"), py::arg("content"));
  module.def("decode_panel", &decode, py::arg("encoding"), py::arg("source"), py::arg("target"),
             py::arg("coded"), py::arg("memory"), py::arg("offsets"), py::arg("content"),
             py::arg("left_out") = std::vector<uint32_t>());
  module.def(
      "can_convert",
      [](const StoredTuple& source, const StoredTuple& target) {
        return can_convert(to_stored(source), to_stored(target));
      },
      py::arg("source"), py::arg("target"));
  module.def("convert_row", &convert, py::arg("source"), py::arg("target"), py::arg("elements"),
             py::arg("converted"), py::arg("count"));
}

}  // namespace kvxfer::bindings
