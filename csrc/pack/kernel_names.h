#ifndef KVXFER_PACK_KERNEL_NAMES_H_
#define KVXFER_PACK_KERNEL_NAMES_H_

#include <string>
#include <vector>

namespace kvxfer {

// All that gpu_kernels.h defines.
std::vector<std::string> gpu_kernel_names();

}  // namespace kvxfer

#endif  // KVXFER_PACK_KERNEL_NAMES_H_
