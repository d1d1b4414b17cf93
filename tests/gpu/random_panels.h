#ifndef KVXFER_TESTS_GPU_RANDOM_PANELS_H_
#define KVXFER_TESTS_GPU_RANDOM_PANELS_H_

#include <cmath>
#include <cstring>
#include <vector>

#include "gpu/random_cache.h"
#include "kvxfer/panel_plan.h"

namespace kvxfer {

// A cache of numbers, some of them odd, and a way to encode them.
inline Encoding random_encoding(Random& random, ElementType element, uint32_t content) {
  Encoding encoding;
  if (element == ElementType::kUInt8) return encoding;
  encoding.scheme = one_of(random, {Scheme::kRaw, Scheme::kFloat8E4M3, Scheme::kFloat8E4M3,
                                    Scheme::kFloat8E5M2, Scheme::kInt8, Scheme::kInt8Channel});
  encoding.scale = one_of(random, {ScaleFormat::kFloat32, ScaleFormat::kBFloat16});
  const bool float8 =
      encoding.scheme == Scheme::kFloat8E4M3 || encoding.scheme == Scheme::kFloat8E5M2;
  if (float8 && between(random, 0, 2) == 0) encoding.scale = ScaleFormat::kE8M0;
  const bool groups = encoding.scheme != Scheme::kRaw && encoding.scheme != Scheme::kInt8Channel;
  if (groups && between(random, 0, 2) == 0) {
    encoding.group = static_cast<uint16_t>(between(random, 1, content));
  }
  return encoding;
}

inline CacheShape random_number_shape(Random& random) {
  CacheShape shape = random_shape(random);
  shape.gap = one_of(random, {0u, 0u, 16u, 4u});
  for (uint32_t& content : shape.contents) {
    content = one_of(random, {1u, 5u, 20u, 64u, 64u, 80u, 128u, 128u, 256u, 576u});
  }
  return shape;
}

inline PanelFormat random_format(Random& random, const CacheShape& shape, const Request& request) {
  PanelFormat format;
  format.codec = static_cast<uint8_t>(between(random, 1, 9));
  format.panel_tokens = one_of(random, {1u, 7u, 16u, 64u, 64u, 256u});
  for (const uint32_t content : shape.contents) {
    format.encodings.push_back(random_encoding(random, shape.element, content));
  }
  const Slice& slice = request.slice;
  if (between(random, 0, 2) == 0) {
    format.raw_until = between(random, slice.token_begin, slice.token_end);
    format.raw_from = between(random, slice.token_begin, slice.token_end);
  }
  format.producer_element = shape.element;
  return format;
}

inline uint16_t half_bits(float value) {
  if (value == 0) return 0;
  int exponent = 0;
  const float fraction = std::frexp(std::fabs(value), &exponent);
  if (exponent < -13) return 0;
  const auto mantissa = static_cast<uint32_t>(fraction * 2048) & 1023;
  return static_cast<uint16_t>((value < 0 ? 0x8000u : 0u) |
                               static_cast<uint32_t>(exponent + 14) << 10 | mantissa);
}

// Fills with numbers of all sizes that the type has, zeros among them, and with `odd` of a million
// patterns of any kind, NaN and infinity among them.
inline void fill_numbers(Random& random, ElementType element, std::byte* to, size_t bytes,
                         uint32_t odd) {
  const size_t size = element_bytes(element);
  for (size_t i = 0; i + size <= bytes; i += size) {
    const auto pattern = static_cast<uint32_t>(random());
    const float sign = (pattern & 1) != 0 ? -1.0f : 1.0f;
    const float value = sign * std::ldexp(1.0f + static_cast<float>(pattern >> 9) * 0x1p-23f,
                                          static_cast<int>(pattern >> 1 & 7) - 4);
    uint32_t bits = 0;
    std::memcpy(&bits, &value, 4);
    if (element == ElementType::kBFloat16) bits >>= 16;
    if (element == ElementType::kFloat16) bits = half_bits(value);
    const auto kind = static_cast<uint32_t>(random() % 1000000);
    if (kind < odd) bits = static_cast<uint32_t>(random());
    if (kind > 970000) bits = 0;
    std::memcpy(to + i, &bits, size);
  }
}

inline std::vector<uint32_t> cut_panels(Random& random, uint32_t panels, uint32_t most) {
  std::vector<uint32_t> cuts = {0};
  while (cuts.back() < panels) {
    cuts.push_back(std::min(panels, cuts.back() + between(random, 1, most)));
  }
  return cuts;
}

}  // namespace kvxfer

#endif  // KVXFER_TESTS_GPU_RANDOM_PANELS_H_
