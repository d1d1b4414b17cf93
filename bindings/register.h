#ifndef KVXFER_BINDINGS_REGISTER_H_
#define KVXFER_BINDINGS_REGISTER_H_

#include <pybind11/pybind11.h>

namespace kvxfer::bindings {

// Each adds its classes and functions to the module; defined in the file of the same name. Called
// once, in the order of module.cc, by the thread that imports kvxfer._core.
void register_build_info(pybind11::module_& module);
void register_status(pybind11::module_& module);
void register_layout(pybind11::module_& module);
void register_dlpack(pybind11::module_& module);
void register_pack(pybind11::module_& module);
void register_codec(pybind11::module_& module);
void register_panel(pybind11::module_& module);
void register_trace(pybind11::module_& module);
void register_agent(pybind11::module_& module);
void register_verbs(pybind11::module_& module);  // where the build has the verbs transport
void register_ucx(pybind11::module_& module);    // where the build has the ucx transport

}  // namespace kvxfer::bindings

#endif  // KVXFER_BINDINGS_REGISTER_H_
