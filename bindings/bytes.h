#ifndef KVXFER_BINDINGS_BYTES_H_
#define KVXFER_BINDINGS_BYTES_H_

#include <pybind11/pybind11.h>

#include <cstddef>
#include <cstdint>
#include <string>

#include "kvxfer/status.h"

namespace kvxfer::bindings {

// A contiguous buffer's bytes, held as long as this lives.
class Bytes {
 public:
  Bytes(const pybind11::buffer& object, bool writable) {
    const int flags = writable ? PyBUF_CONTIG : PyBUF_CONTIG_RO;
    if (PyObject_GetBuffer(object.ptr(), &view_, flags) != 0) throw pybind11::error_already_set();
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

  // Throws unless `bytes` of them from `offset` on are there.
  std::byte* at(uint64_t offset, uint64_t bytes) const {
    if (bytes <= size() && offset <= size() - bytes) return data() + offset;
    throw Error(StatusCode::kInvalid, std::to_string(bytes) + " bytes at offset " +
                                          std::to_string(offset) + " do not lie in a buffer of " +
                                          std::to_string(size()) + " bytes");
  }

 private:
  Py_buffer view_ = {};
};

}  // namespace kvxfer::bindings

#endif  // KVXFER_BINDINGS_BYTES_H_
