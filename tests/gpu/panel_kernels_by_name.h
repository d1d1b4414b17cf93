#ifndef KVXFER_TESTS_GPU_PANEL_KERNELS_BY_NAME_H_
#define KVXFER_TESTS_GPU_PANEL_KERNELS_BY_NAME_H_

#include <map>
#include <string>

#include "pack/gpu_kernels.h"

namespace kvxfer::gpu {

using PanelKernel = void (*)(PanelLaunch);

inline PanelKernel panel_kernel(const std::string& name) {
#define KVXFER_NAMED(name) {#name, name}
#define KVXFER_NAMED_PAIR(what) KVXFER_NAMED(kvxfer_pack_##what), KVXFER_NAMED(kvxfer_unpack_##what)
#define KVXFER_FAST_NAMED(what)                                                               \
  KVXFER_NAMED_PAIR(what##_64), KVXFER_NAMED_PAIR(what##_128), KVXFER_NAMED_PAIR(what##_256), \
      KVXFER_NAMED_PAIR(what##_576)
  static const std::map<std::string, PanelKernel> kKernels = {
      KVXFER_NAMED(kvxfer_pack_panels), KVXFER_NAMED(kvxfer_unpack_panels),
      KVXFER_FAST_NAMED(e4m3_bfloat16), KVXFER_FAST_NAMED(e4m3_float16),
      KVXFER_FAST_NAMED(e5m2_bfloat16), KVXFER_FAST_NAMED(e5m2_float16),
      KVXFER_FAST_NAMED(int8_bfloat16), KVXFER_FAST_NAMED(int8_float16)};
#undef KVXFER_FAST_NAMED
#undef KVXFER_NAMED_PAIR
#undef KVXFER_NAMED
  return kKernels.at(name);
}

}  // namespace kvxfer::gpu

#endif  // KVXFER_TESTS_GPU_PANEL_KERNELS_BY_NAME_H_
