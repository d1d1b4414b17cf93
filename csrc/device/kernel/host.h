#ifndef KVXFER_DEVICE_KERNEL_HOST_H_
#define KVXFER_DEVICE_KERNEL_HOST_H_

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "device/kernel/fibers.h"

#define KVXFER_DEVICE inline
#define KVXFER_KERNEL(threads) inline void
#define KVXFER_SHARED static  // workgroups run one after another
#define KVXFER_UNROLL

#ifndef KVXFER_WAVE
#define KVXFER_WAVE 32
#endif

namespace kvxfer::gpu {

constexpr uint32_t kWave = KVXFER_WAVE;

inline uint32_t thread_id() { return Fibers::current().thread(); }
inline uint32_t group_x() { return Fibers::current().group_x(); }
inline uint32_t group_y() { return Fibers::current().group_y(); }
inline void barrier() { Fibers::current().barrier(); }
inline uint32_t shuffle_xor(uint32_t value, uint32_t mask) {
  return Fibers::current().shuffle_xor(value, mask);
}

// One fiber runs at a time, so plain additions are atomic.
inline void add_global(uint64_t* to, uint64_t value) { *to += value; }
inline void add_global(uint32_t* to, uint32_t value) { *to += value; }
inline void add_shared(uint32_t* to, uint32_t value) { *to += value; }
inline void or_shared(uint32_t* to, uint32_t value) { *to |= value; }

template <class T>
T load(const void* from) {
  return *static_cast<const T*>(from);  // not memcpy: the sanitizer checks the alignment
}
template <class T>
void store(void* to, T value) {
  *static_cast<T*>(to) = value;
}
template <class T>
T load_once(const void* from) {
  return load<T>(from);
}
template <class T>
void store_once(void* to, T value) {
  store<T>(to, value);
}

inline uint32_t float_bits(float value) { return std::bit_cast<uint32_t>(value); }
inline float bits_float(uint32_t bits) { return std::bit_cast<float>(bits); }
inline int32_t round_even(float value) { return static_cast<int32_t>(std::nearbyintf(value)); }

}  // namespace kvxfer::gpu

#include "device/kernel/soft_fp8.h"

namespace kvxfer::gpu {

inline float half_float(uint32_t bits) {
  const uint32_t sign = (bits & 0x8000) << 16;
  const uint32_t magnitude = bits & 0x7fff;
  if (magnitude >= 0x7c00) return bits_float(sign | 0x7f800000 | (magnitude & 0x3ff) << 13);
  return bits_float(sign | float_bits(bits_float(magnitude << 13) * 0x1p112f));
}
inline uint32_t float_half(float value) {
  const uint32_t bits = float_bits(value);
  return (bits >> 16 & 0x8000) | soft_round<10, 15>(bits & 0x7fffffff);
}

inline float clamp(float value, float largest) {
  return value > largest ? largest : value < -largest ? -largest : value;
}
inline uint32_t max_halves(uint32_t a, uint32_t b) {
  return std::max(a & 0xffff, b & 0xffff) | std::max(a >> 16, b >> 16) << 16;
}
inline uint32_t round_bfloat16(float value) {
  const uint32_t bits = float_bits(value);
  return bits + 0x7fff + (bits >> 16 & 1);
}
inline uint32_t round_bfloat16x2(float low, float high) {
  return round_bfloat16(low) >> 16 | (round_bfloat16(high) & 0xffff0000);
}

inline uint32_t fp8_e4m3x4(float a, float b, float c, float d) {
  return soft_fp8x4<3, 7>(clamp(a, 448), clamp(b, 448), clamp(c, 448), clamp(d, 448));
}
inline uint32_t fp8_e5m2x4(float a, float b, float c, float d) {
  return soft_fp8x4<2, 15>(clamp(a, 57344), clamp(b, 57344), clamp(c, 57344), clamp(d, 57344));
}

}  // namespace kvxfer::gpu

#endif  // KVXFER_DEVICE_KERNEL_HOST_H_
