#ifndef KVXFER_CODEC_CODEC_LANES_H_
#define KVXFER_CODEC_CODEC_LANES_H_

// The kernels that all SIMD variants share. A variant's file defines KVXFER_TARGET as its function
// attribute before it includes this, and then a class Lanes over its registers:
//   kStep                         elements that are worked on at a time, a multiple of 8
//   kRangeSteps                   steps whose smallest and largest numbers fit in registers
//   Float, Half                   kStep / 2 floats; kStep 16-bit lanes
//   Pair {even, odd}              kStep floats: the elements with even index and those with odd
//   load16, store16, load32, store32, load_bytes, store_bytes     kStep elements, in their order
//   stream16, stream32, fence     the stores past the caches, into whole aligned lines
//   from_bf16, from_f16, to_f16, from_i16                         between Half and Pair
//   low_words, high_words         the halves of a Pair's 32-bit lanes, as Half in their order
//   what they do is plain from their names: fill, mul, add, sub, min, max, div, and32, max32,
//   add32, right32, fma, zero16, fill16, and16, max16, add16, abs16, sub_to_zero16, left16,
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

constexpr float largest_code(Scheme scheme) {
  return scheme == Scheme::kFloat8E4M3 ? 448.0f : scheme == Scheme::kFloat8E5M2 ? 57344.0f : 127.0f;
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

template <class L>
struct Codec {
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

  // Whether the rows, cut into pieces of `unit` elements, are whole lines that can be written past
  // the caches: that spares reading them first, which costs more than all the rest.
  template <ElementType kElement>
  KVXFER_LANES_INLINE bool can_stream(const DecodeJob& job, uint32_t unit) {
    uintptr_t bits = job.content * bytes_of(kElement);
    for (uint32_t r = 0; r < job.rows; ++r) bits |= reinterpret_cast<uintptr_t>(job.row[r]);
    return bits % 64 == 0 && unit % kStep == 0 && job.content % kStep == 0;
  }

  // Largest magnitude's bits among `count` elements.
  template <ElementType kElement>
  KVXFER_LANES_INLINE uint32_t measure(const std::byte* from, uint32_t count) {
    constexpr size_t kBytes = bytes_of(kElement);
    uint32_t i = 0;
    if constexpr (kElement == ElementType::kFloat32) {
      const Float magnitude = L::fill_bits(kMagnitudeBits);
      Pair most = both(L::fill_bits(0));
      for (; i + kStep <= count; i += kStep) {
        const Pair x = L::load32(from + kBytes * i);
        most.even = L::max32(most.even, L::and32(x.even, magnitude));
        most.odd = L::max32(most.odd, L::and32(x.odd, magnitude));
      }
      if (i < count) {
        Part part;
        const Pair x = L::load32(Part::fill(part, from + kBytes * i, kBytes * (count - i)));
        most.even = L::max32(most.even, L::and32(x.even, magnitude));
        most.odd = L::max32(most.odd, L::and32(x.odd, magnitude));
      }
      return L::reduce32(L::max32(most.even, most.odd));
    } else {
      const Half magnitude = L::fill16(0x7fff);
      Half most = L::fill16(0);
      for (; i + kStep <= count; i += kStep) {
        most = L::max16(most, L::and16(L::load16(from + kBytes * i), magnitude));
      }
      if (i < count) {
        Part part;
        const std::byte* rest = Part::fill(part, from + kBytes * i, kBytes * (count - i));
        most = L::max16(most, L::and16(L::load16(rest), magnitude));
      }
      return L::reduce16(most);
    }
  }

  template <ElementType kElement>
  KVXFER_LANES_INLINE float measured(uint32_t bits) {
    if constexpr (kElement == ElementType::kFloat32)
      return float_of(bits);
    else if constexpr (kElement == ElementType::kBFloat16)
      return float_of(bits << 16);
    else
      return from_small(bits, kFloat16);
  }

  // Codes of floats in the low bytes of the result. A number is rounded to its few bits of mantissa
  // by adding one and a half times the power of two whose last place is the number's last bit to be
  // kept: what comes out holds the mantissa, with its sign, in its lowest bits. What underflows
  // gets the last place of the smallest normal number. The product in fma() is exact.
  template <int kMantissa, int kBias, bool kNegativeZero>
  KVXFER_LANES_INLINE Half float8_codes(Pair y) {
    const Float exponents = L::fill_bits(kInfinityBits);
    const Float smallest = L::fill_bits(static_cast<uint32_t>(128 - kBias) << 23);
    const Float ratio = L::fill(1.5f * static_cast<float>(1 << (23 - kMantissa)));
    const Float even = L::max32(L::and32(y.even, exponents), smallest);
    const Float odd = L::max32(L::and32(y.odd, exponents), smallest);
    const Half mantissa = L::low_words({L::fma(ratio, even, y.even), L::fma(ratio, odd, y.odd)});
    const Half upper = L::high_words(y);
    const Half exponent = L::template right16<7 - kMantissa>(L::sub_to_zero16(
        L::and16(upper, L::fill16(0x7f80)), L::fill16(static_cast<uint16_t>((128 - kBias) << 7))));
    const Half negative =
        L::and16(L::template right16<8>(kNegativeZero ? upper : mantissa), L::fill16(0x80));
    return L::add16(L::add16(L::abs16(mantissa), exponent), negative);
  }

  // Of floats that an 8-bit integer can hold, with or without a sign.
  KVXFER_LANES_INLINE Half int8_codes(Pair y) {
    return L::low_words(add(y, both(L::fill(0x1.8p23f))));
  }

  template <Scheme kScheme>
  KVXFER_LANES_INLINE Half codes_of(Pair y) {
    if constexpr (kScheme == Scheme::kFloat8E4M3)
      return float8_codes<3, 7, false>(y);
    else if constexpr (kScheme == Scheme::kFloat8E5M2)
      return float8_codes<2, 15, false>(y);
    else
      return int8_codes(y);
  }

  template <Scheme kScheme, ElementType kElement>
  KVXFER_LANES_INLINE void encode_group(const std::byte* from, uint32_t count, float inverse,
                                        std::byte* codes) {
    constexpr size_t kBytes = bytes_of(kElement);
    const Pair factor = both(L::fill(inverse));
    uint32_t i = 0;
    for (; i + kStep <= count; i += kStep) {
      L::store_bytes(codes + i, codes_of<kScheme>(mul(load<kElement>(from + kBytes * i), factor)));
    }
    if (i == count) return;
    Part part;
    const std::byte* rest = Part::fill(part, from + kBytes * i, kBytes * (count - i));
    const Half last = codes_of<kScheme>(mul(load<kElement>(rest), factor));
    L::store_bytes(part.bytes, last);
    std::memcpy(codes + i, part.bytes, count - i);
  }

  KVXFER_LANES_INLINE void make_scales(const float* amax, uint32_t count, float largest,
                                       ScaleFormat format, float* scale, float* inverse) {
    for (uint32_t i = 0; i < count; ++i) scale[i] = std::max(amax[i] / largest, kSmallestScale);
    if (format == ScaleFormat::kBFloat16) {
      for (uint32_t i = 0; i < count; ++i) scale[i] = scale_up(scale[i], ScaleFormat::kBFloat16);
    } else if (format == ScaleFormat::kE8M0) {
      for (uint32_t i = 0; i < count; ++i) scale[i] = scale_up(scale[i], ScaleFormat::kE8M0);
    }
    for (uint32_t i = 0; i < count; ++i) inverse[i] = 1.0f / scale[i];
  }

  KVXFER_LANES_INLINE void prefetch(const std::byte* row, size_t bytes) {
    for (size_t at = 0; at < bytes; at += 64) __builtin_prefetch(row + at);
  }

  template <Scheme kScheme, ElementType kElement>
  KVXFER_TARGET static RowMask encode_rows(const EncodeJob& job) {
    constexpr size_t kBytes = bytes_of(kElement);
    const uint32_t groups = (job.content + job.group - 1) / job.group;
    if (groups > kTileScales) {
      return kScalarCodec.encode[static_cast<size_t>(kScheme) - 1][static_cast<size_t>(kElement)](
          job);
    }
    const uint32_t tile = std::clamp(kTileScales / groups, uint32_t{1}, kTileRows);
    float amax[kTileScales];
    float scale[kTileScales];
    float inverse[kTileScales];
    RowMask raw;
    for (uint32_t first = 0; first < job.rows; first += tile) {
      const uint32_t end = std::min(first + tile, job.rows);
      uint32_t count = 0;
      for (uint32_t r = first; r < end; ++r) {
        bool wild = false;
        for (uint32_t g = 0; g < groups; ++g) {
          const uint32_t begin = g * job.group;
          const uint32_t most = measure<kElement>(job.row[r] + kBytes * begin,
                                                  std::min(job.group, job.content - begin));
          wild |= most >= raw_limit(kElement);
          amax[count + g] = measured<kElement>(most);
        }
        if (wild) {
          raw.set(r);
          for (uint32_t g = 0; g < groups; ++g) amax[count + g] = 0;
        }
        count += groups;
      }
      make_scales(amax, count, largest_code(kScheme), job.scale, scale, inverse);
      store_scales(scale, count, job.scale,
                   job.scales + size_t{first} * groups * scale_bytes(job.scale));
      for (uint32_t r = first; r < end; ++r) {
        if (r + tile < job.rows) prefetch(job.row[r + tile], kBytes * job.content);
        std::byte* codes = job.codes + size_t{r} * job.content;
        if (raw[r]) {
          std::memset(codes, 0, job.content);
          continue;
        }
        for (uint32_t g = 0; g < groups; ++g) {
          const uint32_t begin = g * job.group;
          encode_group<kScheme, kElement>(job.row[r] + kBytes * begin,
                                          std::min(job.group, job.content - begin),
                                          inverse[(r - first) * groups + g], codes + begin);
        }
      }
    }
    return raw;
  }

  KVXFER_LANES_INLINE void store_scales(const float* scale, uint32_t count, ScaleFormat format,
                                        std::byte* to) {
    if (format == ScaleFormat::kFloat32) {
      std::memcpy(to, scale, sizeof(float) * count);
    } else if (format == ScaleFormat::kBFloat16) {
      for (uint32_t i = 0; i < count; ++i) {
        store_scale(scale[i], ScaleFormat::kBFloat16, to + size_t{2} * i);
      }
    } else {
      for (uint32_t i = 0; i < count; ++i) store_scale(scale[i], ScaleFormat::kE8M0, to + i);
    }
  }

  // Numbers that codes stand for, but for a power of two in the float8 schemes. Gathers in `most`
  // what tells codes that no encoder makes.
  template <Scheme kScheme>
  KVXFER_LANES_INLINE Pair numbers_of(Half codes, Half& most) {
    if constexpr (kScheme == Scheme::kInt8Channel) {
      return L::from_i16(codes);
    } else {
      const Half upper = L::template left16<8>(codes);
      if constexpr (kScheme == Scheme::kInt8) {
        return L::from_i16(L::template arithmetic_right16<8>(upper));
      } else {
        most = L::max16(most, L::and16(codes, L::fill16(0x7f)));
        if constexpr (kScheme == Scheme::kFloat8E5M2) return L::from_f16(upper);
        // As a float16 whose exponent has four bits: 2^-8 of the number.
        else
          return L::from_f16(L::and16(L::template arithmetic_right16<1>(upper), L::fill16(0xbfff)));
      }
    }
  }

  template <Scheme kScheme, ElementType kElement, bool kStream>
  KVXFER_LANES_INLINE void decode_group(const std::byte* codes, uint32_t count, float scale,
                                        std::byte* to, Half& most) {
    constexpr size_t kBytes = bytes_of(kElement);
    const Pair factor = both(L::fill(kScheme == Scheme::kFloat8E4M3 ? scale * 256.0f : scale));
    uint32_t i = 0;
    for (; i + kStep <= count; i += kStep) {
      const Pair numbers = numbers_of<kScheme>(L::load_bytes(codes + i), most);
      store<kElement, kStream>(to + kBytes * i, mul(numbers, factor));
    }
    if (i == count) return;
    Part part;
    const Half rest = L::load_bytes(Part::fill(part, codes + i, count - i));
    store<kElement>(part.bytes, mul(numbers_of<kScheme>(rest, most), factor));
    std::memcpy(to + kBytes * i, part.bytes, kBytes * (count - i));
  }

  KVXFER_LANES_INLINE void load_scales(const std::byte* from, uint32_t count, ScaleFormat format,
                                       float* scale) {
    if (format == ScaleFormat::kFloat32) {
      std::memcpy(scale, from, sizeof(float) * count);
    } else if (format == ScaleFormat::kBFloat16) {
      for (uint32_t i = 0; i < count; ++i) {
        scale[i] = load_scale(from + size_t{2} * i, ScaleFormat::kBFloat16);
      }
    } else {
      for (uint32_t i = 0; i < count; ++i) scale[i] = load_scale(from + i, ScaleFormat::kE8M0);
    }
  }

  template <Scheme kScheme, ElementType kElement, bool kStream>
  KVXFER_TARGET static bool decode_rows(const DecodeJob& job) {
    constexpr size_t kBytes = bytes_of(kElement);
    const uint32_t groups = (job.content + job.group - 1) / job.group;
    if (groups > kTileScales) return false;
    const uint32_t tile = std::clamp(kTileScales / groups, uint32_t{1}, kTileRows);
    float scale[kTileScales];
    Half most = L::fill16(0);
    for (uint32_t first = 0; first < job.rows; first += tile) {
      const uint32_t end = std::min(first + tile, job.rows);
      const uint32_t count = (end - first) * groups;
      load_scales(job.scales + size_t{first} * groups * scale_bytes(job.scale), count, job.scale,
                  scale);
      bool tame = true;
      for (uint32_t i = 0; i < count; ++i) {
        tame &= std::fabs(scale[i]) <= tame_scale(kScheme, kElement);
      }
      if (!tame) return false;
      for (uint32_t r = first; r < end; ++r) {
        if (!kStream && r + tile < job.rows) prefetch(job.row[r + tile], kBytes * job.content);
        const std::byte* codes = job.codes + size_t{r} * job.content;
        for (uint32_t g = 0; g < groups; ++g) {
          const uint32_t begin = g * job.group;
          decode_group<kScheme, kElement, kStream>(
              codes + begin, std::min(job.group, job.content - begin),
              scale[(r - first) * groups + g], job.row[r] + kBytes * begin, most);
        }
      }
    }
    if constexpr (kStream) L::fence();
    return !is_float8_scheme(kScheme) ||
           L::reduce16(most) <= (kScheme == Scheme::kFloat8E4M3 ? 0x7e : 0x7b);
  }

  template <ElementType kElement>
  KVXFER_LANES_INLINE Pair load_some(const std::byte* from, uint32_t count) {
    constexpr size_t kBytes = bytes_of(kElement);
    if (count >= kStep) return load<kElement>(from);
    Part part;
    return load<kElement>(Part::fill(part, from, kBytes * count));
  }

  // Smallest and largest of `count` <= kSteps * kStep channels over the rows that are not `raw`.
  template <ElementType kElement, uint32_t kSteps>
  KVXFER_LANES_INLINE void range(const EncodeJob& job, const RowMask& raw, uint32_t begin,
                                 uint32_t count, float* low, float* high) {
    constexpr size_t kBytes = bytes_of(kElement);
    Pair least[kSteps];
    Pair most[kSteps];
    for (uint32_t s = 0; s < kSteps; ++s) {
      least[s] = both(L::fill(0x1p127f));
      most[s] = both(L::fill(-0x1p127f));
    }
    const bool all = raw.none();
    for (uint32_t r = 0; r < job.rows; ++r) {
      if (!all && raw[r]) continue;
      const std::byte* from = job.row[r] + kBytes * begin;
      for (uint32_t s = 0; s < kSteps; ++s) {
        const Pair x = kSteps > 1 ? load<kElement>(from + kBytes * s * kStep)
                                  : load_some<kElement>(from, count);
        least[s] = min(least[s], x);
        most[s] = max(most[s], x);
      }
    }
    for (uint32_t s = 0; s < kSteps; ++s) {
      L::store32(reinterpret_cast<std::byte*>(low + s * kStep), least[s]);
      L::store32(reinterpret_cast<std::byte*>(high + s * kStep), most[s]);
    }
  }

  // From the smallest numbers to zero points, from the largest to scales.
  KVXFER_LANES_INLINE void make_channel_scales(uint32_t count, ScaleFormat format, float* zero,
                                               float* scale, float* inverse) {
    const bool bf16 = format == ScaleFormat::kBFloat16;
    for (uint32_t i = 0; i < count; ++i) {
      zero[i] = bf16 ? zero_down(zero[i], ScaleFormat::kBFloat16) : zero[i] + 0.0f;
    }
    for (uint32_t i = 0; i < count; ++i) {
      scale[i] = std::max((scale[i] - zero[i]) / 255.0f, kSmallestScale);
    }
    if (bf16) {
      for (uint32_t i = 0; i < count; ++i) scale[i] = scale_up(scale[i], ScaleFormat::kBFloat16);
    }
    for (uint32_t i = 0; i < count; ++i) inverse[i] = 1.0f / scale[i];
  }

  template <ElementType kElement>
  KVXFER_LANES_INLINE RowMask mark_rows(const EncodeJob& job) {
    constexpr uint32_t kAhead = 8;
    RowMask raw;
    for (uint32_t r = 0; r < job.rows; ++r) {
      if (r + kAhead < job.rows) {
        prefetch(job.row[r + kAhead], bytes_of(kElement) * job.content);
      }
      if (measure<kElement>(job.row[r], job.content) >= raw_limit(kElement)) raw.set(r);
    }
    return raw;
  }

  template <ElementType kElement>
  KVXFER_TARGET static RowMask encode_channels(const EncodeJob& job) {
    constexpr size_t kBytes = bytes_of(kElement);
    constexpr uint32_t kWide = L::kRangeSteps * kStep;
    const RowMask raw = mark_rows<kElement>(job);
    const size_t scales = scale_bytes(job.scale);
    if (raw.count() == job.rows) {
      std::memset(job.scales, 0, 2 * scales * job.content);
      std::memset(job.codes, 0, size_t{job.rows} * job.content);
      return raw;
    }
    alignas(64) float zero[kStripChannels];
    alignas(64) float scale[kStripChannels];
    alignas(64) float inverse[kStripChannels];
    Pair zeros[kStripChannels / kStep];
    Pair inverses[kStripChannels / kStep];
    for (uint32_t strip = 0; strip < job.content; strip += kStripChannels) {
      const uint32_t width = std::min(job.content - strip, kStripChannels);
      uint32_t i = 0;
      for (; i + kWide <= width; i += kWide) {
        range<kElement, L::kRangeSteps>(job, raw, strip + i, kWide, zero + i, scale + i);
      }
      for (; i < width; i += kStep) {
        range<kElement, 1>(job, raw, strip + i, std::min(width - i, kStep), zero + i, scale + i);
      }
      make_channel_scales(i, job.scale, zero, scale, inverse);
      std::byte* const scales_at = job.scales + scales * strip;
      store_scales(scale, width, job.scale, scales_at);
      store_scales(zero, width, job.scale, scales_at + scales * job.content);
      for (uint32_t s = 0; s * kStep < width; ++s) {
        zeros[s] = L::load32(reinterpret_cast<const std::byte*>(zero + s * kStep));
        inverses[s] = L::load32(reinterpret_cast<const std::byte*>(inverse + s * kStep));
      }
      for (uint32_t r = 0; r < job.rows; ++r) {
        std::byte* codes = job.codes + size_t{r} * job.content + strip;
        if (raw[r]) {
          std::memset(codes, 0, width);
          continue;
        }
        const std::byte* from = job.row[r] + kBytes * strip;
        uint32_t at = 0;
        for (; at + kStep <= width; at += kStep) {
          const Pair x = load<kElement>(from + kBytes * at);
          L::store_bytes(codes + at,
                         int8_codes(mul(sub(x, zeros[at / kStep]), inverses[at / kStep])));
        }
        if (at == width) continue;
        Part part;
        const Pair x = load_some<kElement>(from + kBytes * at, width - at);
        L::store_bytes(part.bytes,
                       int8_codes(mul(sub(x, zeros[at / kStep]), inverses[at / kStep])));
        std::memcpy(codes + at, part.bytes, width - at);
      }
    }
    return raw;
  }

  template <ElementType kElement, bool kStream>
  KVXFER_TARGET static bool decode_channels(const DecodeJob& job) {
    constexpr size_t kBytes = bytes_of(kElement);
    constexpr float kLargest = kElement == ElementType::kFloat16 ? 65504.0f : 0x1p100f;
    constexpr uint32_t kAhead = 16;
    const size_t scales = scale_bytes(job.scale);
    alignas(64) float zero[kStripChannels] = {};
    alignas(64) float scale[kStripChannels] = {};
    Pair zero_pairs[kStripChannels / kStep];
    Pair scale_pairs[kStripChannels / kStep];
    Half ignored = L::fill16(0);
    for (uint32_t strip = 0; strip < job.content; strip += kStripChannels) {
      const uint32_t width = std::min(job.content - strip, kStripChannels);
      const std::byte* const scales_at = job.scales + scales * strip;
      load_scales(scales_at, width, job.scale, scale);
      load_scales(scales_at + scales * job.content, width, job.scale, zero);
      bool tame = true;
      for (uint32_t i = 0; i < width; ++i) {
        tame &= std::fabs(zero[i]) + 256.0f * std::fabs(scale[i]) <= kLargest;
      }
      if (!tame) return false;
      for (uint32_t s = 0; s * kStep < width; ++s) {
        zero_pairs[s] = L::load32(reinterpret_cast<const std::byte*>(zero + s * kStep));
        scale_pairs[s] = L::load32(reinterpret_cast<const std::byte*>(scale + s * kStep));
      }
      for (uint32_t r = 0; r < job.rows; ++r) {
        if (!kStream && r + kAhead < job.rows) {
          prefetch(job.row[r + kAhead] + kBytes * strip, kBytes * width);
        }
        const std::byte* codes = job.codes + size_t{r} * job.content + strip;
        std::byte* to = job.row[r] + kBytes * strip;
        uint32_t at = 0;
        for (; at + kStep <= width; at += kStep) {
          const Pair x = numbers_of<Scheme::kInt8Channel>(L::load_bytes(codes + at), ignored);
          store<kElement, kStream>(to + kBytes * at,
                                   add(mul(x, scale_pairs[at / kStep]), zero_pairs[at / kStep]));
        }
        if (at == width) continue;
        Part part;
        const Half rest = L::load_bytes(Part::fill(part, codes + at, width - at));
        const Pair x = numbers_of<Scheme::kInt8Channel>(rest, ignored);
        store<kElement>(part.bytes, add(mul(x, scale_pairs[at / kStep]), zero_pairs[at / kStep]));
        std::memcpy(to + kBytes * at, part.bytes, kBytes * (width - at));
      }
    }
    if constexpr (kStream) L::fence();
    return true;
  }

  template <Scheme kScheme, ElementType kElement>
  KVXFER_TARGET static RowMask encode(const EncodeJob& job) {
    if constexpr (kScheme == Scheme::kInt8Channel)
      return encode_channels<kElement>(job);
    else
      return encode_rows<kScheme, kElement>(job);
  }

  // What is tame needs no clamping, so nothing is added to `clamped`.
  template <Scheme kScheme, ElementType kElement>
  KVXFER_TARGET static bool decode(const DecodeJob& job, uint64_t&) {
    if constexpr (kScheme == Scheme::kInt8Channel) {
      return can_stream<kElement>(job, job.content) ? decode_channels<kElement, true>(job)
                                                    : decode_channels<kElement, false>(job);
    } else {
      return can_stream<kElement>(job, job.group) ? decode_rows<kScheme, kElement, true>(job)
                                                  : decode_rows<kScheme, kElement, false>(job);
    }
  }

  template <ElementType kFrom, ElementType kTo>
  KVXFER_TARGET static uint64_t convert(const std::byte* from, uint32_t count, std::byte* to) {
    const auto scalar = kScalarCodec.convert[static_cast<size_t>(kFrom)][static_cast<size_t>(kTo)];
    constexpr size_t kRead = bytes_of(kFrom);
    constexpr size_t kWritten = bytes_of(kTo);
    uint64_t clamped = 0;
    uint32_t i = 0;
    for (; i + kStep <= count; i += kStep) {
      const Pair x = load<kFrom>(from + kRead * i);
      if (L::any_above(x, tame_bits(kTo))) {
        clamped += scalar(from + kRead * i, kStep, to + kWritten * i);
      } else {
        store<kTo>(to + kWritten * i, x);
      }
    }
    if (i < count) clamped += scalar(from + kRead * i, count - i, to + kWritten * i);
    return clamped;
  }

  template <ElementType kTo>
  KVXFER_TARGET static uint64_t to_float8(const float* values, float inverse, uint32_t count,
                                          std::byte* to) {
    constexpr bool kFourBits =
        kTo == ElementType::kFloat8E4M3FN || kTo == ElementType::kFloat8E4M3FNUZ;
    constexpr bool kFnuz =
        kTo == ElementType::kFloat8E4M3FNUZ || kTo == ElementType::kFloat8E5M2FNUZ;
    constexpr int kMantissa = kFourBits ? 3 : 2;
    constexpr int kBias = (kFourBits ? 7 : 15) + (kFnuz ? 1 : 0);
    constexpr float kLargest = kFourBits ? (kFnuz ? 240.0f : 448.0f) : 57344.0f;
    const auto scalar = kScalarCodec.to_float8[float8_index(kTo)];
    const Pair factor = both(L::fill(inverse));
    uint64_t clamped = 0;
    uint32_t i = 0;
    for (; i + kStep <= count; i += kStep) {
      const Pair y = mul(L::load32(reinterpret_cast<const std::byte*>(values + i)), factor);
      if (L::any_above(y, bits_of(kLargest))) {
        clamped += scalar(values + i, inverse, kStep, to + i);
      } else {
        L::store_bytes(to + i, float8_codes<kMantissa, kBias, !kFnuz>(y));
      }
    }
    if (i < count) clamped += scalar(values + i, inverse, count - i, to + i);
    return clamped;
  }
};

}  // namespace
}  // namespace kvxfer

#endif  // KVXFER_CODEC_CODEC_LANES_H_
