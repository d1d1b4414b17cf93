#include "register.h"

PYBIND11_MODULE(_core, module) {
  module.doc() = "The compiled part of kvxfer. Use it through the package kvxfer.";
  kvxfer::bindings::register_build_info(module);
}
