#if defined(__x86_64__)

#include <immintrin.h>

#define KVXFER_TARGET __attribute__((target("avx2,fma,f16c")))
#include "codec/codec_decode.h"
#include "codec/codec_encode.h"
#include "codec/codec_lanes.h"

namespace kvxfer {
namespace {

struct Lanes {
  static constexpr uint32_t kStep = 16;
  static constexpr uint32_t kRangeSteps = 2;
  using Float = __m256;
  using Half = __m256i;
  struct Pair {
    __m256 even, odd;
  };

  KVXFER_LANES_INLINE __m256i ints(__m256 value) { return _mm256_castps_si256(value); }
  KVXFER_LANES_INLINE __m256 floats(__m256i value) { return _mm256_castsi256_ps(value); }

  KVXFER_LANES_INLINE Float fill(float value) { return _mm256_set1_ps(value); }
  KVXFER_LANES_INLINE Float fill_bits(uint32_t bits) {
    return floats(_mm256_set1_epi32(static_cast<int>(bits)));
  }
  KVXFER_LANES_INLINE Float mul(Float a, Float b) { return _mm256_mul_ps(a, b); }
  KVXFER_LANES_INLINE Float add(Float a, Float b) { return _mm256_add_ps(a, b); }
  KVXFER_LANES_INLINE Float sub(Float a, Float b) { return _mm256_sub_ps(a, b); }
  KVXFER_LANES_INLINE Float min(Float a, Float b) { return _mm256_min_ps(a, b); }
  KVXFER_LANES_INLINE Float max(Float a, Float b) { return _mm256_max_ps(a, b); }
  KVXFER_LANES_INLINE Float fma(Float a, Float b, Float c) { return _mm256_fmadd_ps(a, b, c); }
  KVXFER_LANES_INLINE Float and32(Float a, Float b) { return _mm256_and_ps(a, b); }
  KVXFER_LANES_INLINE Float add32(Float a, Float b) {
    return floats(_mm256_add_epi32(ints(a), ints(b)));
  }
  KVXFER_LANES_INLINE Float max32(Float a, Float b) {
    return floats(_mm256_max_epu32(ints(a), ints(b)));
  }
  KVXFER_LANES_INLINE Float right32(Float a, int bits) {
    return floats(_mm256_srli_epi32(ints(a), bits));
  }
  KVXFER_LANES_INLINE uint32_t reduce32(Float a) {
    __m128i most =
        _mm_max_epu32(_mm256_castsi256_si128(ints(a)), _mm256_extracti128_si256(ints(a), 1));
    most = _mm_max_epu32(most, _mm_shuffle_epi32(most, 0x4e));
    most = _mm_max_epu32(most, _mm_shuffle_epi32(most, 0xb1));
    return static_cast<uint32_t>(_mm_cvtsi128_si32(most));
  }
  KVXFER_LANES_INLINE bool any_above(Pair value, uint32_t bits) {
    const __m256 magnitude = fill_bits(0x7fffffff);
    const __m256i most =
        ints(max32(_mm256_and_ps(value.even, magnitude), _mm256_and_ps(value.odd, magnitude)));
    const __m256i above = _mm256_cmpgt_epi32(most, _mm256_set1_epi32(static_cast<int>(bits)));
    return _mm256_testz_si256(above, above) == 0;
  }

  KVXFER_LANES_INLINE Half fill16(uint16_t value) {
    return _mm256_set1_epi16(static_cast<int16_t>(value));
  }
  KVXFER_LANES_INLINE Half and16(Half a, Half b) { return _mm256_and_si256(a, b); }
  KVXFER_LANES_INLINE Half add16(Half a, Half b) { return _mm256_add_epi16(a, b); }
  KVXFER_LANES_INLINE Half max16(Half a, Half b) { return _mm256_max_epu16(a, b); }
  KVXFER_LANES_INLINE Half abs16(Half a) { return _mm256_abs_epi16(a); }
  KVXFER_LANES_INLINE Half sub_to_zero16(Half a, Half b) { return _mm256_subs_epu16(a, b); }
  template <int kBits>
  KVXFER_LANES_INLINE Half left16(Half a) {
    return _mm256_slli_epi16(a, kBits);
  }
  template <int kBits>
  KVXFER_LANES_INLINE Half right16(Half a) {
    return _mm256_srli_epi16(a, kBits);
  }
  template <int kBits>
  KVXFER_LANES_INLINE Half arithmetic_right16(Half a) {
    return _mm256_srai_epi16(a, kBits);
  }
  KVXFER_LANES_INLINE uint32_t reduce16(Half a) {
    const __m128i half = _mm_max_epu16(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
    // The instruction that finds the smallest, on the complements.
    const __m128i smallest = _mm_minpos_epu16(_mm_xor_si128(half, _mm_set1_epi16(-1)));
    return static_cast<uint16_t>(~_mm_cvtsi128_si32(smallest));
  }

  KVXFER_LANES_INLINE Half load16(const std::byte* from) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
  }
  KVXFER_LANES_INLINE void store16(std::byte* to, Half value) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), value);
  }
  KVXFER_LANES_INLINE void stream16(std::byte* to, Half value) {
    _mm256_stream_si256(reinterpret_cast<__m256i*>(to), value);
  }
  KVXFER_LANES_INLINE void fence() { _mm_sfence(); }
  KVXFER_LANES_INLINE Half load_bytes(const std::byte* from) {
    return _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
  }
  KVXFER_LANES_INLINE void store_bytes(std::byte* to, Half value) {
    const __m256i low = _mm256_and_si256(value, _mm256_set1_epi16(0xff));
    const __m128i bytes =
        _mm_packus_epi16(_mm256_castsi256_si128(low), _mm256_extracti128_si256(low, 1));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), bytes);
  }
  KVXFER_LANES_INLINE Pair load32(const std::byte* from) {
    const __m256 low = _mm256_loadu_ps(reinterpret_cast<const float*>(from));
    const __m256 high = _mm256_loadu_ps(reinterpret_cast<const float*>(from + 32));
    return {in_order(_mm256_shuffle_ps(low, high, 0x88)),
            in_order(_mm256_shuffle_ps(low, high, 0xdd))};
  }
  // After an instruction that mixes two registers within each half of them.
  KVXFER_LANES_INLINE __m256 in_order(__m256 mixed) {
    return floats(_mm256_permute4x64_epi64(ints(mixed), 0xd8));
  }
  KVXFER_LANES_INLINE __m256i first_half(Pair value) {
    return ints(_mm256_permute2f128_ps(_mm256_unpacklo_ps(value.even, value.odd),
                                       _mm256_unpackhi_ps(value.even, value.odd), 0x20));
  }
  KVXFER_LANES_INLINE __m256i second_half(Pair value) {
    return ints(_mm256_permute2f128_ps(_mm256_unpacklo_ps(value.even, value.odd),
                                       _mm256_unpackhi_ps(value.even, value.odd), 0x31));
  }
  KVXFER_LANES_INLINE void store32(std::byte* to, Pair value) {
    store16(to, first_half(value));
    store16(to + 32, second_half(value));
  }
  KVXFER_LANES_INLINE void stream32(std::byte* to, Pair value) {
    stream16(to, first_half(value));
    stream16(to + 32, second_half(value));
  }

  KVXFER_LANES_INLINE Pair from_bf16(Half value) {
    return {floats(_mm256_slli_epi32(value, 16)),
            floats(_mm256_and_si256(value, _mm256_set1_epi32(static_cast<int>(0xffff0000))))};
  }
  KVXFER_LANES_INLINE Pair from_i16(Half value) {
    return {_mm256_cvtepi32_ps(_mm256_srai_epi32(_mm256_slli_epi32(value, 16), 16)),
            _mm256_cvtepi32_ps(_mm256_srai_epi32(value, 16))};
  }
  KVXFER_LANES_INLINE Pair from_f16(Half value) {
    const __m256i apart = _mm256_setr_epi8(0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15,  //
                                           0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15);
    const __m256i halves = _mm256_permute4x64_epi64(_mm256_shuffle_epi8(value, apart), 0xd8);
    return {_mm256_cvtph_ps(_mm256_castsi256_si128(halves)),
            _mm256_cvtph_ps(_mm256_extracti128_si256(halves, 1))};
  }
  KVXFER_LANES_INLINE Half to_f16(Pair value) {
    const __m128i even = _mm256_cvtps_ph(value.even, _MM_FROUND_TO_NEAREST_INT);
    const __m128i odd = _mm256_cvtps_ph(value.odd, _MM_FROUND_TO_NEAREST_INT);
    return _mm256_set_m128i(_mm_unpackhi_epi16(even, odd), _mm_unpacklo_epi16(even, odd));
  }
  KVXFER_LANES_INLINE Half low_words(Pair value) {
    return _mm256_blend_epi16(ints(value.even), _mm256_slli_epi32(ints(value.odd), 16), 0xaa);
  }
  KVXFER_LANES_INLINE Half high_words(Pair value) {
    return _mm256_blend_epi16(_mm256_srli_epi32(ints(value.even), 16), ints(value.odd), 0xaa);
  }
};

struct Variant : Encoder<Lanes>, Decoder<Lanes> {};

}  // namespace

constinit const CodecKernels kAvx2Codec = make_codec<Variant>(kAvx2Kernels);

}  // namespace kvxfer

#endif
