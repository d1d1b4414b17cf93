#include "device/gpu_runtime.h"

#include "device/gpu_library.h"

namespace kvxfer {

GpuSearch load_gpu_runtime(GpuVendor vendor) {
  return vendor == GpuVendor::kNvidia ? load_cuda() : load_hip();
}

const GpuSearch& gpu_runtime(GpuVendor vendor) {
  if (vendor == GpuVendor::kNvidia) {
    static const GpuSearch kCuda = load_cuda();
    return kCuda;
  }
  static const GpuSearch kHip = load_hip();
  return kHip;
}

}  // namespace kvxfer
