#include <algorithm>
#include <cstring>

#include "engine/core.h"

namespace kvxfer {

// Both sides compute this from the same numbers, so a commit need only name the chunk.
std::vector<uint64_t> chunk_bounds(const CopyPlan& plan, uint32_t num_layers, uint32_t chunk_bytes,
                                   bool per_layer) {
  const uint64_t total = plan.wire_bytes();
  const uint64_t layer_bytes = total / num_layers;
  std::vector<uint64_t> bounds{0};
  while (bounds.back() < total) {
    const uint64_t begin = bounds.back();
    uint64_t end = begin + chunk_bytes;
    if (per_layer) end = std::min(end, (begin / layer_bytes + 1) * layer_bytes);
    end = plan.row_floor(std::min(end, total));
    if (end == begin) {
      throw Error(StatusCode::kMismatch,
                  "a chunk of " + std::to_string(chunk_bytes) +
                      " bytes does not hold one row of the cache (one token, head and plane): "
                      "raise chunk_bytes on both sides");
    }
    bounds.push_back(end);
  }
  return bounds;
}

uint64_t chunk_seed(const Generation& generation, uint64_t wire_begin) {
  uint64_t half[2];
  std::memcpy(half, generation.data(), sizeof(half));
  return half[0] ^ half[1] ^ (wire_begin + 1) * 0x9e3779b97f4a7c15u;
}

}  // namespace kvxfer
