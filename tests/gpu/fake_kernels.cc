#include <map>

#include "gpu/fake_gpu.h"
#include "pack/gpu_kernels.h"

namespace kvxfer::fake {
namespace {

using gpu::PanelLaunch;
using gpu::RawChunk;
using Run = std::function<void(uint32_t, uint32_t)>;

gpu::Fibers& fibers() {
  static gpu::Fibers fibers(gpu::kThreads, gpu::kWave);  // for the one thread that works
  return fibers;
}

template <void (*kKernel)(const RawChunk*, uint64_t*, uint32_t)>
Run raw(void** arguments) {
  const auto* chunks = *static_cast<const RawChunk**>(arguments[0]);
  auto* digests = *static_cast<uint64_t**>(arguments[1]);
  const uint32_t units = *static_cast<uint32_t*>(arguments[2]);
  return [=](uint32_t x, uint32_t y) {
    fibers().launch(x, y, [&] { kKernel(chunks, digests, units); });
  };
}

template <void (*kKernel)(PanelLaunch)>
Run panels(void** arguments) {
  const auto launch = *static_cast<const PanelLaunch*>(arguments[0]);
  return [=](uint32_t x, uint32_t y) { fibers().launch(x, y, [&] { kKernel(launch); }); };
}

}  // namespace

Kernel find_kernel(const std::string& name) {
#define KVXFER_RAW(what) {#what, raw<what>}, {#what "_no_digest", raw<what##_no_digest>}
#define KVXFER_DIGEST(what) {#what, raw<what>}
#define KVXFER_PANELS(what) {#what, panels<what>}
#define KVXFER_PAIR(what) KVXFER_PANELS(kvxfer_pack_##what), KVXFER_PANELS(kvxfer_unpack_##what)
#define KVXFER_FAST(what) \
  KVXFER_PAIR(what##_64), KVXFER_PAIR(what##_128), KVXFER_PAIR(what##_256), KVXFER_PAIR(what##_576)
  static const std::map<std::string, Kernel> kKernels = {KVXFER_RAW(kvxfer_pack_raw16),
                                                         KVXFER_RAW(kvxfer_unpack_raw16),
                                                         KVXFER_RAW(kvxfer_pack_raw4),
                                                         KVXFER_RAW(kvxfer_unpack_raw4),
                                                         KVXFER_RAW(kvxfer_pack_raw1),
                                                         KVXFER_RAW(kvxfer_unpack_raw1),
                                                         KVXFER_DIGEST(kvxfer_digest_raw16),
                                                         KVXFER_DIGEST(kvxfer_digest_raw4),
                                                         KVXFER_DIGEST(kvxfer_digest_raw1),
                                                         KVXFER_PAIR(panels),
                                                         KVXFER_PANELS(kvxfer_finish_chunks),
                                                         KVXFER_PANELS(kvxfer_check_chunks),
                                                         KVXFER_PANELS(kvxfer_put_raw_rows),
                                                         KVXFER_FAST(e4m3_bfloat16),
                                                         KVXFER_FAST(e4m3_float16),
                                                         KVXFER_FAST(e5m2_bfloat16),
                                                         KVXFER_FAST(e5m2_float16),
                                                         KVXFER_FAST(int8_bfloat16),
                                                         KVXFER_FAST(int8_float16)};
#undef KVXFER_FAST
#undef KVXFER_PAIR
#undef KVXFER_PANELS
#undef KVXFER_DIGEST
#undef KVXFER_RAW
  const auto found = kKernels.find(name);
  return found == kKernels.end() ? nullptr : found->second;
}

}  // namespace kvxfer::fake
