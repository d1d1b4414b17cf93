#ifndef KVXFER_LAYOUT_OVERLAP_H_
#define KVXFER_LAYOUT_OVERLAP_H_

#include <array>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <utility>

#include "kvxfer/layout.h"

namespace kvxfer {

// The bytes that one plane of one layer occupies.
struct Footprint {
  struct Axis {
    const char* name;
    uint64_t extent;
    int64_t stride;  // bytes
  };

  std::array<Axis, 4> axes;  // by falling stride; axes of one element are last
  uint64_t begin = 0;        // address
  uint64_t element = 0;      // bytes

  static Footprint of(const CacheLayout& layout, size_t layer, size_t plane);

  // What is wrong with the strides, or "". The other members require "".
  std::string fault() const;

  uint64_t end() const;  // one past the last byte

  // Whether any byte belongs to both. Exact when both have the same strides, which the planes of
  // one allocation have; else only their first and last elements are looked up in the other.
  bool shares_memory(const Footprint& other) const;
};

// The indices of two footprints that share memory.
std::optional<std::pair<size_t, size_t>> find_shared_memory(std::span<const Footprint> footprints);

}  // namespace kvxfer

#endif  // KVXFER_LAYOUT_OVERLAP_H_
