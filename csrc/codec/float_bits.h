#ifndef KVXFER_CODEC_FLOAT_BITS_H_
#define KVXFER_CODEC_FLOAT_BITS_H_

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "kvxfer/codec.h"

namespace kvxfer {

// Number formats one element at a time, in plain arithmetic: what the SIMD variants have to equal.

constexpr uint32_t kInfinityBits = 0x7f800000;
constexpr uint32_t kMagnitudeBits = 0x7fffffff;
constexpr uint32_t kNanBits = 0x7fc00000;  // of the NaN that every operation here makes

inline uint32_t bits_of(float value) { return std::bit_cast<uint32_t>(value); }
inline float float_of(uint32_t bits) { return std::bit_cast<float>(bits); }

inline bool is_nan(float value) { return (bits_of(value) & kMagnitudeBits) > kInfinityBits; }
inline bool is_infinite(float value) { return (bits_of(value) & kMagnitudeBits) == kInfinityBits; }

// `bits` >> `shift`, rounded to nearest even. `shift` is 1 to 31.
constexpr uint32_t round_shift(uint32_t bits, int shift) {
  const uint32_t half = uint32_t{1} << (shift - 1);
  return (bits + half - 1 + ((bits >> shift) & 1)) >> shift;
}

// The layout of a float with a sign, fewer bits of exponent and fewer of mantissa than float32.
struct SmallFloat {
  int mantissa_bits = 0;
  int bias = 0;
  uint32_t largest = 0;  // bits of the largest finite magnitude
  float largest_value = 0;
  uint32_t infinity = 0;  // bits of infinity, or 0 where there is none
  uint32_t nan = 0;       // bits of the NaN that rounding makes
  uint32_t sign = 0;      // bit of the sign
  bool negative_zero = true;
};

constexpr SmallFloat kFloat16 = {10, 15, 0x7bff, 65504, 0x7c00, 0x7e00, 0x8000};
constexpr SmallFloat kBFloat16 = {7, 127, 0x7f7f, 0x1.fep127, 0x7f80, 0x7fc0, 0x8000};
constexpr SmallFloat kFloat8E4M3FN = {3, 7, 0x7e, 448, 0, 0x7f, 0x80};
constexpr SmallFloat kFloat8E4M3FNUZ = {3, 8, 0x7f, 240, 0, 0x80, 0x80, false};
constexpr SmallFloat kFloat8E5M2 = {2, 15, 0x7b, 57344, 0x7c, 0x7f, 0x80};
constexpr SmallFloat kFloat8E5M2FNUZ = {2, 16, 0x7f, 57344, 0, 0x80, 0x80, false};

// The format of an element of at most 16 bits that is a float.
const SmallFloat& small_float(ElementType element);

// 2 to the `exponent` of a normal float32.
inline float power_of_two(int exponent) {
  return float_of(static_cast<uint32_t>(exponent + 127) << 23);
}

// Exact. Not for bfloat16, whose bits are the upper ones of a float32.
inline float from_small(uint32_t bits, const SmallFloat& format) {
  const uint32_t magnitude = bits & (format.sign - 1);
  const bool negative = (bits & format.sign) != 0;
  if (negative && magnitude == 0 && !format.negative_zero) return float_of(kNanBits);
  float value = 0;
  if (magnitude > format.largest) {
    const bool infinite = format.infinity != 0 && magnitude == format.infinity;
    value = float_of(infinite ? kInfinityBits : kNanBits);
  } else {
    const auto exponent = static_cast<int>(magnitude >> format.mantissa_bits);
    const uint32_t one = uint32_t{1} << format.mantissa_bits;
    const uint32_t mantissa = (magnitude & (one - 1)) | (exponent > 0 ? one : 0);
    const int step = std::max(exponent, 1) - format.bias - format.mantissa_bits;
    value = static_cast<float>(mantissa) * power_of_two(step);
  }
  return negative ? -value : value;
}

// Rounds to nearest even. What is finite and beyond the largest becomes the largest and is counted,
// and so is infinity where the format has none.
inline uint32_t to_small(float value, const SmallFloat& format, uint64_t& clamped) {
  if (is_nan(value)) return format.nan;
  const uint32_t sign = bits_of(value) >> 31 != 0 ? format.sign : 0;
  const uint32_t bits = bits_of(value) & kMagnitudeBits;
  if (bits == kInfinityBits && format.infinity != 0) return sign | format.infinity;
  const float magnitude = float_of(bits);
  if (magnitude > format.largest_value) {
    ++clamped;
    return sign | format.largest;
  }
  const int exponent = static_cast<int>(bits >> 23) - 127 + format.bias;
  uint32_t rounded = 0;
  if (exponent > 0) {
    const int shift = 23 - format.mantissa_bits;
    rounded = round_shift(bits, shift) -
              (static_cast<uint32_t>(127 - format.bias) << format.mantissa_bits);
  } else {
    // Steps of the format's subnormal numbers: scaling is exact, nearbyint rounds to nearest even.
    const int step = 1 - format.bias - format.mantissa_bits;
    rounded = static_cast<uint32_t>(std::nearbyint(std::ldexp(double{magnitude}, -step)));
  }
  return rounded == 0 && !format.negative_zero ? 0 : sign | rounded;
}

// An element of any float type. Counts what is clamped.
inline uint32_t to_bits(float value, ElementType element, uint64_t& clamped) {
  if (element != ElementType::kFloat32) return to_small(value, small_float(element), clamped);
  return is_nan(value) ? kNanBits : bits_of(value);
}

// A positive number as a scale of the format, never smaller.
inline float scale_up(float value, ScaleFormat format) {
  switch (format) {
    case ScaleFormat::kFloat32: return value;
    case ScaleFormat::kBFloat16: return float_of((bits_of(value) + 0xffff) & 0xffff0000);
    case ScaleFormat::kE8M0: return float_of((bits_of(value) + 0x7fffff) & kInfinityBits);
  }
  return value;
}

// A number as a zero point of the format, never larger; 0 for either zero.
inline float zero_down(float value, ScaleFormat format) {
  const float zero = value + 0.0f;
  if (format == ScaleFormat::kFloat32) return zero;
  const uint32_t bits = bits_of(zero);
  return float_of((bits + (bits >> 31 != 0 ? 0xffff : 0)) & 0xffff0000);
}

// The largest number that a code of a scheme with a scale per row stands for.
constexpr float largest_code(Scheme scheme) {
  return scheme == Scheme::kFloat8E4M3   ? kFloat8E4M3FN.largest_value
         : scheme == Scheme::kFloat8E5M2 ? kFloat8E5M2.largest_value
                                         : 127.0f;
}

constexpr float kSmallestScale = 0x1p-120f;

inline size_t scale_bytes(ScaleFormat format) {
  return format == ScaleFormat::kFloat32 ? 4 : format == ScaleFormat::kBFloat16 ? 2 : 1;
}

inline void store_scale(float scale, ScaleFormat format, std::byte* at) {
  const uint32_t bits = bits_of(scale) >> (format == ScaleFormat::kFloat32 ? 0
                                           : format == ScaleFormat::kE8M0  ? 23
                                                                           : 16);
  std::memcpy(at, &bits, scale_bytes(format));
}

inline float load_scale(const std::byte* at, ScaleFormat format) {
  uint32_t bits = 0;
  std::memcpy(&bits, at, scale_bytes(format));
  return float_of(bits << (format == ScaleFormat::kFloat32 ? 0
                           : format == ScaleFormat::kE8M0  ? 23
                                                           : 16));
}

}  // namespace kvxfer

#endif  // KVXFER_CODEC_FLOAT_BITS_H_
