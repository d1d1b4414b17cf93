#if defined(__x86_64__)

// g++ 12 takes the intrinsics' "undefined" operands for variables that we forgot to set.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif

#include <immintrin.h>

#define KVXFER_TARGET __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")))
#include "codec/codec_decode.h"
#include "codec/codec_encode.h"
#include "codec/codec_lanes.h"

namespace kvxfer {
namespace {

struct Lanes {
  static constexpr uint32_t kStep = 32;
  static constexpr uint32_t kRangeSteps = 4;
  using Float = __m512;
  using Half = __m512i;
  struct Pair {
    __m512 even, odd;
  };

  KVXFER_LANES_INLINE __m512i ints(__m512 value) { return _mm512_castps_si512(value); }
  KVXFER_LANES_INLINE __m512 floats(__m512i value) { return _mm512_castsi512_ps(value); }

  KVXFER_LANES_INLINE Float fill(float value) { return _mm512_set1_ps(value); }
  KVXFER_LANES_INLINE Float fill_bits(uint32_t bits) {
    return floats(_mm512_set1_epi32(static_cast<int>(bits)));
  }
  KVXFER_LANES_INLINE Float mul(Float a, Float b) { return _mm512_mul_ps(a, b); }
  KVXFER_LANES_INLINE Float add(Float a, Float b) { return _mm512_add_ps(a, b); }
  KVXFER_LANES_INLINE Float sub(Float a, Float b) { return _mm512_sub_ps(a, b); }
  KVXFER_LANES_INLINE Float min(Float a, Float b) { return _mm512_min_ps(a, b); }
  KVXFER_LANES_INLINE Float max(Float a, Float b) { return _mm512_max_ps(a, b); }
  KVXFER_LANES_INLINE Float fma(Float a, Float b, Float c) { return _mm512_fmadd_ps(a, b, c); }
  KVXFER_LANES_INLINE Float and32(Float a, Float b) {
    return floats(_mm512_and_si512(ints(a), ints(b)));
  }
  KVXFER_LANES_INLINE Float add32(Float a, Float b) {
    return floats(_mm512_add_epi32(ints(a), ints(b)));
  }
  KVXFER_LANES_INLINE Float max32(Float a, Float b) {
    return floats(_mm512_max_epu32(ints(a), ints(b)));
  }
  KVXFER_LANES_INLINE Float right32(Float a, int bits) {
    return floats(_mm512_srli_epi32(ints(a), static_cast<unsigned>(bits)));
  }
  KVXFER_LANES_INLINE uint32_t reduce32(Float a) { return _mm512_reduce_max_epu32(ints(a)); }
  KVXFER_LANES_INLINE bool any_above(Pair value, uint32_t bits) {
    const __m512i magnitude = _mm512_set1_epi32(0x7fffffff);
    const __m512i most = _mm512_max_epu32(_mm512_and_si512(ints(value.even), magnitude),
                                          _mm512_and_si512(ints(value.odd), magnitude));
    return _mm512_cmpgt_epu32_mask(most, _mm512_set1_epi32(static_cast<int>(bits))) != 0;
  }

  KVXFER_LANES_INLINE Half fill16(uint16_t value) {
    return _mm512_set1_epi16(static_cast<int16_t>(value));
  }
  KVXFER_LANES_INLINE Half and16(Half a, Half b) { return _mm512_and_si512(a, b); }
  KVXFER_LANES_INLINE Half add16(Half a, Half b) { return _mm512_add_epi16(a, b); }
  KVXFER_LANES_INLINE Half max16(Half a, Half b) { return _mm512_max_epu16(a, b); }
  KVXFER_LANES_INLINE Half abs16(Half a) { return _mm512_abs_epi16(a); }
  KVXFER_LANES_INLINE Half sub_to_zero16(Half a, Half b) { return _mm512_subs_epu16(a, b); }
  template <int kBits>
  KVXFER_LANES_INLINE Half left16(Half a) {
    return _mm512_slli_epi16(a, kBits);
  }
  template <int kBits>
  KVXFER_LANES_INLINE Half right16(Half a) {
    return _mm512_srli_epi16(a, kBits);
  }
  template <int kBits>
  KVXFER_LANES_INLINE Half arithmetic_right16(Half a) {
    return _mm512_srai_epi16(a, kBits);
  }
  KVXFER_LANES_INLINE uint32_t reduce16(Half a) {
    const __m256i half =
        _mm256_max_epu16(_mm512_castsi512_si256(a), _mm512_extracti64x4_epi64(a, 1));
    const __m128i quarter =
        _mm_max_epu16(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
    // The instruction that finds the smallest, on the complements.
    const __m128i smallest = _mm_minpos_epu16(_mm_xor_si128(quarter, _mm_set1_epi16(-1)));
    return static_cast<uint16_t>(~_mm_cvtsi128_si32(smallest));
  }

  KVXFER_LANES_INLINE Half load16(const std::byte* from) { return _mm512_loadu_si512(from); }
  KVXFER_LANES_INLINE void store16(std::byte* to, Half value) { _mm512_storeu_si512(to, value); }
  KVXFER_LANES_INLINE void stream16(std::byte* to, Half value) {
    _mm512_stream_si512(reinterpret_cast<__m512i*>(to), value);
  }
  KVXFER_LANES_INLINE void fence() { _mm_sfence(); }
  KVXFER_LANES_INLINE Half load_bytes(const std::byte* from) {
    return _mm512_cvtepu8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
  }
  KVXFER_LANES_INLINE void store_bytes(std::byte* to, Half value) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_cvtepi16_epi8(value));
  }
  KVXFER_LANES_INLINE Pair load32(const std::byte* from) {
    const __m512i even =
        _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    const __m512i odd = _mm512_add_epi32(even, _mm512_set1_epi32(1));
    const __m512 low = _mm512_loadu_ps(from);
    const __m512 high = _mm512_loadu_ps(from + 64);
    return {_mm512_permutex2var_ps(low, even, high), _mm512_permutex2var_ps(low, odd, high)};
  }
  KVXFER_LANES_INLINE __m512 first_half(Pair value) {
    const __m512i order = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
    return _mm512_permutex2var_ps(value.even, order, value.odd);
  }
  KVXFER_LANES_INLINE __m512 second_half(Pair value) {
    const __m512i order =
        _mm512_setr_epi32(8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
    return _mm512_permutex2var_ps(value.even, order, value.odd);
  }
  KVXFER_LANES_INLINE void store32(std::byte* to, Pair value) {
    _mm512_storeu_ps(to, first_half(value));
    _mm512_storeu_ps(to + 64, second_half(value));
  }
  KVXFER_LANES_INLINE void stream32(std::byte* to, Pair value) {
    stream16(to, ints(first_half(value)));
    stream16(to + 64, ints(second_half(value)));
  }

  KVXFER_LANES_INLINE Pair from_bf16(Half value) {
    return {floats(_mm512_slli_epi32(value, 16)),
            floats(_mm512_and_si512(value, _mm512_set1_epi32(static_cast<int>(0xffff0000))))};
  }
  KVXFER_LANES_INLINE Pair from_i16(Half value) {
    return {_mm512_cvtepi32_ps(_mm512_srai_epi32(_mm512_slli_epi32(value, 16), 16)),
            _mm512_cvtepi32_ps(_mm512_srai_epi32(value, 16))};
  }
  KVXFER_LANES_INLINE Pair from_f16(Half value) {
    const __m256i even = _mm512_cvtepi32_epi16(value);
    const __m256i odd = _mm512_cvtepi32_epi16(_mm512_srli_epi32(value, 16));
    return {_mm512_cvtph_ps(even), _mm512_cvtph_ps(odd)};
  }
  KVXFER_LANES_INLINE Half to_f16(Pair value) {
    constexpr int kNearest = _MM_FROUND_TO_NEAREST_INT;
    const __m512i even = _mm512_cvtepu16_epi32(_mm512_cvtps_ph(value.even, kNearest));
    const __m512i odd = _mm512_cvtepu16_epi32(_mm512_cvtps_ph(value.odd, kNearest));
    return _mm512_or_si512(even, _mm512_slli_epi32(odd, 16));
  }
  KVXFER_LANES_INLINE Half low_words(Pair value) {
    return _mm512_mask_blend_epi16(0xaaaaaaaa, ints(value.even),
                                   _mm512_slli_epi32(ints(value.odd), 16));
  }
  KVXFER_LANES_INLINE Half high_words(Pair value) {
    return _mm512_mask_blend_epi16(0xaaaaaaaa, _mm512_srli_epi32(ints(value.even), 16),
                                   ints(value.odd));
  }
};

struct Variant : Encoder<Lanes>, Decoder<Lanes> {};

}  // namespace

constinit const CodecKernels kAvx512Codec = make_codec<Variant>(kAvx512Kernels);

}  // namespace kvxfer

#endif
