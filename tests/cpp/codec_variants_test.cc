#include <doctest/doctest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <random>
#include <vector>

#include "kvxfer/codec.h"
#include "kvxfer/digest.h"
#include "simd_variant.h"

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
  const Loss loss = decode_panel(encoding, {{}, to}, coded.data(), count, content, rows.row.data());
  CHECK(rows.only_rows_written());
  return {rows.memory, loss};
}

bool same(const Loss& a, const Loss& b) { return a.clamped == b.clamped && a.inexact == b.inexact; }

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
    if (encoding.scheme != Scheme::kInt8Channel) encoding.group = pick(kGroups);
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
      const SimdVariant scalar("scalar");
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
        const SimdVariant scalar("scalar");
        reference = decode(encoding, to, *coded, count, content, gap, offset);
      }
      for (const std::string& name : simd_variants()) {
        CAPTURE(name);
        const SimdVariant variant(name);
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
            const SimdVariant variant(name);
            Rows target(1, count * element_bytes(to.element), 0, 5);
            const Loss found = Conversion({from}, to).convert(source.row[0], count, target.row[0]);
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

TEST_CASE("codec: rows that are left out are neither written nor counted") {
  std::mt19937 random(12);
  for (const std::string& name : simd_variants()) {
    const SimdVariant variant(name);
    for (const Scheme scheme : {Scheme::kRaw, Scheme::kFloat8E4M3, Scheme::kFloat8E5M2,
                                Scheme::kInt8, Scheme::kInt8Channel}) {
      for (const ElementType target :
           {ElementType::kBFloat16, ElementType::kFloat16, ElementType::kFloat8E4M3FN}) {
        CAPTURE(name);
        CAPTURE(scheme_name(scheme));
        CAPTURE(element_name(target));
        constexpr uint32_t kRows = 21, kContent = 80;
        const bool grouped = scheme != Scheme::kRaw && scheme != Scheme::kInt8Channel;
        const Encoding encoding = {scheme, ScaleFormat::kFloat32,
                                   static_cast<uint16_t>(grouped ? 32 : 0)};
        Rows rows(kRows, kContent * 2, 6, 2);
        // Beyond float16 and e4m3fn, so that something is clamped.
        for (std::byte* at : rows.row) {
          for (uint32_t i = 0; i < kContent; ++i) {
            const float value = std::ldexp(1.0f, static_cast<int>(random() % 12) + 8);
            std::memcpy(at + 2 * i, reinterpret_cast<const std::byte*>(&value) + 2, 2);
          }
        }
        const Bytes coded = encode(encoding, ElementType::kBFloat16, rows, kContent).coded;
        const size_t bytes = kContent * element_bytes(target);
        const auto decode_but = [&](const RowMask& left_out, Rows& to) {
          return decode_panel(encoding, {{}, {target}}, coded.data(), kRows, kContent,
                              to.row.data(), left_out);
        };
        Rows all(kRows, bytes, 6, 2);
        const Loss lost = decode_but({}, all);
        CHECK((lost.clamped > 0) == (target != ElementType::kBFloat16));
        for (int round = 0; round < 4; ++round) {
          RowMask left_out;
          for (uint32_t r = 0; r < kRows; ++r) left_out[r] = random() % 3 == 0;
          Rows some(kRows, bytes, 6, 2), rest(kRows, bytes, 6, 2);
          const Loss some_lost = decode_but(left_out, some);
          const Loss rest_lost = decode_but(~left_out, rest);
          CHECK(some_lost.clamped + rest_lost.clamped == lost.clamped);
          const Bytes untouched(bytes, kPoison);
          for (uint32_t r = 0; r < kRows; ++r) {
            const std::byte* wanted = left_out[r] ? untouched.data() : all.row[r];
            CHECK(std::memcmp(some.row[r], wanted, bytes) == 0);
          }
          CHECK(some.only_rows_written());
        }
      }
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
    const SimdVariant variant(name);
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

}  // namespace
}  // namespace kvxfer
