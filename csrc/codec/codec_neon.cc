#if defined(__aarch64__)

#include <arm_neon.h>

#define KVXFER_TARGET
#include "codec/codec_decode.h"
#include "codec/codec_encode.h"
#include "codec/codec_lanes.h"

namespace kvxfer {
namespace {

struct Lanes {
  static constexpr uint32_t kStep = 8;
  static constexpr uint32_t kRangeSteps = 4;
  using Float = float32x4_t;
  using Half = uint16x8_t;
  struct Pair {
    float32x4_t even, odd;
  };

  KVXFER_LANES_INLINE uint32x4_t ints(float32x4_t value) { return vreinterpretq_u32_f32(value); }
  KVXFER_LANES_INLINE float32x4_t floats(uint32x4_t value) { return vreinterpretq_f32_u32(value); }

  KVXFER_LANES_INLINE Float fill(float value) { return vdupq_n_f32(value); }
  KVXFER_LANES_INLINE Float fill_bits(uint32_t bits) { return floats(vdupq_n_u32(bits)); }
  KVXFER_LANES_INLINE Float mul(Float a, Float b) { return vmulq_f32(a, b); }
  KVXFER_LANES_INLINE Float add(Float a, Float b) { return vaddq_f32(a, b); }
  KVXFER_LANES_INLINE Float sub(Float a, Float b) { return vsubq_f32(a, b); }
  KVXFER_LANES_INLINE Float min(Float a, Float b) { return vminq_f32(a, b); }
  KVXFER_LANES_INLINE Float max(Float a, Float b) { return vmaxq_f32(a, b); }
  KVXFER_LANES_INLINE Float fma(Float a, Float b, Float c) { return vfmaq_f32(c, a, b); }
  KVXFER_LANES_INLINE Float and32(Float a, Float b) { return floats(vandq_u32(ints(a), ints(b))); }
  KVXFER_LANES_INLINE Float add32(Float a, Float b) { return floats(vaddq_u32(ints(a), ints(b))); }
  KVXFER_LANES_INLINE Float max32(Float a, Float b) { return floats(vmaxq_u32(ints(a), ints(b))); }
  KVXFER_LANES_INLINE Float right32(Float a, int bits) {
    return floats(vshlq_u32(ints(a), vdupq_n_s32(-bits)));
  }
  KVXFER_LANES_INLINE uint32_t reduce32(Float a) { return vmaxvq_u32(ints(a)); }
  KVXFER_LANES_INLINE bool any_above(Pair value, uint32_t bits) {
    const uint32x4_t magnitude = vdupq_n_u32(0x7fffffff);
    return vmaxvq_u32(vmaxq_u32(vandq_u32(ints(value.even), magnitude),
                                vandq_u32(ints(value.odd), magnitude))) > bits;
  }

  KVXFER_LANES_INLINE Half fill16(uint16_t value) { return vdupq_n_u16(value); }
  KVXFER_LANES_INLINE Half and16(Half a, Half b) { return vandq_u16(a, b); }
  KVXFER_LANES_INLINE Half add16(Half a, Half b) { return vaddq_u16(a, b); }
  KVXFER_LANES_INLINE Half max16(Half a, Half b) { return vmaxq_u16(a, b); }
  KVXFER_LANES_INLINE Half abs16(Half a) {
    return vreinterpretq_u16_s16(vabsq_s16(vreinterpretq_s16_u16(a)));
  }
  KVXFER_LANES_INLINE Half sub_to_zero16(Half a, Half b) { return vqsubq_u16(a, b); }
  template <int kBits>
  KVXFER_LANES_INLINE Half left16(Half a) {
    return vshlq_n_u16(a, kBits);
  }
  template <int kBits>
  KVXFER_LANES_INLINE Half right16(Half a) {
    return vshrq_n_u16(a, kBits);
  }
  template <int kBits>
  KVXFER_LANES_INLINE Half arithmetic_right16(Half a) {
    return vreinterpretq_u16_s16(vshrq_n_s16(vreinterpretq_s16_u16(a), kBits));
  }
  KVXFER_LANES_INLINE uint32_t reduce16(Half a) { return vmaxvq_u16(a); }

  KVXFER_LANES_INLINE Half load16(const std::byte* from) {
    return vreinterpretq_u16_u8(vld1q_u8(reinterpret_cast<const uint8_t*>(from)));
  }
  KVXFER_LANES_INLINE void store16(std::byte* to, Half value) {
    vst1q_u8(reinterpret_cast<uint8_t*>(to), vreinterpretq_u8_u16(value));
  }
  // Arm cores detect a run of full-line stores and stop reading the lines by themselves.
  KVXFER_LANES_INLINE void stream16(std::byte* to, Half value) { store16(to, value); }
  KVXFER_LANES_INLINE void stream32(std::byte* to, Pair value) { store32(to, value); }
  KVXFER_LANES_INLINE void fence() {}
  KVXFER_LANES_INLINE Half load_bytes(const std::byte* from) {
    return vmovl_u8(vld1_u8(reinterpret_cast<const uint8_t*>(from)));
  }
  KVXFER_LANES_INLINE void store_bytes(std::byte* to, Half value) {
    vst1_u8(reinterpret_cast<uint8_t*>(to), vmovn_u16(value));
  }
  KVXFER_LANES_INLINE Pair load32(const std::byte* from) {
    const Float low = vreinterpretq_f32_u16(load16(from));
    const Float high = vreinterpretq_f32_u16(load16(from + 16));
    return {vuzp1q_f32(low, high), vuzp2q_f32(low, high)};
  }
  KVXFER_LANES_INLINE void store32(std::byte* to, Pair value) {
    store16(to, vreinterpretq_u16_f32(vzip1q_f32(value.even, value.odd)));
    store16(to + 16, vreinterpretq_u16_f32(vzip2q_f32(value.even, value.odd)));
  }

  KVXFER_LANES_INLINE Pair from_bf16(Half value) {
    const uint32x4_t words = vreinterpretq_u32_u16(value);
    return {floats(vshlq_n_u32(words, 16)), floats(vandq_u32(words, vdupq_n_u32(0xffff0000)))};
  }
  KVXFER_LANES_INLINE Pair from_i16(Half value) {
    const int32x4_t words = vreinterpretq_s32_u16(value);
    return {vcvtq_f32_s32(vshrq_n_s32(vshlq_n_s32(words, 16), 16)),
            vcvtq_f32_s32(vshrq_n_s32(words, 16))};
  }
  KVXFER_LANES_INLINE Pair from_f16(Half value) {
    const uint16x4_t even = vget_low_u16(vuzp1q_u16(value, value));
    const uint16x4_t odd = vget_low_u16(vuzp2q_u16(value, value));
    return {vcvt_f32_f16(vreinterpret_f16_u16(even)), vcvt_f32_f16(vreinterpret_f16_u16(odd))};
  }
  KVXFER_LANES_INLINE Half to_f16(Pair value) {
    const uint16x4_t even = vreinterpret_u16_f16(vcvt_f16_f32(value.even));
    const uint16x4_t odd = vreinterpret_u16_f16(vcvt_f16_f32(value.odd));
    return vcombine_u16(vzip1_u16(even, odd), vzip2_u16(even, odd));
  }
  KVXFER_LANES_INLINE Half low_words(Pair value) {
    return vtrn1q_u16(vreinterpretq_u16_f32(value.even), vreinterpretq_u16_f32(value.odd));
  }
  KVXFER_LANES_INLINE Half high_words(Pair value) {
    return vtrn2q_u16(vreinterpretq_u16_f32(value.even), vreinterpretq_u16_f32(value.odd));
  }
};

struct Variant : Encoder<Lanes>, Decoder<Lanes> {};

}  // namespace

constinit const CodecKernels kNeonCodec = make_codec<Variant>(kNeonKernels);

}  // namespace kvxfer

#endif
