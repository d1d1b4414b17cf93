#ifndef KVXFER_LAYOUT_SLICE_CHECKS_H_
#define KVXFER_LAYOUT_SLICE_CHECKS_H_

#include <cstdint>
#include <vector>

#include "kvxfer/layout.h"

namespace kvxfer {

// What every plan asks of its arguments. Both throw Error(kInvalid).

// Layers in range and named once, kv heads held by the layout. Tokens are the block table's to
// check.
void check_slice(const CacheLayout& layout, const Slice& slice);

// `plane_of[i]` is the layout's plane that is wire plane i: in range, named once.
void check_planes(const CacheLayout& layout, const std::vector<uint32_t>& plane_of);

}  // namespace kvxfer

#endif  // KVXFER_LAYOUT_SLICE_CHECKS_H_
