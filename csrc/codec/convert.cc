#include <algorithm>
#include <cstdio>
#include <cstring>
#include <memory>

#include "codec/code_table.h"
#include "codec/codec_kernels.h"
#include "codec/float_bits.h"
#include "codec/float_mode.h"
#include "codec/stored_name.h"
#include "kvxfer/codec.h"
#include "kvxfer/status.h"

namespace kvxfer {
namespace {

bool has_meaning(const Stored& stored) {
  return stored.scale == 1.0f ||
         (is_float8(stored.element) && stored.scale >= 0x1p-126f && !is_infinite(stored.scale));
}

template <class Element>
Loss look_up(const CodeTable& table, const std::byte* source, uint32_t count, std::byte* target) {
  for (uint32_t i = 0; i < count; ++i) {
    const auto element = static_cast<Element>(table.bits[static_cast<uint8_t>(source[i])]);
    std::memcpy(target + i * sizeof element, &element, sizeof element);
  }
  Loss loss;
  for (uint32_t i = 0; i < count && !table.lossless; ++i) {
    const auto code = static_cast<uint8_t>(source[i]);
    loss += {table.clamped[code], table.inexact[code]};
  }
  return loss;
}

Loss from_float8(const CodeTable& table, ElementType to, const std::byte* source, uint32_t count,
                 std::byte* target) {
  switch (element_bytes(to)) {
    case 1: return look_up<uint8_t>(table, source, count, target);
    case 2: return look_up<uint16_t>(table, source, count, target);
    default: return look_up<uint32_t>(table, source, count, target);
  }
}

Loss to_float8(ElementType from, const Stored& to, const std::byte* source, uint32_t count,
               std::byte* target) {
  constexpr uint32_t kPiece = 512;
  const CodecKernels& kernels = codec_kernels();
  const auto widen = kernels.convert[static_cast<size_t>(from)][0];
  const auto round = kernels.to_float8[float8_index(to.element)];
  const float inverse = 1.0f / to.scale;
  float values[kPiece];
  Loss loss;
  for (uint32_t begin = 0; begin < count; begin += kPiece) {
    const uint32_t length = std::min(count - begin, kPiece);
    widen(source + begin * element_bytes(from), length, reinterpret_cast<std::byte*>(values));
    loss.clamped += round(values, inverse, length, target + begin);
  }
  return loss;
}

}  // namespace

std::string stored_name(const Stored& stored) {
  const std::string name = element_name(stored.element);
  if (stored.scale == 1.0f) return name;
  char scale[32];
  std::snprintf(scale, sizeof scale, "%.9g", static_cast<double>(stored.scale));
  return name + " of scale " + scale;
}

bool can_convert(const Stored& from, const Stored& to) {
  if (!has_meaning(from) || !has_meaning(to)) return false;
  const bool numbers = from.element != ElementType::kUInt8 && to.element != ElementType::kUInt8;
  return numbers || from.element == to.element;
}

Conversion::Conversion(const Stored& from, const Stored& to) : from_(from), to_(to) {
  if (can_convert(from, to)) {
    if (from != to && is_float8(from.element)) table_ = std::make_shared<CodeTable>(from, to);
    return;
  }
  const bool scales = has_meaning(from) && has_meaning(to);
  throw Error(StatusCode::kInvalid,
              stored_name(from) + " cannot be converted to " + stored_name(to) +
                  (scales ? "; uint8 holds no numbers"
                          : "; a scale is finite and at least 2^-126, and 1 but for 8-bit floats"));
}

Loss Conversion::convert(const std::byte* source, uint32_t count, std::byte* target) const {
  if (from_ == to_) {
    std::memcpy(target, source, count * element_bytes(to_.element));
    return {};
  }
  const FloatMode mode;
  if (table_) return from_float8(*table_, to_.element, source, count, target);
  if (is_float8(to_.element)) return to_float8(from_.element, to_, source, count, target);
  const auto convert =
      codec_kernels().convert[static_cast<size_t>(from_.element)][static_cast<size_t>(to_.element)];
  return {convert(source, count, target), 0};
}

}  // namespace kvxfer
