#ifndef KVXFER_LAYOUT_SCALE_CHECKS_H_
#define KVXFER_LAYOUT_SCALE_CHECKS_H_

#include <cstddef>
#include <vector>

#include "kvxfer/element.h"

namespace kvxfer {

// Throws Error(kInvalid) unless there are none, or one that elements of the type can have for each
// of `views`: normal float32 numbers above 0, and 1 but for 8-bit floats.
void check_scales(const std::vector<float>& scales, size_t views, ElementType element);

}  // namespace kvxfer

#endif  // KVXFER_LAYOUT_SCALE_CHECKS_H_
