#ifndef KVXFER_DEVICE_GPU_LIBRARY_H_
#define KVXFER_DEVICE_GPU_LIBRARY_H_

#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

#include "base/shared_library.h"
#include "device/gpu_runtime.h"
#include "kvxfer/status.h"

namespace kvxfer {

// The functions of one library, looked up by name; the first that is missing is remembered.
class GpuFunctions {
 public:
  explicit GpuFunctions(const SharedLibrary& library) : library_(library) {}

  template <typename Function>
  void operator()(Function*& function, const char* name) {
    if (!library_.find(function, name) && missing_.empty()) missing_ = name;
  }
  const std::string& missing() const { return missing_; }

 private:
  const SharedLibrary& library_;
  std::string missing_;
};

// What to load: the library that `variable` names in the environment, or these.
inline std::vector<std::string> gpu_library_names(const char* variable,
                                                  std::vector<std::string> names) {
  const char* named = std::getenv(variable);
  if (named != nullptr && *named != '\0') return {named};
  return names;
}

// Throws what a call of the runtime said. `name` may be null.
[[noreturn]] inline void throw_gpu_error(const std::string& call, int code, const char* name,
                                         const char* text) {
  throw Error(StatusCode::kNoResources,
              call + " failed: " + (name != nullptr ? name : "error " + std::to_string(code)) +
                  (text != nullptr ? std::string(" (") + text + ")" : ""));
}

GpuSearch load_cuda();
GpuSearch load_hip();

}  // namespace kvxfer

#endif  // KVXFER_DEVICE_GPU_LIBRARY_H_
