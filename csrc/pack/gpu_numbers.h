#ifndef KVXFER_PACK_GPU_NUMBERS_H_
#define KVXFER_PACK_GPU_NUMBERS_H_

// The arithmetic of docs/coded_chunks.md on a GPU. The numbers of schemes, scale formats and
// element types are those of kvxfer/codec.h and kvxfer/element.h, which device compilers do not
// read.

#include "device/kernel/device.h"

namespace kvxfer::gpu {

enum : uint32_t { kRaw, kE4M3, kE5M2, kInt8, kInt8Channel };
enum : uint32_t { kScaleFloat32, kScaleBFloat16, kScaleE8M0 };
enum : uint32_t {
  kFloat32,
  kFloat16,
  kBFloat16,
  kUInt8,
  kFloat8E4M3FN,
  kFloat8E4M3FNUZ,
  kFloat8E5M2,
  kFloat8E5M2FNUZ
};

constexpr uint32_t kInfinity = 0x7f800000;
constexpr uint32_t kNan = 0x7fc00000;
constexpr uint32_t kMagnitude = 0x7fffffff;

KVXFER_DEVICE uint32_t element_size(uint32_t element) {
  return element == kFloat32 ? 4 : element <= kBFloat16 ? 2 : 1;
}
KVXFER_DEVICE uint32_t scale_size(uint32_t format) {
  return format == kScaleFloat32 ? 4 : format == kScaleBFloat16 ? 2 : 1;
}
KVXFER_DEVICE uint32_t scale_shift(uint32_t format) {
  return format == kScaleFloat32 ? 0 : format == kScaleBFloat16 ? 16 : 23;
}

KVXFER_DEVICE constexpr float largest_code(uint32_t scheme) {
  return scheme == kE4M3 ? 448.0f : scheme == kE5M2 ? 57344.0f : 127.0f;
}

// `amount` divided by the largest code, at least 2^-120, rounded up to the scale format.
KVXFER_DEVICE float make_scale(float amount, float largest, uint32_t format) {
  const float scale = amount / largest;
  const uint32_t bits = float_bits(scale > 0x1p-120f ? scale : 0x1p-120f);
  if (format == kScaleFloat32) return bits_float(bits);
  if (format == kScaleBFloat16) return bits_float((bits + 0xffff) & 0xffff0000);
  return bits_float((bits + 0x7fffff) & kInfinity);
}

KVXFER_DEVICE float zero_down(float value, uint32_t format) {
  const uint32_t bits = float_bits(value + 0.0f);
  if (format == kScaleFloat32) return bits_float(bits);
  return bits_float((bits + (bits >> 31 != 0 ? 0xffffu : 0u)) & 0xffff0000);
}

KVXFER_DEVICE float load_scale(const char* at, uint32_t format) {
  if (format == kScaleFloat32) return bits_float(load<uint32_t>(at));
  if (format == kScaleBFloat16) return bits_float(uint32_t{load<uint16_t>(at)} << 16);
  return bits_float(uint32_t{load<uint8_t>(at)} << 23);
}

KVXFER_DEVICE void store_scale(float scale, uint32_t format, char* at) {
  const uint32_t bits = float_bits(scale) >> scale_shift(format);
  if (format == kScaleFloat32) {
    store<uint32_t>(at, bits);
  } else if (format == kScaleBFloat16) {
    store<uint16_t>(at, static_cast<uint16_t>(bits));
  } else {
    store<uint8_t>(at, static_cast<uint8_t>(bits));
  }
}

// 0x80 becomes 0x00, in each byte.
KVXFER_DEVICE uint32_t drop_negative_zeros(uint32_t codes) {
  const uint32_t magnitudes = codes & 0x7f7f7f7f;
  return codes & ((magnitudes + 0x7f7f7f7f) | 0x7f7f7f7f);
}

KVXFER_DEVICE uint32_t int8_code(float scaled) {
  return static_cast<uint32_t>(round_even(clamp(scaled, 127.0f))) & 0xff;
}

// Four scaled values to four codes.
template <uint32_t kScheme>
KVXFER_DEVICE uint32_t encode4(float a, float b, float c, float d) {
  if constexpr (kScheme == kE4M3) {
    return drop_negative_zeros(fp8_e4m3x4(a, b, c, d));
  } else if constexpr (kScheme == kE5M2) {
    return drop_negative_zeros(fp8_e5m2x4(a, b, c, d));
  } else {
    return int8_code(a) | int8_code(b) << 8 | int8_code(c) << 16 | int8_code(d) << 24;
  }
}

// A float of `mantissa` bits below the exponent, by scaling its bits as if they were a float32's.
KVXFER_DEVICE float small_magnitude(uint32_t magnitude, uint32_t mantissa, uint32_t bias) {
  return bits_float(magnitude << (23 - mantissa)) * bits_float((254 - bias) << 23);
}

KVXFER_DEVICE float with_sign(float magnitude, bool negative) {
  return bits_float(float_bits(magnitude) | (negative ? 0x80000000u : 0u));
}

template <uint32_t kScheme>
KVXFER_DEVICE float decode(uint32_t code) {
  if constexpr (kScheme == kInt8) {
    return static_cast<float>(static_cast<int32_t>(code << 24) >> 24);
  } else if constexpr (kScheme == kInt8Channel) {
    return static_cast<float>(code);
  } else if constexpr (kScheme == kE4M3) {
    const uint32_t magnitude = code & 0x7f;
    if (magnitude == 0x7f) return bits_float(kNan);
    return with_sign(small_magnitude(magnitude, 3, 7), (code & 0x80) != 0);
  } else {
    const uint32_t magnitude = code & 0x7f;
    if (magnitude > 0x7c) return bits_float(kNan);
    const float value =
        magnitude == 0x7c ? bits_float(kInfinity) : small_magnitude(magnitude, 2, 15);
    return with_sign(value, (code & 0x80) != 0);
  }
}

KVXFER_DEVICE float float8_value(uint32_t code, uint32_t element) {
  const uint32_t magnitude = code & 0x7f;
  const bool negative = (code & 0x80) != 0;
  if (element == kFloat8E4M3FN) return decode<kE4M3>(code);
  if (element == kFloat8E5M2) return decode<kE5M2>(code);
  if (code == 0x80) return bits_float(kNan);
  return with_sign(element == kFloat8E4M3FNUZ ? small_magnitude(magnitude, 3, 8)
                                              : small_magnitude(magnitude, 2, 16),
                   negative);
}

KVXFER_DEVICE float element_value(uint32_t bits, uint32_t element) {
  if (element == kFloat32) return bits_float(bits);
  if (element == kBFloat16) return bits_float(bits << 16);
  if (element == kFloat16) return half_float(bits);
  return float8_value(bits, element);
}

KVXFER_DEVICE uint32_t load_bits(const char* at, uint32_t size) {
  return size == 4   ? load<uint32_t>(at)
         : size == 2 ? uint32_t{load<uint16_t>(at)}
                     : uint32_t{load<uint8_t>(at)};
}

KVXFER_DEVICE void store_bits(char* at, uint32_t size, uint32_t bits) {
  if (size == 4) {
    store<uint32_t>(at, bits);
  } else if (size == 2) {
    store<uint16_t>(at, static_cast<uint16_t>(bits));
  } else {
    store<uint8_t>(at, static_cast<uint8_t>(bits));
  }
}

// Whether an element keeps its row from being encoded: NaN, or too large to scale.
KVXFER_DEVICE bool goes_raw(uint32_t bits, uint32_t element) {
  return element == kFloat32   ? (bits & kMagnitude) >= 227u << 23
         : element == kFloat16 ? (bits & 0x7fff) >= 30u << 10
                               : (bits & 0x7fff) >= 227u << 7;
}

KVXFER_DEVICE uint32_t to_bfloat16(float value, uint32_t& clamped) {
  const uint32_t bits = float_bits(value);
  const uint32_t magnitude = bits & kMagnitude;
  if (magnitude > 0x7f7f0000) {
    if (magnitude > kInfinity) return 0x7fc0;
    if (magnitude < kInfinity) ++clamped;
    return (bits >> 16 & 0x8000) | (magnitude < kInfinity ? 0x7f7f : 0x7f80);
  }
  return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

KVXFER_DEVICE uint32_t to_float16(float value, uint32_t& clamped) {
  const uint32_t bits = float_bits(value);
  const uint32_t magnitude = bits & kMagnitude;
  if (magnitude > 0x477fe000) {
    if (magnitude > kInfinity) return 0x7e00;
    if (magnitude < kInfinity) ++clamped;
    return (bits >> 16 & 0x8000) | (magnitude < kInfinity ? 0x7bff : 0x7c00);
  }
  return float_half(value);
}

template <uint32_t kMantissa, uint32_t kBias, bool kFnuz>
KVXFER_DEVICE uint32_t to_float8(float value, uint32_t& clamped) {
  const uint32_t bits = float_bits(value);
  const uint32_t magnitude = bits & kMagnitude;
  const uint32_t sign = bits >> 24 & 0x80;
  constexpr bool kHasInfinity = kMantissa == 2 && !kFnuz;
  constexpr uint32_t kLargest = kFnuz ? 0x7f : kMantissa == 3 ? 0x7e : 0x7b;
  if (magnitude > kInfinity) return kFnuz ? 0x80 : 0x7f;
  if (magnitude == kInfinity && kHasInfinity) return sign | 0x7c;
  if (bits_float(magnitude) > small_magnitude(kLargest, kMantissa, kBias)) {
    ++clamped;
    return sign | kLargest;
  }
  const uint32_t rounded = soft_round<kMantissa, kBias>(magnitude);
  return kFnuz && rounded == 0 ? 0 : sign | rounded;
}

// To an element of the consumer's cache, which is then `size` bytes of the result.
KVXFER_DEVICE uint32_t to_element(float value, uint32_t element, uint32_t& clamped) {
  switch (element) {
    case kFloat32: return (float_bits(value) & kMagnitude) > kInfinity ? kNan : float_bits(value);
    case kFloat16: return to_float16(value, clamped);
    case kBFloat16: return to_bfloat16(value, clamped);
    case kFloat8E4M3FN: return to_float8<3, 7, false>(value, clamped);
    case kFloat8E4M3FNUZ: return to_float8<3, 8, true>(value, clamped);
    case kFloat8E5M2: return to_float8<2, 15, false>(value, clamped);
    default: return to_float8<2, 16, true>(value, clamped);
  }
}

}  // namespace kvxfer::gpu

#endif  // KVXFER_PACK_GPU_NUMBERS_H_
