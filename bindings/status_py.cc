#include <pybind11/pybind11.h>

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
      const py::object made = py::module_::import("kvxfer.errors")
                                  .attr("from_status")(status_name(error.code()), error.what());
      PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(made.ptr())), made.ptr());
    }
  });
}

}  // namespace kvxfer::bindings
