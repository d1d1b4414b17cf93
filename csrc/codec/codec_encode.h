#ifndef KVXFER_CODEC_CODEC_ENCODE_H_
#define KVXFER_CODEC_CODEC_ENCODE_H_

// The kernels that encode, over the Lanes of codec_lanes.h.

#include "codec/codec_lanes.h"

namespace kvxfer {
namespace {

template <class L>
struct Encoder {
  using S = Steps<L>;
  using Half = typename L::Half;
  using Float = typename L::Float;
  using Pair = typename L::Pair;
  using Part = typename S::Part;
  static constexpr uint32_t kStep = L::kStep;

  // Largest magnitude's bits among `count` elements.
  template <ElementType kElement>
  KVXFER_LANES_INLINE uint32_t measure(const std::byte* from, uint32_t count) {
    constexpr size_t kBytes = bytes_of(kElement);
    uint32_t i = 0;
    if constexpr (kElement == ElementType::kFloat32) {
      const Float magnitude = L::fill_bits(kMagnitudeBits);
      Pair most = S::both(L::fill_bits(0));
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
    return L::low_words(S::add(y, S::both(L::fill(0x1.8p23f))));
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
    const Pair factor = S::both(L::fill(inverse));
    uint32_t i = 0;
    for (; i + kStep <= count; i += kStep) {
      L::store_bytes(codes + i, codes_of<kScheme>(
                                    S::mul(S::template load<kElement>(from + kBytes * i), factor)));
    }
    if (i == count) return;
    Part part;
    const std::byte* rest = Part::fill(part, from + kBytes * i, kBytes * (count - i));
    const Half last = codes_of<kScheme>(S::mul(S::template load<kElement>(rest), factor));
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
        if (r + tile < job.rows) S::prefetch(job.row[r + tile], kBytes * job.content);
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

  // Smallest and largest of `count` <= kSteps * kStep channels over the rows that are not `raw`.
  template <ElementType kElement, uint32_t kSteps>
  KVXFER_LANES_INLINE void range(const EncodeJob& job, const RowMask& raw, uint32_t begin,
                                 uint32_t count, float* low, float* high) {
    constexpr size_t kBytes = bytes_of(kElement);
    Pair least[kSteps];
    Pair most[kSteps];
    for (uint32_t s = 0; s < kSteps; ++s) {
      least[s] = S::both(L::fill(0x1p127f));
      most[s] = S::both(L::fill(-0x1p127f));
    }
    const bool all = raw.none();
    for (uint32_t r = 0; r < job.rows; ++r) {
      if (!all && raw[r]) continue;
      const std::byte* from = job.row[r] + kBytes * begin;
      for (uint32_t s = 0; s < kSteps; ++s) {
        const Pair x = kSteps > 1 ? S::template load<kElement>(from + kBytes * s * kStep)
                                  : S::template load_some<kElement>(from, count);
        least[s] = S::min(least[s], x);
        most[s] = S::max(most[s], x);
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
        S::prefetch(job.row[r + kAhead], bytes_of(kElement) * job.content);
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
          const Pair x = S::template load<kElement>(from + kBytes * at);
          L::store_bytes(codes + at,
                         int8_codes(S::mul(S::sub(x, zeros[at / kStep]), inverses[at / kStep])));
        }
        if (at == width) continue;
        Part part;
        const Pair x = S::template load_some<kElement>(from + kBytes * at, width - at);
        L::store_bytes(part.bytes,
                       int8_codes(S::mul(S::sub(x, zeros[at / kStep]), inverses[at / kStep])));
        std::memcpy(codes + at, part.bytes, width - at);
      }
    }
    return raw;
  }

  template <Scheme kScheme, ElementType kElement>
  KVXFER_TARGET static RowMask encode(const EncodeJob& job) {
    if constexpr (kScheme == Scheme::kInt8Channel)
      return encode_channels<kElement>(job);
    else
      return encode_rows<kScheme, kElement>(job);
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
    const Pair factor = S::both(L::fill(inverse));
    uint64_t clamped = 0;
    uint32_t i = 0;
    for (; i + kStep <= count; i += kStep) {
      const Pair y = S::mul(L::load32(reinterpret_cast<const std::byte*>(values + i)), factor);
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

#endif  // KVXFER_CODEC_CODEC_ENCODE_H_
