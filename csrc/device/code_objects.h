#ifndef KVXFER_DEVICE_CODE_OBJECTS_H_
#define KVXFER_DEVICE_CODE_OBJECTS_H_

#include <span>
#include <string>

#include "device/gpu_runtime.h"

namespace kvxfer {

// Kernels that were compiled when the library was built.
struct CodeObject {
  std::string target;  // "gfx942", "sm_80 sm_90 sm_100"
  const void* data = nullptr;
};

// Those of a vendor; none where there was no compiler for them.
std::span<const CodeObject> code_objects(GpuVendor vendor);

}  // namespace kvxfer

#endif  // KVXFER_DEVICE_CODE_OBJECTS_H_
