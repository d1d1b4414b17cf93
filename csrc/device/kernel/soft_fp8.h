#ifndef KVXFER_DEVICE_KERNEL_SOFT_FP8_H_
#define KVXFER_DEVICE_KERNEL_SOFT_FP8_H_

// Rounding float32 to small floats in integer arithmetic, where there is no instruction for it.
// Included by the back ends, behind their KVXFER_DEVICE and float_bits().

#include <cstdint>

namespace kvxfer::gpu {

// The bits of a float32 of `magnitude` (its bits without the sign, within the type's largest),
// rounded to nearest even to a float of fewer bits.
template <uint32_t kMantissa, uint32_t kBias>
KVXFER_DEVICE uint32_t soft_round(uint32_t magnitude) {
  constexpr uint32_t kShift = 23 - kMantissa;
  constexpr uint32_t kLeastExponent = 127 - kBias + 1;  // of a normal result, biased as float32
  if (magnitude >= kLeastExponent << 23) {
    const uint32_t even = magnitude >> kShift & 1;
    const uint32_t rounded = magnitude + (1u << (kShift - 1)) - 1 + even;
    return (rounded >> kShift) - ((127 - kBias) << kMantissa);
  }
  // Subnormal: the significand, shifted to units of the least step.
  const uint32_t missing = kLeastExponent - (magnitude >> 23) + kShift;
  if (missing > 24) return 0;
  const uint32_t significand = (magnitude & 0x7fffff) | 0x800000;
  const uint32_t whole = significand >> missing;
  const uint32_t rest = significand & ((1u << missing) - 1);
  const uint32_t half = 1u << (missing - 1);
  return whole + (rest > half || (rest == half && (whole & 1) != 0) ? 1 : 0);
}

template <uint32_t kMantissa, uint32_t kBias>
KVXFER_DEVICE uint32_t soft_fp8(float value) {
  const uint32_t bits = float_bits(value);
  return (bits >> 24 & 0x80) | soft_round<kMantissa, kBias>(bits & 0x7fffffff);
}

template <uint32_t kMantissa, uint32_t kBias>
KVXFER_DEVICE uint32_t soft_fp8x4(float a, float b, float c, float d) {
  return soft_fp8<kMantissa, kBias>(a) | soft_fp8<kMantissa, kBias>(b) << 8 |
         soft_fp8<kMantissa, kBias>(c) << 16 | soft_fp8<kMantissa, kBias>(d) << 24;
}

}  // namespace kvxfer::gpu

#endif  // KVXFER_DEVICE_KERNEL_SOFT_FP8_H_
