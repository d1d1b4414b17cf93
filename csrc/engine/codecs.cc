#include "engine/codecs.h"

#include <algorithm>
#include <array>
#include <utility>

#include "kvxfer/status.h"

namespace kvxfer {
namespace {

constexpr std::array<std::pair<Codec, const char*>, 5> kCodecs = {{
    {Codec::kRaw, "raw"},
    {Codec::kFloat8E4M3, "fp8_e4m3"},
    {Codec::kFloat8E5M2, "fp8_e5m2"},
    {Codec::kInt8, "int8"},
    {Codec::kAuto, "auto"},
}};

// Wider rows, as MLA's latent, get several scales: one outlier must not cost all of them precision.
constexpr uint32_t kWideRow = 256, kGroupOfWideRow = 128;

Scheme scheme_of(Codec codec, const PlaneSpec& plane) {
  switch (codec) {
    case Codec::kRaw: return Scheme::kRaw;
    case Codec::kFloat8E4M3: return Scheme::kFloat8E4M3;
    case Codec::kFloat8E5M2: return Scheme::kFloat8E5M2;
    case Codec::kInt8: return plane.name == "k" ? Scheme::kInt8Channel : Scheme::kInt8;
    case Codec::kAuto: return scheme_of(kRecommended, plane);
  }
  return Scheme::kRaw;
}

}  // namespace

const char* codec_name(Codec codec) {
  for (const auto& [known, name] : kCodecs) {
    if (known == codec) return name;
  }
  return "unknown";
}

Codec codec_from_name(const std::string& name) {
  std::string list;
  for (const auto& [codec, known] : kCodecs) {
    if (name == known) return codec;
    list += (list.empty() ? "" : ", ") + std::string(known);
  }
  throw Error(StatusCode::kInvalid, "codec \"" + name + "\" is not known; there are " + list);
}

uint32_t schemes_of(Codec codec) {
  uint32_t schemes = 0;
  for (const char* plane : {"k", "v"}) {
    schemes |= 1u << static_cast<uint32_t>(scheme_of(codec, {plane, 1}));
  }
  return schemes;
}

std::string scheme_list(uint32_t schemes) {
  std::string list;
  for (uint32_t scheme = 0; scheme < kNumSchemes; ++scheme) {
    if (!(schemes & 1u << scheme)) continue;
    list += (list.empty() ? "" : ", ") + std::string(scheme_name(static_cast<Scheme>(scheme)));
  }
  return list.empty() ? "none" : list;
}

Encoding encoding_of(Codec codec, const PlaneSpec& plane, uint32_t group, ScaleFormat scale) {
  Encoding encoding;
  encoding.scheme = scheme_of(codec, plane);
  if (encoding.scheme == Scheme::kRaw) return encoding;
  encoding.scale = scale;
  if (encoding.scheme == Scheme::kInt8Channel) return encoding;
  if (group == 0 && plane.content > kWideRow) group = kGroupOfWideRow;
  encoding.group = group < plane.content ? static_cast<uint16_t>(group) : uint16_t{0};
  return encoding;
}

std::vector<Encoding> encodings_of(Codec codec, const std::vector<PlaneSpec>& planes,
                                   uint32_t group, ScaleFormat scale) {
  std::vector<Encoding> encodings;
  for (const PlaneSpec& plane : planes) {
    encodings.push_back(encoding_of(codec, plane, group, scale));
  }
  return encodings;
}

uint64_t most_panel_chunk(const std::vector<Encoding>& encodings,
                          const std::vector<PlaneSpec>& planes, ElementType element,
                          uint32_t tokens) {
  const auto up = [](uint64_t bytes, uint64_t to) { return (bytes + to - 1) / to * to; };
  const uint64_t header = up(24 + 8 * planes.size(), 64);
  uint64_t most = 0;
  for (size_t plane = 0; plane < planes.size(); ++plane) {
    const uint32_t content = planes[plane].content;
    uint64_t bytes = header + panel_bytes(encodings[plane], element, tokens, content);
    if (encodings[plane].scheme != Scheme::kRaw) {
      bytes += up(4 * uint64_t{tokens}, 16);
      bytes += up(uint64_t{tokens} * content * element_bytes(element), 16);
    }
    most = std::max(most, bytes);
  }
  return most;
}

void check_codec(const CodecSpec& spec, const std::vector<PlaneSpec>& planes) {
  const auto require = [](bool fine, const std::string& what) {
    if (!fine) throw Error(StatusCode::kInvalid, what);
  };
  const std::string name = codec_name(spec.codec);
  require(name != "unknown",
          "codec " + std::to_string(static_cast<int>(spec.codec)) + " is not known");
  require(spec.panel_tokens >= 1 && spec.panel_tokens <= kMaxPanelRows,
          "codec " + name + ": panel_tokens is " + std::to_string(spec.panel_tokens) +
              "; it is 1 to " + std::to_string(kMaxPanelRows));
  require(spec.group <= UINT16_MAX,
          "codec " + name + ": group is " + std::to_string(spec.group) + "; it is 0 to 65535");
  require(spec.raw_until <= spec.raw_from,
          "codec " + name + ": raw_until is " + std::to_string(spec.raw_until) +
              ", behind raw_from, which is " + std::to_string(spec.raw_from));
  // What elements the producer holds is not known here: it refuses what can't hold them.
  for (const Encoding& encoding : encodings_of(spec.codec, planes, spec.group, spec.scale)) {
    check_encoding(encoding, ElementType::kBFloat16);
  }
}

}  // namespace kvxfer
