#ifndef KVXFER_DEVICE_KERNEL_DEVICE_H_
#define KVXFER_DEVICE_KERNEL_DEVICE_H_

// clang-format off: tables
//
// What kernels are written in: one source for three back ends.
//
//   cuda.h  nvcc
//   hip.h   clang -x hip --cuda-device-only, with neither headers nor libraries of ROCm
//   host.h  any C++20 compiler: each GPU thread is a fiber, and a missing barrier a test failure
//
// Each defines, in kvxfer::gpu:
//
//   KVXFER_DEVICE            attributes of a device function
//   KVXFER_KERNEL(threads)   attributes of an entry point that is launched with so many threads
//   KVXFER_SHARED            storage class of a variable that a workgroup shares, not initialised
//   KVXFER_UNROLL            before a loop with constant bounds
//   kWave                    threads that run in lockstep: 32 or 64
//   thread_id(), group_x(), group_y()
//   barrier()                for all threads of the workgroup; orders shared and global memory
//   shuffle_xor(value, mask) the value of thread `thread_id() ^ mask`; mask < kWave, a constant; all
//                            threads of the wave take part
//   add_global, add_shared, or_shared   atomic, relaxed
//   load<T>, store<T>        T of 1, 2, 4, 8 or 16 bytes, aligned, in global memory
//   load_once<T>, store_once<T>         the same, for what nobody reads again soon
//   float_bits, bits_float   a float's bits
//   half_float, float_half   float16 bits to float32 (exact) and back (|value| <= 65504)
//   fp8_e4m3x4, fp8_e5m2x4   four floats, clamped to +-largest, to four OCP bytes, rounded to nearest
//                            even; a zero may come out as 0x80
//   round_bfloat16x2(low, high)         to nearest even; both finite and within bfloat16's largest
//   round_even               to an integer, of a float within +-2^22
//   clamp(value, largest)    to +-largest
//   max_halves               of each unsigned 16-bit half
//
// Floating-point contraction is off (-fmad=false, -ffp-contract=off): results are the host's.
//
// clang-format on

#include <cstdint>

namespace kvxfer::gpu {

struct alignas(16) Vec16 {
  uint32_t word[4];
};
struct alignas(8) Vec8 {
  uint32_t word[2];
};

}  // namespace kvxfer::gpu

#if defined(__CUDACC__)
#include "device/kernel/cuda.h"
#elif defined(__HIP__)
#include "device/kernel/hip.h"
#else
#include "device/kernel/host.h"
#endif

#endif  // KVXFER_DEVICE_KERNEL_DEVICE_H_
