#include "register.h"

PYBIND11_MODULE(_core, module) {
  module.doc() = "The compiled part of kvxfer. Use it through the package kvxfer.";
  kvxfer::bindings::register_build_info(module);
  kvxfer::bindings::register_status(module);
  kvxfer::bindings::register_layout(module);
  kvxfer::bindings::register_dlpack(module);
  kvxfer::bindings::register_pack(module);
  kvxfer::bindings::register_codec(module);
  kvxfer::bindings::register_panel(module);
  kvxfer::bindings::register_trace(module);
  kvxfer::bindings::register_agent(module);
#ifdef KVXFER_HAVE_VERBS
  kvxfer::bindings::register_verbs(module);
#endif
#ifdef KVXFER_HAVE_UCX
  kvxfer::bindings::register_ucx(module);
#endif
}
