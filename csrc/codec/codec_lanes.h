#ifndef KVXFER_CODEC_CODEC_LANES_H_
#define KVXFER_CODEC_CODEC_LANES_H_

// What the SIMD variants have to offer to the kernels of codec_encode.h and codec_decode.h, which
// they share. A variant's file defines KVXFER_TARGET as its function attribute before it includes
// those, and then a class Lanes over its registers:
//   kStep                         elements that are worked on at a time, a multiple of 8
//   kRangeSteps                   steps whose smallest and largest numbers fit in registers
//   Float, Half                   kStep / 2 floats; kStep 16-bit lanes
//   Pair {even, odd}              kStep floats: the elements with even index and those with odd
//   load16, store16, load32, store32, load_bytes, store_bytes     kStep elements, in their order
//   stream16, stream32, fence     the stores past the caches, into whole aligned lines
//   from_bf16, from_f16, to_f16, from_i16                         between Half and Pair
//   low_words, high_words         the halves of a Pair's 32-bit lanes, as Half in their order
//   what they do is plain from their names: fill, fill_bits, mul, add, sub, min, max, and32,
//   max32, add32, right32, fma, fill16, and16, max16, add16, abs16, sub_to_zero16, left16,
//   right16, arithmetic_right16, reduce16, reduce32, any_above
// All are forced inline: a function without the attribute cannot hold the variant's instructions,
// which is also why there are no lambdas in here.
//
// Even and odd elements are kept apart because the two bfloat16 in a 32-bit lane become floats by
// one shift and one mask, and go back by one shift and one blend.

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "codec/codec_kernels.h"
#include "codec/float_bits.h"

#define KVXFER_LANES_INLINE KVXFER_TARGET __attribute__((always_inline)) static inline

namespace kvxfer {
namespace {

// Scales that are worked out at a time, and the most rows that they belong to. While one such tile
// is encoded the next one is prefetched.
constexpr uint32_t kTileScales = 256;
constexpr uint32_t kTileRows = 16;
// Channels whose scales are worked out at a time.
constexpr uint32_t kStripChannels = 512;

constexpr bool is_float8_scheme(Scheme scheme) {
  return scheme == Scheme::kFloat8E4M3 || scheme == Scheme::kFloat8E5M2;
}

constexpr size_t bytes_of(ElementType element) { return element == ElementType::kFloat32 ? 4 : 2; }

// Bits of the magnitude from which on a row goes raw.
constexpr uint32_t raw_limit(ElementType element) {
  return element == ElementType::kFloat32    ? uint32_t{227} << 23
         : element == ElementType::kBFloat16 ? uint32_t{227} << 7
                                             : uint32_t{30} << 10;
}

// Scales up to this one make values that need no clamping in a cache of that type.
constexpr float tame_scale(Scheme scheme, ElementType element) {
  if (element != ElementType::kFloat16) return 0x1p100f;
  return scheme == Scheme::kFloat8E4M3 ? 0x1p7f : scheme == Scheme::kFloat8E5M2 ? 1.0f : 0x1p8f;
}

// Magnitudes up to this one, as bits of a float32, are rounded to that type without further ado.
constexpr uint32_t tame_bits(ElementType element) {
  return element == ElementType::kFloat32    ? kInfinityBits
         : element == ElementType::kBFloat16 ? 0x7f7f0000
                                             : 0x477fe000;
}

// Loads, stores and arithmetic of one step.
template <class L>
struct Steps {
  using Half = typename L::Half;
  using Float = typename L::Float;
  using Pair = typename L::Pair;
  static constexpr uint32_t kStep = L::kStep;

  // The first `bytes` of a step, with zeros behind them.
  struct Part {
    alignas(64) std::byte bytes[kStep * 4] = {};
    KVXFER_LANES_INLINE const std::byte* fill(Part& part, const std::byte* from, size_t bytes) {
      std::memcpy(part.bytes, from, bytes);
      return part.bytes;
    }
  };

  KVXFER_LANES_INLINE Pair both(Float value) { return {value, value}; }
  KVXFER_LANES_INLINE Pair mul(Pair a, Pair b) {
    return {L::mul(a.even, b.even), L::mul(a.odd, b.odd)};
  }
  KVXFER_LANES_INLINE Pair add(Pair a, Pair b) {
    return {L::add(a.even, b.even), L::add(a.odd, b.odd)};
  }
  KVXFER_LANES_INLINE Pair sub(Pair a, Pair b) {
    return {L::sub(a.even, b.even), L::sub(a.odd, b.odd)};
  }
  KVXFER_LANES_INLINE Pair min(Pair a, Pair b) {
    return {L::min(a.even, b.even), L::min(a.odd, b.odd)};
  }
  KVXFER_LANES_INLINE Pair max(Pair a, Pair b) {
    return {L::max(a.even, b.even), L::max(a.odd, b.odd)};
  }

  template <ElementType kElement>
  KVXFER_LANES_INLINE Pair load(const std::byte* from) {
    if constexpr (kElement == ElementType::kFloat32)
      return L::load32(from);
    else if constexpr (kElement == ElementType::kBFloat16)
      return L::from_bf16(L::load16(from));
    else
      return L::from_f16(L::load16(from));
  }

  KVXFER_LANES_INLINE Float round_to_bf16(Float value) {
    const Float odd = L::and32(L::right32(value, 16), L::fill_bits(1));
    return L::add32(L::add32(value, L::fill_bits(0x7fff)), odd);
  }

  // Of values that tame_bits() lets through.
  template <ElementType kElement, bool kStream = false>
  KVXFER_LANES_INLINE void store(std::byte* to, Pair value) {
    if constexpr (kElement == ElementType::kFloat32) {
      if constexpr (kStream)
        L::stream32(to, value);
      else
        L::store32(to, value);
    } else {
      Half halves;
      if constexpr (kElement == ElementType::kFloat16)
        halves = L::to_f16(value);
      else
        halves = L::high_words({round_to_bf16(value.even), round_to_bf16(value.odd)});
      if constexpr (kStream)
        L::stream16(to, halves);
      else
        L::store16(to, halves);
    }
  }

  KVXFER_LANES_INLINE void prefetch(const std::byte* row, size_t bytes) {
    for (size_t at = 0; at < bytes; at += 64) __builtin_prefetch(row + at);
  }

  template <ElementType kElement>
  KVXFER_LANES_INLINE Pair load_some(const std::byte* from, uint32_t count) {
    constexpr size_t kBytes = bytes_of(kElement);
    if (count >= kStep) return load<kElement>(from);
    Part part;
    return load<kElement>(Part::fill(part, from, kBytes * count));
  }
};

}  // namespace
}  // namespace kvxfer

#endif  // KVXFER_CODEC_CODEC_LANES_H_
