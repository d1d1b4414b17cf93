#include "codec/code_table.h"

#include "codec/float_bits.h"
#include "codec/float_mode.h"

namespace kvxfer {
namespace {

// The code of `to` with exactly that value, which has at most 28 significant bits. Of two zeros the
// one with the same sign, where there are two.
bool equal_code(double value, const Stored& to, uint32_t& code) {
  const SmallFloat& format = small_float(to.element);
  uint64_t clamped = 0;
  const double scale = to.scale;
  code = to_small(static_cast<float>(value / scale), format, clamped);
  return clamped == 0 && double{from_small(code, format)} * scale == value;
}

}  // namespace

CodeTable::CodeTable(const Stored& from, const Stored& to) {
  const FloatMode mode;
  const SmallFloat& source = small_float(from.element);
  for (uint32_t code = 0; code < 256; ++code) {
    const float number = from_small(code, source);
    if (is_float8(to.element)) {
      if (is_nan(number)) {
        bits[code] = small_float(to.element).nan;
      } else if (!equal_code(double{number} * from.scale, to, bits[code])) {
        bits[code] = 0;
        inexact[code] = true;
      }
    } else {
      uint64_t beyond = 0;
      bits[code] = to_bits(number * from.scale, to.element, beyond);
      clamped[code] = beyond > 0;
    }
    lossless &= !clamped[code] && !inexact[code];
  }
}

}  // namespace kvxfer
