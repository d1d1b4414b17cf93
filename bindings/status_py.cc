#include <pybind11/pybind11.h>

#include <string>

#include "kvxfer/status.h"
#include "register.h"

namespace py = pybind11;

namespace kvxfer::bindings {

// The exception classes are Python's, in kvxfer/errors.py; it picks the one for a status.
void register_status(py::module_&) {
  py::register_exception_translator([](std::exception_ptr pointer) {
    if (!pointer) return;
    try {
      std::rethrow_exception(pointer);
    } catch (const Error& error) {
      const std::string text = error.what();  // a peer's words in it may be no UTF-8
      const auto message = py::reinterpret_steal<py::str>(
          PyUnicode_DecodeUTF8(text.data(), static_cast<Py_ssize_t>(text.size()), "replace"));
      const py::object made = py::module_::import("kvxfer.errors")
                                  .attr("from_status")(status_name(error.code()), message);
      PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(made.ptr())), made.ptr());
    }
  });
}

}  // namespace kvxfer::bindings
