#ifndef KVXFER_CODEC_H_
#define KVXFER_CODEC_H_

#include <array>
#include <bitset>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "kvxfer/element.h"

namespace kvxfer {

// How elements are encoded on the wire. docs/coded_chunks.md specifies the bytes and the arithmetic
// for other implementations; the scalar variant here is its reference.
//
// A row is the content of one (layer, plane, kv head, token). A panel is the rows of one layer,
// plane and kv head over a run of tokens: what is encoded at a time.

// The values travel on the wire: append, never renumber.
enum class Scheme : uint8_t {
  kRaw = 0,          // elements as the producer holds them
  kFloat8E4M3 = 1,   // OCP bytes, a scale per row and `group` elements
  kFloat8E5M2 = 2,   // the same
  kInt8 = 3,         // symmetric, a scale per row and `group` elements
  kInt8Channel = 4,  // asymmetric, a scale and a zero point per channel of the panel
};
constexpr uint32_t kNumSchemes = 5;
const char* scheme_name(Scheme scheme);  // "raw", "fp8_e4m3", "fp8_e5m2", "int8", "int8_channel"

// Scales are rounded up to their format, zero points down.
enum class ScaleFormat : uint8_t {
  kFloat32 = 0,
  kBFloat16 = 1,
  kE8M0 = 2,  // powers of two, a byte each; for the float8 schemes
};
constexpr uint32_t kNumScaleFormats = 3;
const char* scale_format_name(ScaleFormat format);  // "float32", "bfloat16", "e8m0"

// How one plane is encoded.
struct Encoding {
  Scheme scheme = Scheme::kRaw;
  ScaleFormat scale = ScaleFormat::kBFloat16;  // of no meaning for kRaw
  // Elements of a row that share a scale; 0: the whole row, and where rows have no scales.
  uint16_t group = 0;
  friend bool operator==(const Encoding&, const Encoding&) = default;
};

constexpr uint32_t kMaxPanelRows = 256;
using RowMask = std::bitset<kMaxPanelRows>;

// Throws Error(kInvalid) when the encoding is not one of the above, or can't hold elements of that
// type: schemes but kRaw take float32, float16 and bfloat16.
void check_encoding(const Encoding& encoding, ElementType element);

// Bytes of an encoded panel: codes, then scales, each filled up with zeros to 16 bytes.
uint64_t panel_bytes(const Encoding& encoding, ElementType element, uint32_t rows,
                     uint32_t content);

// Encodes `rows` <= kMaxPanelRows rows of `content` contiguous elements into panel_bytes() bytes at
// `coded`. A row that holds NaN, infinity or a number too large to scale is marked in the result:
// its codes are 0, it takes no part in what the others share, and the caller sends it as it is.
RowMask encode_panel(const Encoding& encoding, ElementType element, const std::byte* const* row,
                     uint32_t rows, uint32_t content, std::byte* coded);

// What a cache's elements mean: a stored number times `scale` is the value.
struct Stored {
  ElementType element = ElementType::kBFloat16;
  // Finite and at least 2^-126, so that it has an inverse; other than 1 for 8-bit floats only.
  float scale = 1.0f;
  friend bool operator==(const Stored&, const Stored&) = default;
};

// What conversion has cost, in elements.
struct Loss {
  uint64_t clamped = 0;  // finite, but beyond the largest that the consumer's type can hold
  uint64_t inexact = 0;  // 8-bit floats without an equal in the consumer's dialect and scale
  Loss& operator+=(const Loss& other) {
    clamped += other.clamped;
    inexact += other.inexact;
    return *this;
  }
};

// Whether there is a Conversion from the one into the other: equal types always, uint8 into nothing
// else, between floats of any width yes; none with a scale that it can't have.
bool can_convert(const Stored& from, const Stored& to);

struct CodeTable;

// How elements of one cache become another's. Immutable, safe to use from several threads; copies
// share what it has. From 8-bit floats to others it has 1.5 KiB, which take microseconds to make.
class Conversion {
 public:
  // Throws Error(kInvalid), naming both and the rule, unless can_convert().
  Conversion(const Stored& from, const Stored& to);

  const Stored& from() const { return from_; }
  const Stored& to() const { return to_; }
  const CodeTable* table() const { return table_.get(); }  // null: not from 8-bit floats to others

  // Converts `count` contiguous elements. 8-bit to 8-bit floats keep their value or count as
  // inexact; all else rounds to nearest even, and clamps. Allocates nothing.
  Loss convert(const std::byte* source, uint32_t count, std::byte* target) const;

 private:
  Stored from_;
  Stored to_;
  std::shared_ptr<const CodeTable> table_;
};

// Decodes a panel of panel_bytes() bytes into rows of conversion.to(). conversion.from() is what
// the producer holds; it matters to kRaw alone, whose elements are converted. Rows that are
// `left_out`, because they travelled as they are, are neither written nor counted.
Loss decode_panel(const Encoding& encoding, const Conversion& conversion, const std::byte* coded,
                  uint32_t rows, uint32_t content, std::byte* const* row,
                  const RowMask& left_out = {});

}  // namespace kvxfer

#endif  // KVXFER_CODEC_H_
