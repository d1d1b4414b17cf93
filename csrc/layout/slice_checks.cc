#include "layout/slice_checks.h"

#include <string>

#include "kvxfer/status.h"

namespace kvxfer {
namespace {

[[noreturn]] void refuse(const std::string& what) { throw Error(StatusCode::kInvalid, what); }

}  // namespace

void check_slice(const CacheLayout& layout, const Slice& slice) {
  if (slice.layers.empty()) refuse("the slice has no layers");
  std::vector<bool> seen(layout.layers.size());
  for (const uint32_t layer : slice.layers) {
    if (layer >= seen.size()) {
      refuse("layer " + std::to_string(layer) + " is out of range; the cache has " +
             std::to_string(seen.size()) + " layers");
    }
    if (seen[layer]) refuse("layer \"" + layout.layers[layer] + "\" is in the slice twice");
    seen[layer] = true;
  }
  const uint64_t last_head = uint64_t{layout.first_head} + layout.num_heads;
  if (slice.head_begin >= slice.head_end || slice.head_begin < layout.first_head ||
      slice.head_end > last_head) {
    refuse("kv heads [" + std::to_string(slice.head_begin) + ", " + std::to_string(slice.head_end) +
           ") are asked for; the cache holds [" + std::to_string(layout.first_head) + ", " +
           std::to_string(last_head) + ")");
  }
}

void check_planes(const CacheLayout& layout, const std::vector<uint32_t>& plane_of) {
  if (plane_of.empty()) refuse("no planes are asked for");
  std::vector<bool> seen(layout.planes.size());
  for (const uint32_t plane : plane_of) {
    if (plane >= seen.size()) {
      refuse("plane " + std::to_string(plane) + " is out of range; the cache has " +
             std::to_string(seen.size()) + " planes");
    }
    if (seen[plane]) refuse("plane \"" + layout.planes[plane].name + "\" is asked for twice");
    seen[plane] = true;
  }
}

}  // namespace kvxfer
