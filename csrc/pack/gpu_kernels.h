#ifndef KVXFER_PACK_GPU_KERNELS_H_
#define KVXFER_PACK_GPU_KERNELS_H_

// The entry points, by the names that the host loads them under. Included by gpu_kernels.cu and
// gpu_kernels.hip, and by the tests that run them as fibers.

#include "pack/gpu_chunk_ends.h"
#include "pack/gpu_panel_any.h"
#include "pack/gpu_panel_fast.h"
#include "pack/gpu_raw_kernels.h"

// Grid: (ranges of the longest chunk, chunks). kvxfer_pack_raw16 has 16-byte accesses.
#define KVXFER_RAW_KERNELS(width)                                                    \
  extern "C" KVXFER_KERNEL(KVXFER_GPU_THREADS) kvxfer_pack_raw##width(               \
      const kvxfer::gpu::RawChunk* chunks, uint64_t* digests, uint32_t units) {      \
    kvxfer::gpu::move_raw<width, true, true>(chunks, digests, units);                \
  }                                                                                  \
  extern "C" KVXFER_KERNEL(KVXFER_GPU_THREADS) kvxfer_unpack_raw##width(             \
      const kvxfer::gpu::RawChunk* chunks, uint64_t* digests, uint32_t units) {      \
    kvxfer::gpu::move_raw<width, false, true>(chunks, digests, units);               \
  }                                                                                  \
  extern "C" KVXFER_KERNEL(KVXFER_GPU_THREADS) kvxfer_pack_raw##width##_no_digest(   \
      const kvxfer::gpu::RawChunk* chunks, uint64_t* digests, uint32_t units) {      \
    kvxfer::gpu::move_raw<width, true, false>(chunks, digests, units);               \
  }                                                                                  \
  extern "C" KVXFER_KERNEL(KVXFER_GPU_THREADS) kvxfer_unpack_raw##width##_no_digest( \
      const kvxfer::gpu::RawChunk* chunks, uint64_t* digests, uint32_t units) {      \
    kvxfer::gpu::move_raw<width, false, false>(chunks, digests, units);              \
  }                                                                                  \
  extern "C" KVXFER_KERNEL(KVXFER_GPU_THREADS) kvxfer_digest_raw##width(             \
      const kvxfer::gpu::RawChunk* chunks, uint64_t* digests, uint32_t units) {      \
    kvxfer::gpu::move_raw<width, true, true, false>(chunks, digests, units);         \
  }

KVXFER_RAW_KERNELS(16)
KVXFER_RAW_KERNELS(4)
KVXFER_RAW_KERNELS(1)

#undef KVXFER_RAW_KERNELS

#define KVXFER_PANEL_KERNEL(name, ...)                                                       \
  extern "C" KVXFER_KERNEL(KVXFER_GPU_THREADS) name(const kvxfer::gpu::PanelLaunch launch) { \
    kvxfer::gpu::__VA_ARGS__(launch);                                                        \
  }

// Grid: (panels / per_group, 1), or (chunks, 1) for the ends.
KVXFER_PANEL_KERNEL(kvxfer_pack_panels, pack_any)
KVXFER_PANEL_KERNEL(kvxfer_unpack_panels, unpack_any)
KVXFER_PANEL_KERNEL(kvxfer_finish_chunks, finish_chunk)
KVXFER_PANEL_KERNEL(kvxfer_check_chunks, check_chunk)
KVXFER_PANEL_KERNEL(kvxfer_put_raw_rows, put_raw_rows)

// kvxfer_pack_e4m3_bfloat16_128: rows of 128 elements.
#define KVXFER_FAST_KERNELS(scheme, scheme_number, element, element_number)    \
  KVXFER_FAST_PAIR(scheme##_##element##_64, scheme_number, element_number, 1)  \
  KVXFER_FAST_PAIR(scheme##_##element##_128, scheme_number, element_number, 2) \
  KVXFER_FAST_PAIR(scheme##_##element##_256, scheme_number, element_number, 4) \
  KVXFER_FAST_PAIR(scheme##_##element##_576, scheme_number, element_number, 9)
#define KVXFER_FAST_PAIR(name, scheme, element, n)                                                 \
  KVXFER_PANEL_KERNEL(kvxfer_pack_##name, pack_rows<kvxfer::gpu::scheme, kvxfer::gpu::element, n>) \
  KVXFER_PANEL_KERNEL(kvxfer_unpack_##name,                                                        \
                      unpack_rows<kvxfer::gpu::scheme, kvxfer::gpu::element, n>)

KVXFER_FAST_KERNELS(e4m3, kE4M3, bfloat16, kBFloat16)
KVXFER_FAST_KERNELS(e4m3, kE4M3, float16, kFloat16)
KVXFER_FAST_KERNELS(e5m2, kE5M2, bfloat16, kBFloat16)
KVXFER_FAST_KERNELS(e5m2, kE5M2, float16, kFloat16)
KVXFER_FAST_KERNELS(int8, kInt8, bfloat16, kBFloat16)
KVXFER_FAST_KERNELS(int8, kInt8, float16, kFloat16)

#undef KVXFER_FAST_PAIR
#undef KVXFER_FAST_KERNELS
#undef KVXFER_PANEL_KERNEL

#endif  // KVXFER_PACK_GPU_KERNELS_H_
