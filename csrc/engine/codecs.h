#ifndef KVXFER_ENGINE_CODECS_H_
#define KVXFER_ENGINE_CODECS_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "kvxfer/agent.h"
#include "kvxfer/codec.h"
#include "kvxfer/layout.h"

namespace kvxfer {

// What kAuto takes where coding pays: more faithful than float8 of the same size (docs/codecs.md).
constexpr Codec kRecommended = Codec::kInt8;

// Bit i is scheme i.
constexpr uint32_t kSchemesHere = (1u << kNumSchemes) - 1;
// Those that a codec may use. For kAuto those of the recommended one.
uint32_t schemes_of(Codec codec);
// "raw, fp8_e4m3, ...", for messages.
std::string scheme_list(uint32_t schemes);

Encoding encoding_of(Codec codec, const PlaneSpec& plane, uint32_t group, ScaleFormat scale);
std::vector<Encoding> encodings_of(Codec codec, const std::vector<PlaneSpec>& planes,
                                   uint32_t group, ScaleFormat scale);

// Most bytes of a chunk that is one panel of so many tokens, of whichever plane: all its rows raw.
uint64_t most_panel_chunk(const std::vector<Encoding>& encodings,
                          const std::vector<PlaneSpec>& planes, ElementType element,
                          uint32_t tokens);

// Throws Error(kInvalid) for what no cache with these planes can be sent with.
void check_codec(const CodecSpec& spec, const std::vector<PlaneSpec>& planes);

inline Stored stored(const CacheLayout& layout, size_t layer, size_t plane) {
  return {layout.element, layout.scale(layer, plane)};
}

}  // namespace kvxfer

#endif  // KVXFER_ENGINE_CODECS_H_
