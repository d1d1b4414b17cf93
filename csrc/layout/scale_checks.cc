#include "layout/scale_checks.h"

#include <cmath>
#include <cstdio>
#include <limits>
#include <string>

#include "kvxfer/status.h"

namespace kvxfer {
namespace {

std::string text(float number) {
  char buffer[32];
  std::snprintf(buffer, sizeof(buffer), "%.6g", number);
  return buffer;
}

}  // namespace

void check_scales(const std::vector<float>& scales, size_t views, ElementType element) {
  if (scales.empty()) return;
  if (scales.size() != views) {
    throw Error(StatusCode::kInvalid, "a cache of " + std::to_string(views) +
                                          " layers times planes has " +
                                          std::to_string(scales.size()) + " scales");
  }
  for (const float scale : scales) {
    // A smaller one has no inverse in float32.
    if (!std::isfinite(scale) || !(scale >= std::numeric_limits<float>::min())) {
      throw Error(StatusCode::kInvalid, "a cache's scale is " + text(scale) +
                                            "; it must be finite, and at least 2^-126 (" +
                                            text(std::numeric_limits<float>::min()) + ")");
    }
    if (scale != 1 && !is_float8(element)) {
      throw Error(StatusCode::kInvalid, "a cache of " + std::string(element_name(element)) +
                                            " has a scale of " + text(scale) +
                                            "; only 8-bit floats have others than 1");
    }
  }
}

}  // namespace kvxfer
