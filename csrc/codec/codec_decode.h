#ifndef KVXFER_CODEC_CODEC_DECODE_H_
#define KVXFER_CODEC_CODEC_DECODE_H_

// The kernels that decode and convert, over the Lanes of codec_lanes.h.

#include "codec/codec_lanes.h"

namespace kvxfer {
namespace {

template <class L>
struct Decoder {
  using S = Steps<L>;
  using Half = typename L::Half;
  using Float = typename L::Float;
  using Pair = typename L::Pair;
  using Part = typename S::Part;
  static constexpr uint32_t kStep = L::kStep;

  // Whether the rows, cut into pieces of `unit` elements, are whole lines that can be written past
  // the caches: that spares reading them first, which costs more than all the rest.
  template <ElementType kElement>
  KVXFER_LANES_INLINE bool can_stream(const DecodeJob& job, uint32_t unit) {
    uintptr_t bits = job.content * bytes_of(kElement);
    for (uint32_t r = 0; r < job.rows; ++r) bits |= reinterpret_cast<uintptr_t>(job.row[r]);
    return bits % 64 == 0 && unit % kStep == 0 && job.content % kStep == 0;
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
    const Pair factor = S::both(L::fill(kScheme == Scheme::kFloat8E4M3 ? scale * 256.0f : scale));
    uint32_t i = 0;
    for (; i + kStep <= count; i += kStep) {
      const Pair numbers = numbers_of<kScheme>(L::load_bytes(codes + i), most);
      S::template store<kElement, kStream>(to + kBytes * i, S::mul(numbers, factor));
    }
    if (i == count) return;
    Part part;
    const Half rest = L::load_bytes(Part::fill(part, codes + i, count - i));
    S::template store<kElement>(part.bytes, S::mul(numbers_of<kScheme>(rest, most), factor));
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
      if (!tame) {
        if constexpr (kStream) L::fence();
        return false;
      }
      for (uint32_t r = first; r < end; ++r) {
        if (!kStream && r + tile < job.rows) S::prefetch(job.row[r + tile], kBytes * job.content);
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
      if (!tame) {
        if constexpr (kStream) L::fence();
        return false;
      }
      for (uint32_t s = 0; s * kStep < width; ++s) {
        zero_pairs[s] = L::load32(reinterpret_cast<const std::byte*>(zero + s * kStep));
        scale_pairs[s] = L::load32(reinterpret_cast<const std::byte*>(scale + s * kStep));
      }
      for (uint32_t r = 0; r < job.rows; ++r) {
        if (!kStream && r + kAhead < job.rows) {
          S::prefetch(job.row[r + kAhead] + kBytes * strip, kBytes * width);
        }
        const std::byte* codes = job.codes + size_t{r} * job.content + strip;
        std::byte* to = job.row[r] + kBytes * strip;
        uint32_t at = 0;
        for (; at + kStep <= width; at += kStep) {
          const Pair x = numbers_of<Scheme::kInt8Channel>(L::load_bytes(codes + at), ignored);
          S::template store<kElement, kStream>(
              to + kBytes * at, S::add(S::mul(x, scale_pairs[at / kStep]), zero_pairs[at / kStep]));
        }
        if (at == width) continue;
        Part part;
        const Half rest = L::load_bytes(Part::fill(part, codes + at, width - at));
        const Pair x = numbers_of<Scheme::kInt8Channel>(rest, ignored);
        S::template store<kElement>(
            part.bytes, S::add(S::mul(x, scale_pairs[at / kStep]), zero_pairs[at / kStep]));
        std::memcpy(to + kBytes * at, part.bytes, kBytes * (width - at));
      }
    }
    if constexpr (kStream) L::fence();
    return true;
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
      const Pair x = S::template load<kFrom>(from + kRead * i);
      if (L::any_above(x, tame_bits(kTo))) {
        clamped += scalar(from + kRead * i, kStep, to + kWritten * i);
      } else {
        S::template store<kTo>(to + kWritten * i, x);
      }
    }
    if (i < count) clamped += scalar(from + kRead * i, count - i, to + kWritten * i);
    return clamped;
  }
};

}  // namespace
}  // namespace kvxfer

#endif  // KVXFER_CODEC_CODEC_DECODE_H_
