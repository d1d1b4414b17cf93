#ifndef KVXFER_PACK_GPU_KERNELS_H_
#define KVXFER_PACK_GPU_KERNELS_H_

// The entry points, by the names that the host loads them under. Included by gpu_kernels.cu and
// gpu_kernels.hip, and by the tests that run them as fibers.

#include "pack/gpu_raw_kernels.h"

// Grid: (ranges of the longest chunk, chunks). kvxfer_pack_raw16 has 16-byte accesses.
#define KVXFER_RAW_KERNELS(width)                                                                \
  extern "C" KVXFER_KERNEL(KVXFER_GPU_THREADS) kvxfer_pack_raw##width(                           \
      const kvxfer::gpu::RawChunk* chunks, uint64_t* digests, uint32_t units) {                  \
    kvxfer::gpu::move_raw<width, true, true>(chunks, digests, units);                            \
  }                                                                                              \
  extern "C" KVXFER_KERNEL(KVXFER_GPU_THREADS) kvxfer_unpack_raw##width(                         \
      const kvxfer::gpu::RawChunk* chunks, uint64_t* digests, uint32_t units) {                  \
    kvxfer::gpu::move_raw<width, false, true>(chunks, digests, units);                           \
  }                                                                                              \
  extern "C" KVXFER_KERNEL(KVXFER_GPU_THREADS) kvxfer_pack_raw##width##_no_digest(               \
      const kvxfer::gpu::RawChunk* chunks, uint64_t* digests, uint32_t units) {                  \
    kvxfer::gpu::move_raw<width, true, false>(chunks, digests, units);                           \
  }                                                                                              \
  extern "C" KVXFER_KERNEL(KVXFER_GPU_THREADS) kvxfer_unpack_raw##width##_no_digest(             \
      const kvxfer::gpu::RawChunk* chunks, uint64_t* digests, uint32_t units) {                  \
    kvxfer::gpu::move_raw<width, false, false>(chunks, digests, units);                          \
  }

KVXFER_RAW_KERNELS(16)
KVXFER_RAW_KERNELS(4)
KVXFER_RAW_KERNELS(1)

#undef KVXFER_RAW_KERNELS

#endif  // KVXFER_PACK_GPU_KERNELS_H_
