#include "codec/code_table.h"

#include <memory>
#include <vector>

#include "codec/float_bits.h"

namespace kvxfer {
namespace {

// Tables that a thread keeps: enough for the planes of some layers that each have scales of their
// own. Making one takes microseconds.
constexpr size_t kTablesKept = 32;

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

CodeTable::CodeTable(const Stored& from, const Stored& to) : from(from), to(to) {
  const SmallFloat& source = small_float(from.element);
  for (uint32_t code = 0; code < 256; ++code) {
    const float number = from_small(code, source);
    if (is_float8(to.element)) {
      if (is_nan(number)) {
        bits[code] = small_float(to.element).nan;
      } else if (!equal_code(double{number} * from.scale, to, bits[code])) {
        bits[code] = 0;
        loss[code].inexact = 1;
      }
    } else {
      bits[code] = to_bits(number * from.scale, to.element, loss[code].clamped);
    }
    lossless &= loss[code].inexact == 0 && loss[code].clamped == 0;
  }
}

const CodeTable& code_table(const Stored& from, const Stored& to) {
  thread_local std::vector<std::unique_ptr<const CodeTable>> tables;
  thread_local size_t last = 0;
  for (size_t i = 0; i < tables.size(); ++i) {
    const size_t at = (last + i) % tables.size();
    if (tables[at]->from == from && tables[at]->to == to) {
      last = at;
      return *tables[at];
    }
  }
  auto made = std::make_unique<const CodeTable>(from, to);
  if (tables.size() < kTablesKept) {
    last = tables.size();
    tables.push_back(std::move(made));
  } else {
    last = (last + kTablesKept - 1) % kTablesKept;
    tables[last] = std::move(made);
  }
  return *tables[last];
}

}  // namespace kvxfer
