#ifndef KVXFER_DEVICE_CODE_OBJECTS_H_
#define KVXFER_DEVICE_CODE_OBJECTS_H_

#include <memory>
#include <string>
#include <vector>

#include "device/gpu_runtime.h"

namespace kvxfer {

// The kernels, compiled for some devices.
struct CodeObject {
  std::string target;  // "gfx942", "sm_90"
  const void* data = nullptr;
  std::shared_ptr<const void> owner;  // of the data, where that is not in the library
};

// Those of a vendor that were compiled when the library was built: none where there was no compiler
// for them. Or what the file holds that KVXFER_GPU_CODE names in the environment, for devices that
// the build does not know. Throws Error(kInvalid) for one that cannot be read.
std::vector<CodeObject> code_objects(GpuVendor vendor);

// The former, without the latter. Defined in a file that CMake writes.
std::vector<CodeObject> built_code_objects(GpuVendor vendor);

}  // namespace kvxfer

#endif  // KVXFER_DEVICE_CODE_OBJECTS_H_
