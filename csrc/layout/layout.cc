#include "kvxfer/layout.h"

#include <set>

#include "kvxfer/status.h"
#include "layout/overlap.h"
#include "layout/scale_checks.h"

namespace kvxfer {
namespace {

[[noreturn]] void refuse(const std::string& what) { throw Error(StatusCode::kInvalid, what); }

std::string quoted(const std::string& name) { return '"' + name + '"'; }

void check_names(const CacheLayout& layout) {
  std::set<std::string> seen;
  for (const std::string& layer : layout.layers) {
    if (layer.empty()) refuse("a layer of the cache has an empty name");
    if (!seen.insert(layer).second) {
      refuse("layer " + quoted(layer) + " is named twice; layer names must be unique");
    }
  }
  seen.clear();
  for (const PlaneSpec& plane : layout.planes) {
    if (plane.name.empty()) refuse("a plane of the cache has an empty name");
    if (!seen.insert(plane.name).second) {
      refuse("plane " + quoted(plane.name) + " is named twice; plane names must be unique");
    }
    if (plane.content == 0) refuse("plane " + quoted(plane.name) + " has a content of 0 elements");
  }
}

void check_counts(const CacheLayout& layout) {
  if (layout.layers.empty()) refuse("the cache has no layers");
  if (layout.planes.empty()) refuse("the cache has no planes");
  if (layout.num_blocks == 0) refuse("the cache has 0 blocks");
  if (layout.block_size == 0) refuse("the cache has 0 tokens per block");
  if (layout.num_heads == 0) refuse("the cache has 0 kv heads");
  if (uint64_t{layout.first_head} + layout.num_heads > UINT32_MAX) {
    refuse("first_head " + std::to_string(layout.first_head) + " plus " +
           std::to_string(layout.num_heads) + " heads does not fit in 32 bits");
  }
  const size_t wanted = layout.layers.size() * layout.planes.size();
  if (layout.views.size() != wanted) {
    refuse("the cache has " + std::to_string(layout.views.size()) + " views, but " +
           std::to_string(layout.layers.size()) + " layers of " +
           std::to_string(layout.planes.size()) + " planes need " + std::to_string(wanted));
  }
}

}  // namespace

uint64_t CacheLayout::token_bytes() const {
  uint64_t content = 0;
  for (const PlaneSpec& plane : planes) content += plane.content;
  return content * element_bytes(element) * num_heads * layers.size();
}

void CacheLayout::validate() const {
  element_bytes(element);
  check_counts(*this);
  check_names(*this);
  check_scales(scales, views.size(), element);

  std::vector<Footprint> footprints;
  footprints.reserve(views.size());
  for (size_t layer = 0; layer < layers.size(); ++layer) {
    for (size_t plane = 0; plane < planes.size(); ++plane) {
      const std::string where =
          "layer " + quoted(layers[layer]) + ", plane " + quoted(planes[plane].name);
      if (view(layer, plane).data == nullptr) refuse(where + ": the address of its data is null");
      footprints.push_back(Footprint::of(*this, layer, plane));
      if (const std::string fault = footprints.back().fault(); !fault.empty()) {
        refuse(where + ": " + fault);
      }
    }
  }
  if (const auto pair = find_shared_memory(footprints)) {
    const auto name = [this](size_t i) {
      return "layer " + quoted(layers[i / planes.size()]) + ", plane " +
             quoted(planes[i % planes.size()].name);
    };
    refuse(name(pair->first) + " and " + name(pair->second) +
           " share memory; every layer and plane needs memory of its own");
  }
}

}  // namespace kvxfer
