#include <doctest/doctest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <random>
#include <vector>

#include "kvxfer/codec.h"
#include "kvxfer/digest.h"
#include "kvxfer/status.h"
#include "simd_variant.h"

namespace kvxfer {
namespace {

using Bytes = std::vector<std::byte>;

constexpr ElementType kFloat8[] = {ElementType::kFloat8E4M3FN, ElementType::kFloat8E4M3FNUZ,
                                   ElementType::kFloat8E5M2, ElementType::kFloat8E5M2FNUZ};
constexpr Scheme kCoded[] = {Scheme::kFloat8E4M3, Scheme::kFloat8E5M2, Scheme::kInt8,
                             Scheme::kInt8Channel};

float value_of(ElementType element, uint32_t code) {
  const bool four =
      element == ElementType::kFloat8E4M3FN || element == ElementType::kFloat8E4M3FNUZ;
  const bool fnuz =
      element == ElementType::kFloat8E4M3FNUZ || element == ElementType::kFloat8E5M2FNUZ;
  const int mantissa_bits = four ? 3 : 2;
  const int bias = (four ? 7 : 15) + (fnuz ? 1 : 0);
  const auto magnitude = static_cast<int>(code & 0x7f);
  const int exponent = magnitude >> mantissa_bits;
  const int mantissa = magnitude & ((1 << mantissa_bits) - 1);
  if (fnuz && code == 0x80) return NAN;
  if (element == ElementType::kFloat8E4M3FN && magnitude == 0x7f) return NAN;
  const float sign = code >= 0x80 ? -1.0f : 1.0f;
  if (element == ElementType::kFloat8E5M2 && exponent == 31) {
    return mantissa != 0 ? NAN : sign * INFINITY;
  }
  const float fraction = std::ldexp(static_cast<float>(mantissa), -mantissa_bits);
  return sign * std::ldexp(exponent > 0 ? 1 + fraction : fraction, std::max(exponent, 1) - bias);
}

TEST_CASE("codec: every code of every dialect is the number it should be") {
  Bytes codes(256);
  for (uint32_t code = 0; code < 256; ++code) codes[code] = static_cast<std::byte>(code);
  for (const ElementType element : kFloat8) {
    CAPTURE(static_cast<int>(element));
    std::vector<float> found(256);
    const Loss loss = Conversion({element}, {ElementType::kFloat32})
                          .convert(codes.data(), 256, reinterpret_cast<std::byte*>(found.data()));
    CHECK(loss.clamped + loss.inexact == 0);
    for (uint32_t code = 0; code < 256; ++code) {
      CAPTURE(code);
      const float expected = value_of(element, code);
      if (std::isnan(expected)) {
        CHECK(std::isnan(found[code]));
      } else {
        CHECK(std::bit_cast<uint32_t>(found[code]) == std::bit_cast<uint32_t>(expected));
      }
    }
  }
  // As a panel, with NaN among the codes, by every variant.
  for (const std::string& name : simd_variants()) {
    CAPTURE(name);
    const SimdVariant variant(name);
    for (const Scheme scheme : {Scheme::kFloat8E4M3, Scheme::kFloat8E5M2, Scheme::kInt8}) {
      for (const bool with_nan : {true, false}) {
        Bytes panel = codes;
        if (!with_nan) {
          for (uint32_t code = 0; code < 256; ++code) {
            if ((code & 0x7f) > 0x7b) panel[code] = std::byte{0};
          }
        }
        panel.resize(256 + 16);
        const float scale = 0.5f;
        std::memcpy(panel.data() + 256, &scale, sizeof scale);
        std::vector<float> found(256);
        std::byte* row = reinterpret_cast<std::byte*>(found.data());
        decode_panel({scheme, ScaleFormat::kFloat32, 0}, {{}, {ElementType::kFloat32}},
                     panel.data(), 1, 256, &row);
        for (uint32_t i = 0; i < 256; ++i) {
          const auto code = static_cast<uint32_t>(panel[i]);
          const float expected =
              scale * (scheme == Scheme::kInt8 ? static_cast<float>(static_cast<int8_t>(code))
                       : scheme == Scheme::kFloat8E4M3 ? value_of(ElementType::kFloat8E4M3FN, code)
                                                       : value_of(ElementType::kFloat8E5M2, code));
          const bool equal = std::isnan(expected) ? std::isnan(found[i]) : found[i] == expected;
          CHECK(equal);
        }
      }
    }
  }
}

// 256 rows of the 256 values that share their upper byte: all that bfloat16 has.
TEST_CASE("codec: every bfloat16 number comes back, or goes raw") {
  std::vector<uint16_t> values(65536);
  std::vector<const std::byte*> row;
  for (uint32_t i = 0; i < 65536; ++i) values[i] = static_cast<uint16_t>(i);
  for (uint32_t r = 0; r < 256; ++r) {
    row.push_back(reinterpret_cast<const std::byte*>(values.data() + r * 256));
  }
  struct Case {
    Scheme scheme;
    float step;  // error of a group's largest number, relative to it
  };
  for (const std::string& name : simd_variants()) {
    CAPTURE(name);
    const SimdVariant variant(name);
    for (const auto& [scheme, step] :
         {Case{Scheme::kFloat8E4M3, 0x1p-4f}, Case{Scheme::kFloat8E5M2, 0x1p-3f},
          Case{Scheme::kInt8, 0.5f / 127}}) {
      CAPTURE(scheme_name(scheme));
      const Encoding encoding = {scheme, ScaleFormat::kFloat32, 0};
      Bytes coded(panel_bytes(encoding, ElementType::kBFloat16, 256, 256));
      const RowMask raw =
          encode_panel(encoding, ElementType::kBFloat16, row.data(), 256, 256, coded.data());
      std::vector<float> found(65536);
      std::vector<std::byte*> target;
      for (uint32_t r = 0; r < 256; ++r) {
        target.push_back(reinterpret_cast<std::byte*>(found.data() + r * 256));
      }
      decode_panel(encoding, {{}, {ElementType::kFloat32}}, coded.data(), 256, 256, target.data());
      for (uint32_t r = 0; r < 256; ++r) {
        CAPTURE(r);
        const float last = std::bit_cast<float>(uint32_t{values[r * 256 + 255]} << 16);
        const bool tame = std::fabs(last) < 0x1p100f;
        CHECK(raw[r] == !tame);
        float worst = 0;
        float largest = 0;
        for (uint32_t i = r * 256; i < (r + 1) * 256; ++i) {
          const float value = std::bit_cast<float>(uint32_t{values[i]} << 16);
          if (raw[r]) {
            CHECK(found[i] == 0);
          } else {
            worst = std::max(worst, std::fabs(found[i] - value));
            largest = std::max(largest, std::fabs(value));
          }
        }
        const bool close = worst <= largest * step * 1.0001f || worst <= 0x1p-120f;
        CHECK(close);
      }
    }
  }
}

TEST_CASE("codec: no negative zero is ever written") {
  std::vector<float> values = {1.0f, -1e-30f, -0.0f, -1.0f, -1e-6f, 1e-6f, 0.0f, -0x1p-20f};
  const std::byte* row = reinterpret_cast<const std::byte*>(values.data());
  for (const std::string& name : simd_variants()) {
    const SimdVariant variant(name);
    for (const Scheme scheme : {Scheme::kFloat8E4M3, Scheme::kFloat8E5M2}) {
      std::vector<float> wide;  // long enough for whole steps
      for (int i = 0; i < 16; ++i) wide.insert(wide.end(), values.begin(), values.end());
      row = reinterpret_cast<const std::byte*>(wide.data());
      const auto content = static_cast<uint32_t>(wide.size());
      const Encoding encoding = {scheme, ScaleFormat::kFloat32, 0};
      Bytes coded(panel_bytes(encoding, ElementType::kFloat32, 1, content));
      encode_panel(encoding, ElementType::kFloat32, &row, 1, content, coded.data());
      for (uint32_t i = 0; i < content; ++i) CHECK(coded[i] != std::byte{0x80});
    }
  }
}

TEST_CASE("codec: known bytes on every machine") {
  std::mt19937 random(11);
  std::vector<uint16_t> values(64 * 96);
  for (uint16_t& value : values) {
    const auto drawn = static_cast<uint32_t>(random());
    value = static_cast<uint16_t>((drawn & 0x8000) + 0x3900 + drawn % 0x900);
  }
  std::vector<const std::byte*> row;
  for (size_t r = 0; r < 64; ++r) {
    row.push_back(reinterpret_cast<const std::byte*>(values.data() + r * 96));
  }
  constexpr uint64_t kKnown[] = {0xc6b2bc5773f6e9ea, 0xb980c2b4fde0317b, 0x05fbafe10378c335,
                                 0xe7f021f368ae961e};
  for (const std::string& name : simd_variants()) {
    const SimdVariant variant(name);
    for (size_t i = 0; i < 4; ++i) {
      const Encoding encoding = {kCoded[i], ScaleFormat::kBFloat16, 0};
      Bytes coded(panel_bytes(encoding, ElementType::kBFloat16, 64, 96));
      encode_panel(encoding, ElementType::kBFloat16, row.data(), 64, 96, coded.data());
      CHECK(digest(coded, 0).mix == kKnown[i]);
    }
  }
}

TEST_CASE("codec: what makes no sense is refused") {
  const auto refused = [](const Encoding& encoding, ElementType element) {
    CHECK_THROWS_AS(check_encoding(encoding, element), Error);
  };
  refused({static_cast<Scheme>(5)}, ElementType::kBFloat16);
  refused({Scheme::kInt8, static_cast<ScaleFormat>(3)}, ElementType::kBFloat16);
  refused({Scheme::kInt8, ScaleFormat::kE8M0}, ElementType::kBFloat16);
  refused({Scheme::kInt8Channel, ScaleFormat::kE8M0}, ElementType::kBFloat16);
  refused({Scheme::kRaw, static_cast<ScaleFormat>(3)}, ElementType::kBFloat16);
  refused({Scheme::kRaw, ScaleFormat::kBFloat16, 16}, ElementType::kBFloat16);
  refused({Scheme::kInt8Channel, ScaleFormat::kBFloat16, 16}, ElementType::kBFloat16);
  refused({Scheme::kFloat8E4M3}, ElementType::kUInt8);
  refused({Scheme::kInt8}, ElementType::kFloat8E4M3FN);
  check_encoding({}, ElementType::kUInt8);
  check_encoding({Scheme::kFloat8E5M2, ScaleFormat::kE8M0, 32}, ElementType::kFloat16);

  CHECK_FALSE(can_convert({ElementType::kUInt8}, {ElementType::kFloat32}));
  CHECK_FALSE(can_convert({ElementType::kFloat32}, {ElementType::kUInt8}));
  CHECK_FALSE(can_convert({ElementType::kFloat32}, {ElementType::kFloat8E4M3FN, -1.0f}));
  CHECK_FALSE(can_convert({ElementType::kFloat32}, {ElementType::kFloat8E4M3FN, NAN}));
  CHECK_FALSE(can_convert({ElementType::kFloat32, 2.0f}, {ElementType::kFloat32}));
  const Stored tiny = {ElementType::kFloat8E4M3FN, 0x1p-127f};
  CHECK_FALSE(can_convert(tiny, tiny));
  CHECK(can_convert({ElementType::kUInt8}, {ElementType::kUInt8}));
  CHECK(can_convert({ElementType::kFloat8E4M3FNUZ, 0.5f}, {ElementType::kFloat8E4M3FN, 0.25f}));
  std::byte byte{};
  CHECK_THROWS_AS(Conversion({ElementType::kUInt8}, {ElementType::kFloat8E5M2}), Error);
  std::vector<const std::byte*> rows(kMaxPanelRows + 1, &byte);
  CHECK_THROWS_AS(encode_panel({}, ElementType::kUInt8, rows.data(), kMaxPanelRows + 1, 1, &byte),
                  Error);
}

}  // namespace
}  // namespace kvxfer
