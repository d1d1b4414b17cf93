#include <pybind11/pybind11.h>

#include "register.h"

namespace py = pybind11;

namespace kvxfer::bindings {
namespace {

#if defined(__clang__)
constexpr const char* kCompiler = "clang " __clang_version__;
#else
constexpr const char* kCompiler = "g++ " __VERSION__;
#endif

py::dict back_end(const char* state, const char* reason) {
  py::dict entry;
  entry["state"] = state;
  entry["reason"] = reason;
  return entry;
}

// The KVXFER_* macros come from CMakeLists.txt.
py::dict build_info() {
  py::dict back_ends;
  back_ends["ucx"] = back_end(KVXFER_UCX_STATE, KVXFER_UCX_REASON);
  back_ends["verbs"] = back_end(KVXFER_VERBS_STATE, KVXFER_VERBS_REASON);
  back_ends["hip"] = back_end(KVXFER_HIP_STATE, KVXFER_HIP_REASON);
  back_ends["cuda"] = back_end(KVXFER_CUDA_STATE, KVXFER_CUDA_REASON);

  py::dict info;
  info["version"] = KVXFER_VERSION;
  info["compiler"] = kCompiler;
  info["build_type"] = KVXFER_BUILD_TYPE;
  info["sanitize"] = KVXFER_SANITIZE;
  info["back_ends"] = back_ends;
  return info;
}

}  // namespace

void register_build_info(py::module_& module) {
  module.attr("__version__") = KVXFER_VERSION;
  module.def(
      "build_info", &build_info,
      "How this extension was built: version, compiler, build type, sanitizers, and for each "
      "optional back end its state (\"on\", \"off\") and the reason.");
}

}  // namespace kvxfer::bindings
