#ifndef KVXFER_DEVICE_KERNEL_SOFT_FP8_H_
#define KVXFER_DEVICE_KERNEL_SOFT_FP8_H_

// float32 to an OCP byte in integer arithmetic, for back ends without an instruction for it.
// Included by them, behind their KVXFER_DEVICE and float_bits().

#include <cstdint>

namespace kvxfer::gpu {

// `value` lies within +-largest of the type.
template <uint32_t kMantissa, uint32_t kBias>
KVXFER_DEVICE uint32_t soft_fp8(float value) {
  const uint32_t bits = float_bits(value);
  const uint32_t sign = bits >> 24 & 0x80;
  const uint32_t magnitude = bits & 0x7fffffff;
  constexpr uint32_t kShift = 23 - kMantissa;
  constexpr uint32_t kLeastExponent = 127 - kBias + 1;  // of a normal result, biased as float32
  if (magnitude >= kLeastExponent << 23) {
    const uint32_t even = magnitude >> kShift & 1;
    const uint32_t rounded = magnitude + (1u << (kShift - 1)) - 1 + even;
    return sign | ((rounded >> kShift) - ((127 - kBias) << kMantissa));
  }
  // Subnormal: the significand, shifted to units of the least step.
  const uint32_t exponent = magnitude >> 23;
  const uint32_t missing = kLeastExponent - exponent + kShift;
  if (missing > 24) return sign;
  const uint32_t significand = (magnitude & 0x7fffff) | 0x800000;
  const uint32_t whole = significand >> missing;
  const uint32_t rest = significand & ((1u << missing) - 1);
  const uint32_t half = 1u << (missing - 1);
  return sign | (whole + (rest > half || (rest == half && (whole & 1) != 0) ? 1 : 0));
}

template <uint32_t kMantissa, uint32_t kBias>
KVXFER_DEVICE uint32_t soft_fp8x4(float a, float b, float c, float d) {
  return soft_fp8<kMantissa, kBias>(a) | soft_fp8<kMantissa, kBias>(b) << 8 |
         soft_fp8<kMantissa, kBias>(c) << 16 | soft_fp8<kMantissa, kBias>(d) << 24;
}

}  // namespace kvxfer::gpu

#endif  // KVXFER_DEVICE_KERNEL_SOFT_FP8_H_
