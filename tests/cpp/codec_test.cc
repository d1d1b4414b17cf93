#include <doctest/doctest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <random>
#include <vector>

#include "codec/codec_kernels.h"
#include "codec/float_mode.h"
#include "kvxfer/codec.h"
#include "kvxfer/digest.h"
#include "kvxfer/status.h"

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace kvxfer {
namespace {

using Bytes = std::vector<std::byte>;

constexpr ElementType kWide[] = {ElementType::kFloat32, ElementType::kFloat16,
                                 ElementType::kBFloat16};
constexpr ElementType kFloat8[] = {ElementType::kFloat8E4M3FN, ElementType::kFloat8E4M3FNUZ,
                                   ElementType::kFloat8E5M2, ElementType::kFloat8E5M2FNUZ};
constexpr Scheme kCoded[] = {Scheme::kFloat8E4M3, Scheme::kFloat8E5M2, Scheme::kInt8,
                             Scheme::kInt8Channel};
constexpr std::byte kPoison{0xa5};

class Variant {
 public:
  explicit Variant(const std::string& name) : before_(simd_variant()) { set_simd_variant(name); }
  ~Variant() { set_simd_variant(before_); }

 private:
  std::string before_;
};

bool fits(Scheme scheme, ScaleFormat format) {
  return format != ScaleFormat::kE8M0 || scheme == Scheme::kFloat8E4M3 ||
         scheme == Scheme::kFloat8E5M2;
}

// Rows at odd places in a poisoned buffer.
struct Rows {
  Bytes memory;
  std::vector<std::byte*> row;
  size_t row_bytes = 0;

  Rows(uint32_t rows, size_t bytes, size_t gap, size_t offset)
      : memory(offset + rows * (bytes + gap) + 64, kPoison), row_bytes(bytes) {
    for (uint32_t r = 0; r < rows; ++r) row.push_back(memory.data() + offset + r * (bytes + gap));
  }

  bool only_rows_written() const {
    Bytes copy = memory;
    for (const std::byte* at : row) {
      std::memset(copy.data() + (at - memory.data()), static_cast<int>(kPoison), row_bytes);
    }
    return copy == Bytes(copy.size(), kPoison);
  }
};

// What to draw: numbers of one magnitude, any bits at all, or numbers with what is special among
// them.
enum class Kind { kTame, kAnyBits, kSpecial, kZero };

uint32_t draw_bits(std::mt19937& random, ElementType element, Kind kind, float magnitude) {
  const auto any = static_cast<uint32_t>(random());
  if (kind == Kind::kZero)
    return any % 2 == 0 ? 0 : element == ElementType::kFloat32 ? 1u << 31 : 0x8000;
  if (kind == Kind::kAnyBits) return any;
  if (kind == Kind::kSpecial && any % 16 == 0) {
    constexpr uint32_t kFloat32Special[] = {0x7f800000, 0xff800000, 0x7fc00001, 0x80000000,
                                            0x00000001, 0x807fffff, 0x71800000, 0x717fffff};
    constexpr uint32_t kFloat16Special[] = {0x7c00, 0xfc00, 0x7e01, 0x8000,
                                            0x0001, 0x83ff, 0x7800, 0x77ff};
    const uint32_t which = (any >> 8) % 8;
    if (element == ElementType::kFloat16) return kFloat16Special[which];
    return element == ElementType::kFloat32 ? kFloat32Special[which] : kFloat32Special[which] >> 16;
  }
  const float value = magnitude * std::normal_distribution<float>()(random);
  const auto bits = std::bit_cast<uint32_t>(value);
  if (element == ElementType::kFloat32) return bits;
  if (element == ElementType::kBFloat16) return bits >> 16;
  // A float16 of about that size, by its fields.
  const int exponent = std::clamp(static_cast<int>(bits >> 23 & 0xff) - 112, 0, 29);
  return (bits >> 16 & 0x8000) | static_cast<uint32_t>(exponent) << 10 | (bits >> 13 & 0x3ff);
}

void draw(Rows& rows, ElementType element, Kind kind, std::mt19937& random) {
  const size_t bytes = element_bytes(element);
  for (std::byte* at : rows.row) {
    const float magnitude = std::ldexp(1.0f, static_cast<int>(random() % 40) - 30);
    const Kind row_kind = kind == Kind::kSpecial && random() % 2 == 0 ? Kind::kTame : kind;
    for (size_t i = 0; i < rows.row_bytes; i += bytes) {
      const uint32_t bits = draw_bits(random, element, row_kind, magnitude);
      std::memcpy(at + i, &bits, bytes);
    }
  }
}

struct Encoded {
  Bytes coded;
  RowMask raw;
  friend bool operator==(const Encoded&, const Encoded&) = default;
};

Encoded encode(const Encoding& encoding, ElementType element, const Rows& rows, uint32_t content) {
  const auto count = static_cast<uint32_t>(rows.row.size());
  const uint64_t bytes = panel_bytes(encoding, element, count, content);
  Encoded result = {Bytes(bytes + 64, kPoison), {}};
  result.raw =
      encode_panel(encoding, element, rows.row.data(), count, content, result.coded.data());
  for (size_t i = bytes; i < bytes + 64; ++i) CHECK(result.coded[i] == kPoison);
  result.coded.resize(bytes);
  return result;
}

struct Decoded {
  Bytes memory;
  Loss loss;
};

Decoded decode(const Encoding& encoding, const Stored& to, const Bytes& coded, uint32_t count,
               uint32_t content, size_t gap, size_t offset) {
  Rows rows(count, content * element_bytes(to.element), gap, offset);
  const Loss loss = decode_panel(encoding, {}, to, coded.data(), count, content, rows.row.data());
  CHECK(rows.only_rows_written());
  return {rows.memory, loss};
}

bool same(const Loss& a, const Loss& b) { return a.clamped == b.clamped && a.inexact == b.inexact; }

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

TEST_CASE("codec: every variant encodes and decodes as the scalar one") {
  std::mt19937 random(7);
  const auto pick = [&](auto&& choices) { return choices[random() % std::size(choices)]; };
  for (int round = 0; round < 250; ++round) {
    const ElementType element = pick(kWide);
    Encoding encoding = {pick(kCoded), static_cast<ScaleFormat>(random() % 3), 0};
    if (!fits(encoding.scheme, encoding.scale)) encoding.scale = ScaleFormat::kBFloat16;
    constexpr uint32_t kContents[] = {64, 80, 128, 256, 576};
    constexpr uint16_t kGroups[] = {0, 0, 1, 16, 32, 33, 64, 128, 1000};
    constexpr uint32_t kRowCounts[] = {1, 2, 15, 16, 17, 64, 256};
    const uint32_t content = random() % 2 == 0 ? pick(kContents) : 1 + random() % 600;
    const uint32_t count = content > 300 ? 1 + random() % 20 : pick(kRowCounts);
    encoding.group = pick(kGroups);
    const bool aligned = random() % 3 == 0;
    const size_t gap = aligned ? 64 : random() % 70;
    const auto kind = static_cast<Kind>(random() % 4);
    CAPTURE(static_cast<int>(element));
    CAPTURE(scheme_name(encoding.scheme));
    CAPTURE(scale_format_name(encoding.scale));
    CAPTURE(encoding.group);
    CAPTURE(content);
    CAPTURE(count);

    Rows rows(count, content * element_bytes(element), gap, random() % 70);
    draw(rows, element, kind, random);
    Encoded expected;
    {
      const Variant scalar("scalar");
      expected = encode(encoding, element, rows, content);
    }
    Bytes hostile = expected.coded;
    for (std::byte& byte : hostile) {
      if (random() % 64 == 0) byte = static_cast<std::byte>(random());
    }
    const ElementType target = random() % 4 == 0 ? pick(kFloat8) : pick(kWide);
    const Stored to = {target, is_float8(target) ? 0.37f : 1.0f};
    Rows place(count, content * element_bytes(target), 0, 0);
    const size_t offset =
        aligned ? static_cast<size_t>(-reinterpret_cast<intptr_t>(place.memory.data()) & 63)
                : random() % 70;
    for (const Bytes* coded : {&expected.coded, &hostile}) {
      Decoded reference;
      {
        const Variant scalar("scalar");
        reference = decode(encoding, to, *coded, count, content, gap, offset);
      }
      for (const std::string& name : simd_variants()) {
        CAPTURE(name);
        const Variant variant(name);
        CHECK(encode(encoding, element, rows, content) == expected);
        const Decoded found = decode(encoding, to, *coded, count, content, gap, offset);
        CHECK(found.memory == reference.memory);
        CHECK(same(found.loss, reference.loss));
      }
    }
  }
}

TEST_CASE("codec: every variant converts rows as the scalar one") {
  std::mt19937 random(8);
  for (const ElementType from : kWide) {
    for (const uint32_t count : {1, 7, 32, 129, 1025}) {
      for (const Kind kind : {Kind::kTame, Kind::kAnyBits, Kind::kSpecial}) {
        Rows source(1, count * element_bytes(from), 0, 3);
        draw(source, from, kind, random);
        std::vector<Stored> targets = {
            {ElementType::kFloat32}, {ElementType::kFloat16}, {ElementType::kBFloat16}};
        for (const ElementType to : kFloat8) targets.push_back({to, 0.7f});
        for (const Stored& to : targets) {
          CAPTURE(static_cast<int>(from));
          CAPTURE(static_cast<int>(to.element));
          CAPTURE(count);
          Bytes expected;
          Loss loss;
          for (const std::string& name : {std::string("scalar"), simd_variants().front(),
                                          simd_variants()[simd_variants().size() / 2]}) {
            const Variant variant(name);
            Rows target(1, count * element_bytes(to.element), 0, 5);
            const Loss found = convert_row({from}, to, source.row[0], count, target.row[0]);
            CHECK(target.only_rows_written());
            if (name == "scalar") {
              expected = target.memory;
              loss = found;
            }
            CHECK(target.memory == expected);
            CHECK(same(found, loss));
          }
        }
      }
    }
  }
}

TEST_CASE("codec: every code of every dialect is the number it should be") {
  Bytes codes(256);
  for (uint32_t code = 0; code < 256; ++code) codes[code] = static_cast<std::byte>(code);
  for (const ElementType element : kFloat8) {
    CAPTURE(static_cast<int>(element));
    std::vector<float> found(256);
    CHECK(same(convert_row({element}, {ElementType::kFloat32}, codes.data(), 256,
                           reinterpret_cast<std::byte*>(found.data())),
               {}));
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
    const Variant variant(name);
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
        decode_panel({scheme, ScaleFormat::kFloat32, 0}, {}, {ElementType::kFloat32}, panel.data(),
                     1, 256, &row);
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
    const Variant variant(name);
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
      decode_panel(encoding, {}, {ElementType::kFloat32}, coded.data(), 256, 256, target.data());
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
    const Variant variant(name);
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

TEST_CASE("codec: the caller's floating-point mode neither matters nor changes") {
#if defined(__x86_64__)
  std::mt19937 random(9);
  Rows rows(4, 128 * 4, 0, 0);
  for (std::byte* at : rows.row) {
    for (size_t i = 0; i < rows.row_bytes; i += 4) {
      const uint32_t bits = static_cast<uint32_t>(random()) & 0x80ffffff;  // many subnormal ones
      std::memcpy(at + i, &bits, 4);
    }
  }
  for (const std::string& name : simd_variants()) {
    const Variant variant(name);
    const Encoding encoding = {Scheme::kFloat8E5M2, ScaleFormat::kBFloat16, 0};
    const Encoded expected = encode(encoding, ElementType::kFloat32, rows, 128);
    const unsigned before = _mm_getcsr();
    const unsigned flushing = (before & ~0x3fu) | 0xe040;  // flush to zero, round towards zero
    _mm_setcsr(flushing);
    const Encoded found = encode(encoding, ElementType::kFloat32, rows, 128);
    const unsigned after = _mm_getcsr();
    _mm_setcsr(before);
    CHECK(found == expected);
    CHECK((after & ~0x3fu) == (flushing & ~0x3fu));
  }
#endif
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
    const Variant variant(name);
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
  refused({Scheme::kFloat8E4M3}, ElementType::kUInt8);
  refused({Scheme::kInt8}, ElementType::kFloat8E4M3FN);
  check_encoding({}, ElementType::kUInt8);
  check_encoding({Scheme::kFloat8E5M2, ScaleFormat::kE8M0, 32}, ElementType::kFloat16);

  CHECK_FALSE(can_convert({ElementType::kUInt8}, {ElementType::kFloat32}));
  CHECK_FALSE(can_convert({ElementType::kFloat32}, {ElementType::kUInt8}));
  CHECK_FALSE(can_convert({ElementType::kFloat32}, {ElementType::kFloat8E4M3FN, -1.0f}));
  CHECK_FALSE(can_convert({ElementType::kFloat32}, {ElementType::kFloat8E4M3FN, NAN}));
  CHECK_FALSE(can_convert({ElementType::kFloat32, 2.0f}, {ElementType::kFloat32}));
  CHECK(can_convert({ElementType::kUInt8}, {ElementType::kUInt8}));
  CHECK(can_convert({ElementType::kFloat8E4M3FNUZ, 0.5f}, {ElementType::kFloat8E4M3FN, 0.25f}));
  std::byte byte{};
  CHECK_THROWS_AS(convert_row({ElementType::kUInt8}, {ElementType::kFloat8E5M2}, &byte, 1, &byte),
                  Error);
  std::vector<const std::byte*> rows(kMaxPanelRows + 1, &byte);
  CHECK_THROWS_AS(encode_panel({}, ElementType::kUInt8, rows.data(), kMaxPanelRows + 1, 1, &byte),
                  Error);
}

}  // namespace
}  // namespace kvxfer
