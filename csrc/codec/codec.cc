#include "kvxfer/codec.h"

#include <cstring>
#include <utility>
#include <vector>

#include "codec/codec_kernels.h"
#include "codec/float_bits.h"
#include "codec/float_mode.h"
#include "codec/stored_name.h"
#include "codec/up16.h"
#include "kvxfer/status.h"

namespace kvxfer {
namespace {

constexpr const char* kSchemeNames[kNumSchemes] = {"raw", "fp8_e4m3", "fp8_e5m2", "int8",
                                                   "int8_channel"};
constexpr const char* kScaleNames[kNumScaleFormats] = {"float32", "bfloat16", "e8m0"};

constexpr const CodecKernels* kVariants[] = {
#if defined(__x86_64__)
    &kAvx512Codec,
    &kAvx2Codec,
#elif defined(__aarch64__)
    &kNeonCodec,
#endif
    &kScalarCodec,
};

bool is_wide(ElementType element) { return static_cast<size_t>(element) < kWideElements; }

bool scaled_by_row(Scheme scheme) {
  return scheme != Scheme::kRaw && scheme != Scheme::kInt8Channel;
}

uint32_t group_of(const Encoding& encoding, uint32_t content) {
  return encoding.group == 0 || encoding.group > content ? content : encoding.group;
}

uint64_t code_bytes(const Encoding& encoding, ElementType element, uint32_t rows,
                    uint32_t content) {
  const uint64_t elements = uint64_t{rows} * content;
  return encoding.scheme == Scheme::kRaw ? elements * element_bytes(element) : elements;
}

uint64_t all_scale_bytes(const Encoding& encoding, uint32_t rows, uint32_t content) {
  if (encoding.scheme == Scheme::kRaw || content == 0) return 0;
  const uint32_t group = group_of(encoding, content);
  const uint64_t scales = encoding.scheme == Scheme::kInt8Channel
                              ? 2 * uint64_t{content}
                              : uint64_t{rows} * ((content + group - 1) / group);
  return scales * scale_bytes(encoding.scale);
}

void check_panel(const Encoding& encoding, ElementType element, uint32_t rows) {
  check_encoding(encoding, element);
  if (rows <= kMaxPanelRows) return;
  throw Error(StatusCode::kInvalid, "a panel has at most " + std::to_string(kMaxPanelRows) +
                                        " rows, not " + std::to_string(rows));
}

void fill_up(std::byte* begin, uint64_t bytes) {
  std::memset(begin + bytes, 0, up16(bytes) - bytes);
}

// Rows [begin, end) of a panel.
DecodeJob part_of(const DecodeJob& panel, Scheme scheme, ElementType from, uint32_t begin,
                  uint32_t end) {
  DecodeJob part = panel;
  part.row += begin;
  part.rows = end - begin;
  const size_t code = scheme == Scheme::kRaw ? element_bytes(from) : 1;
  part.codes += size_t{begin} * panel.content * code;
  if (scaled_by_row(scheme)) {
    const uint32_t groups = (panel.content + panel.group - 1) / panel.group;
    part.scales += size_t{begin} * groups * scale_bytes(panel.scale);
  }
  return part;
}

uint64_t decode_wide(Scheme scheme, ElementType element, const DecodeJob& job) {
  const auto row = static_cast<size_t>(scheme) - 1;
  const auto column = static_cast<size_t>(element);
  uint64_t clamped = 0;
  if (codec_kernels().decode[row][column](job, clamped)) return clamped;
  clamped = 0;
  kScalarCodec.decode[row][column](job, clamped);
  return clamped;
}

Loss decode_rows(Scheme scheme, const Conversion& conversion, DecodeJob job) {
  const Stored& to = conversion.to();
  Loss loss;
  if (scheme == Scheme::kRaw) {
    const size_t bytes = job.content * element_bytes(conversion.from().element);
    for (uint32_t r = 0; r < job.rows; ++r) {
      loss += conversion.convert(job.codes + r * bytes, job.content, job.row[r]);
    }
    return loss;
  }
  if (is_wide(to.element)) return {decode_wide(scheme, to.element, job), 0};

  std::vector<float> values(size_t{job.rows} * job.content);
  std::byte* value_row[kMaxPanelRows];
  for (uint32_t r = 0; r < job.rows; ++r) {
    value_row[r] = reinterpret_cast<std::byte*>(values.data() + size_t{r} * job.content);
  }
  std::byte* const* const row = std::exchange(job.row, value_row);
  decode_wide(scheme, ElementType::kFloat32, job);
  const Conversion rounding({ElementType::kFloat32}, to);
  for (uint32_t r = 0; r < job.rows; ++r) {
    loss += rounding.convert(value_row[r], job.content, row[r]);
  }
  return loss;
}

}  // namespace

const char* scheme_name(Scheme scheme) {
  const auto index = static_cast<size_t>(scheme);
  return index < std::size(kSchemeNames) ? kSchemeNames[index] : "unknown";
}

const char* scale_format_name(ScaleFormat format) {
  const auto index = static_cast<size_t>(format);
  return index < std::size(kScaleNames) ? kScaleNames[index] : "unknown";
}

const CodecKernels& codec_kernels() {
  const StripeKernels* stripes = &stripe_kernels();
  for (const CodecKernels* variant : kVariants) {
    if (variant->stripes == stripes) return *variant;
  }
  return kScalarCodec;
}

void check_encoding(const Encoding& encoding, ElementType element) {
  const auto refuse = [&](const std::string& why) {
    throw Error(StatusCode::kInvalid, std::string(scheme_name(encoding.scheme)) + " of " +
                                          element_name(element) + ": " + why);
  };
  if (static_cast<uint32_t>(encoding.scheme) >= kNumSchemes) {
    refuse("there is no scheme " + std::to_string(static_cast<int>(encoding.scheme)));
  }
  element_bytes(element);  // throws for an unknown one
  if (static_cast<uint32_t>(encoding.scale) >= kNumScaleFormats) {
    refuse("there is no scale format " + std::to_string(static_cast<int>(encoding.scale)));
  }
  if (encoding.group != 0 && !scaled_by_row(encoding.scheme)) {
    refuse("its rows have no scales that a group of " + std::to_string(encoding.group) +
           " could share; group is 0 here");
  }
  if (encoding.scheme == Scheme::kRaw) return;
  if (!is_wide(element)) refuse("only float32, float16 and bfloat16 can be encoded; send it raw");
  const bool float8 =
      encoding.scheme == Scheme::kFloat8E4M3 || encoding.scheme == Scheme::kFloat8E5M2;
  if (encoding.scale == ScaleFormat::kE8M0 && !float8) {
    refuse("e8m0 scales are for fp8_e4m3 and fp8_e5m2; take bfloat16 or float32");
  }
}

uint64_t panel_bytes(const Encoding& encoding, ElementType element, uint32_t rows,
                     uint32_t content) {
  return up16(code_bytes(encoding, element, rows, content)) +
         up16(all_scale_bytes(encoding, rows, content));
}

RowMask encode_panel(const Encoding& encoding, ElementType element, const std::byte* const* row,
                     uint32_t rows, uint32_t content, std::byte* coded) {
  check_panel(encoding, element, rows);
  if (rows == 0 || content == 0) return {};
  const uint64_t codes = code_bytes(encoding, element, rows, content);
  fill_up(coded, codes);
  if (encoding.scheme == Scheme::kRaw) {
    const size_t bytes = content * element_bytes(element);
    for (uint32_t r = 0; r < rows; ++r) std::memcpy(coded + r * bytes, row[r], bytes);
    return {};
  }
  const EncodeJob job = {encoding.scale, group_of(encoding, content), row, rows, content,
                         coded,          coded + up16(codes)};
  fill_up(job.scales, all_scale_bytes(encoding, rows, content));
  const FloatMode mode;
  return codec_kernels()
      .encode[static_cast<size_t>(encoding.scheme) - 1][static_cast<size_t>(element)](job);
}

Loss decode_panel(const Encoding& encoding, const Conversion& conversion, const std::byte* coded,
                  uint32_t rows, uint32_t content, std::byte* const* row, const RowMask& left_out) {
  const ElementType from = conversion.from().element;
  check_panel(encoding, from, rows);
  if (rows == 0 || content == 0) return {};
  const DecodeJob panel = {encoding.scale,
                           group_of(encoding, content),
                           row,
                           rows,
                           content,
                           coded,
                           coded + up16(code_bytes(encoding, from, rows, content))};
  const FloatMode mode;
  if (left_out.none()) return decode_rows(encoding.scheme, conversion, panel);
  Loss loss;
  for (uint32_t begin = 0; begin < rows; ++begin) {
    uint32_t end = begin;
    while (end < rows && !left_out[end]) ++end;
    if (end == begin) continue;
    loss +=
        decode_rows(encoding.scheme, conversion, part_of(panel, encoding.scheme, from, begin, end));
    begin = end;
  }
  return loss;
}

}  // namespace kvxfer
