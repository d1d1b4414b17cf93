#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <string>
#include <utility>
#include <vector>

#include "bytes.h"
#include "encoding.h"
#include "kvxfer/codec.h"
#include "kvxfer/status.h"
#include "register.h"

namespace py = pybind11;

namespace kvxfer::bindings {
namespace {

using StoredTuple = std::pair<std::string, float>;
using LossTuple = std::pair<uint64_t, uint64_t>;

Stored to_stored(const StoredTuple& stored) {
  return {element_from_name(stored.first), stored.second};
}

LossTuple to_tuple(const Loss& loss) { return {loss.clamped, loss.inexact}; }

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
  return to_tuple(decode_panel(to_encoding(encoding), {to_stored(from), wanted}, panel, count,
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
  return to_tuple(Conversion(given, wanted).convert(elements, count, converted));
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
  module.def("convert", &convert, py::arg("source"), py::arg("target"), py::arg("elements"),
             py::arg("converted"), py::arg("count"));
}

}  // namespace kvxfer::bindings
