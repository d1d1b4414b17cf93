#include "codec/codec_kernels.h"
#include "codec/float_bits.h"

namespace kvxfer {
namespace {

// The reference that the other variants are tested against: docs/coded_chunks.md, line by line.

template <ElementType kElement>
float load(const std::byte* row, uint32_t index) {
  if constexpr (kElement == ElementType::kFloat32) {
    float value = 0;
    std::memcpy(&value, row + size_t{4} * index, sizeof value);
    return value;
  } else {
    uint16_t bits = 0;
    std::memcpy(&bits, row + size_t{2} * index, sizeof bits);
    if constexpr (kElement == ElementType::kBFloat16) return float_of(uint32_t{bits} << 16);
    return from_small(bits, kFloat16);
  }
}

template <ElementType kElement>
void store(float value, std::byte* row, uint32_t index, uint64_t& clamped) {
  if constexpr (kElement == ElementType::kFloat32) {
    const uint32_t bits = is_nan(value) ? kNanBits : bits_of(value);
    std::memcpy(row + size_t{4} * index, &bits, sizeof bits);
  } else {
    const auto bits = static_cast<uint16_t>(to_small(value, small_float(kElement), clamped));
    std::memcpy(row + size_t{2} * index, &bits, sizeof bits);
  }
}

template <ElementType kElement>
bool goes_raw(const std::byte* row, uint32_t content) {
  constexpr float kLimit = kElement == ElementType::kFloat16 ? 0x1p15f : 0x1p100f;
  bool raw = false;
  for (uint32_t i = 0; i < content; ++i) raw |= !(std::fabs(load<kElement>(row, i)) < kLimit);
  return raw;
}

template <Scheme kScheme>
std::byte to_code(float scaled) {
  const float largest = largest_code(kScheme);
  const float clamped = std::clamp(scaled, -largest, largest);
  if constexpr (kScheme == Scheme::kInt8) {
    return static_cast<std::byte>(static_cast<int>(std::nearbyint(clamped)));
  } else {
    uint64_t ignored = 0;
    const uint32_t code =
        to_small(clamped, kScheme == Scheme::kFloat8E4M3 ? kFloat8E4M3FN : kFloat8E5M2, ignored);
    return static_cast<std::byte>(code == 0x80 ? 0 : code);
  }
}

template <Scheme kScheme>
float from_code(std::byte code) {
  if constexpr (kScheme == Scheme::kInt8) {
    return static_cast<float>(static_cast<int8_t>(code));
  } else if constexpr (kScheme == Scheme::kInt8Channel) {
    return static_cast<float>(static_cast<uint8_t>(code));
  } else {
    return from_small(static_cast<uint32_t>(code),
                      kScheme == Scheme::kFloat8E4M3 ? kFloat8E4M3FN : kFloat8E5M2);
  }
}

template <Scheme kScheme, ElementType kElement>
RowMask encode_rows(const EncodeJob& job) {
  RowMask raw;
  std::byte* scales = job.scales;
  for (uint32_t r = 0; r < job.rows; ++r) {
    const std::byte* row = job.row[r];
    std::byte* codes = job.codes + size_t{r} * job.content;
    raw[r] = goes_raw<kElement>(row, job.content);
    for (uint32_t begin = 0; begin < job.content; begin += job.group) {
      const uint32_t end = std::min<uint32_t>(begin + job.group, job.content);
      float amax = 0;
      for (uint32_t i = begin; i < end && !raw[r]; ++i) {
        amax = std::max(amax, std::fabs(load<kElement>(row, i)));
      }
      const float scale =
          scale_up(std::max(amax / largest_code(kScheme), kSmallestScale), job.scale);
      store_scale(scale, job.scale, scales);
      scales += scale_bytes(job.scale);
      for (uint32_t i = begin; i < end; ++i) {
        codes[i] =
            raw[r] ? std::byte{0} : to_code<kScheme>(load<kElement>(row, i) * (1.0f / scale));
      }
    }
  }
  return raw;
}

template <ElementType kElement>
RowMask encode_channels(const EncodeJob& job) {
  const ScaleFormat format = job.scale;
  RowMask raw;
  for (uint32_t r = 0; r < job.rows; ++r) raw[r] = goes_raw<kElement>(job.row[r], job.content);
  for (uint32_t i = 0; i < job.content; ++i) {
    float low = 0;
    float high = 0;
    bool any = false;
    for (uint32_t r = 0; r < job.rows; ++r) {
      if (raw[r]) continue;
      const float x = load<kElement>(job.row[r], i);
      low = any ? std::min(low, x) : x;
      high = any ? std::max(high, x) : x;
      any = true;
    }
    const float zero = zero_down(low, format);
    const float scale =
        any ? scale_up(std::max((high - zero) / 255.0f, kSmallestScale), format) : 0.0f;
    const size_t at = i * scale_bytes(format);
    store_scale(scale, format, job.scales + at);
    store_scale(zero, format, job.scales + job.content * scale_bytes(format) + at);
    for (uint32_t r = 0; r < job.rows; ++r) {
      std::byte code{0};
      if (!raw[r]) {
        const float scaled = (load<kElement>(job.row[r], i) - zero) * (1.0f / scale);
        code = static_cast<std::byte>(
            static_cast<int>(std::clamp(std::nearbyint(scaled), 0.0f, 255.0f)));
      }
      job.codes[size_t{r} * job.content + i] = code;
    }
  }
  return raw;
}

template <Scheme kScheme, ElementType kElement>
bool decode_rows(const DecodeJob& job, uint64_t& clamped) {
  const std::byte* scales = job.scales;
  for (uint32_t r = 0; r < job.rows; ++r) {
    const std::byte* codes = job.codes + size_t{r} * job.content;
    for (uint32_t begin = 0; begin < job.content; begin += job.group) {
      const uint32_t end = std::min<uint32_t>(begin + job.group, job.content);
      const float scale = load_scale(scales, job.scale);
      scales += scale_bytes(job.scale);
      for (uint32_t i = begin; i < end; ++i) {
        store<kElement>(from_code<kScheme>(codes[i]) * scale, job.row[r], i, clamped);
      }
    }
  }
  return true;
}

template <ElementType kElement>
bool decode_channels(const DecodeJob& job, uint64_t& clamped) {
  const ScaleFormat format = job.scale;
  for (uint32_t i = 0; i < job.content; ++i) {
    const std::byte* at = job.scales + i * scale_bytes(format);
    const float scale = load_scale(at, format);
    const float zero = load_scale(at + job.content * scale_bytes(format), format);
    for (uint32_t r = 0; r < job.rows; ++r) {
      const float number = from_code<Scheme::kInt8Channel>(job.codes[size_t{r} * job.content + i]);
      store<kElement>(number * scale + zero, job.row[r], i, clamped);
    }
  }
  return true;
}

struct Scalar {
  template <Scheme kScheme, ElementType kElement>
  static RowMask encode(const EncodeJob& job) {
    if constexpr (kScheme == Scheme::kInt8Channel)
      return encode_channels<kElement>(job);
    else
      return encode_rows<kScheme, kElement>(job);
  }

  template <Scheme kScheme, ElementType kElement>
  static bool decode(const DecodeJob& job, uint64_t& clamped) {
    if constexpr (kScheme == Scheme::kInt8Channel)
      return decode_channels<kElement>(job, clamped);
    else
      return decode_rows<kScheme, kElement>(job, clamped);
  }

  template <ElementType kFrom, ElementType kTo>
  static uint64_t convert(const std::byte* from, uint32_t count, std::byte* to) {
    uint64_t clamped = 0;
    for (uint32_t i = 0; i < count; ++i) store<kTo>(load<kFrom>(from, i), to, i, clamped);
    return clamped;
  }

  template <ElementType kTo>
  static uint64_t to_float8(const float* values, float inverse, uint32_t count, std::byte* to) {
    uint64_t clamped = 0;
    for (uint32_t i = 0; i < count; ++i) {
      to[i] = static_cast<std::byte>(to_small(values[i] * inverse, small_float(kTo), clamped));
    }
    return clamped;
  }
};

}  // namespace

constinit const CodecKernels kScalarCodec = make_codec<Scalar>(kScalarKernels);

}  // namespace kvxfer
