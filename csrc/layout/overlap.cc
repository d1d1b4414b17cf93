#include "layout/overlap.h"

#include <algorithm>
#include <numeric>
#include <vector>

namespace kvxfer {
namespace {

// Far above any address space, far below where 64 bits overflow.
constexpr uint64_t kMaxExtent = uint64_t{1} << 56;

std::string bytes_text(uint64_t bytes) { return std::to_string(bytes) + " bytes"; }

// Whether offset = sum of d[i] * axes[i].stride + r has a solution with -low[i] <= d[i] <= high[i]
// and |r| < element. As each stride is at least what the axes behind it span, only the two
// multiples next to `offset` can work.
struct Decoder {
  const std::array<Footprint::Axis, 4>& axes;
  const std::array<int64_t, 4>& low;
  const std::array<int64_t, 4>& high;
  int64_t element;

  bool reaches(int64_t offset, size_t axis) const {
    if (axis == axes.size()) return -element < offset && offset < element;
    if (low[axis] == 0 && high[axis] == 0) return reaches(offset, axis + 1);
    const int64_t stride = axes[axis].stride;
    int64_t floor = offset / stride;
    if (offset % stride < 0) --floor;
    for (int64_t digit = floor; digit <= floor + 1; ++digit) {
      if (digit < -low[axis] || digit > high[axis]) continue;
      if (reaches(offset - digit * stride, axis + 1)) return true;
    }
    return false;
  }
};

bool same_axes(const Footprint& a, const Footprint& b) {
  for (size_t i = 0; i < a.axes.size(); ++i) {
    const auto& x = a.axes[i];
    const auto& y = b.axes[i];
    if (x.name != y.name) return false;
    if (x.stride != y.stride && (x.extent > 1 || y.extent > 1)) return false;
  }
  return true;
}

bool contains(const Footprint& footprint, uint64_t address) {
  const std::array<int64_t, 4> low = {};
  std::array<int64_t, 4> high = {};
  for (size_t i = 0; i < high.size(); ++i) {
    high[i] = static_cast<int64_t>(footprint.axes[i].extent) - 1;
  }
  const Decoder decoder{footprint.axes, low, high, static_cast<int64_t>(footprint.element)};
  return decoder.reaches(static_cast<int64_t>(address - footprint.begin), 0);
}

}  // namespace

Footprint Footprint::of(const CacheLayout& layout, size_t layer, size_t plane) {
  const PlaneView& view = layout.view(layer, plane);
  Footprint footprint;
  footprint.axes = {{{"block", layout.num_blocks, view.block_stride},
                     {"kv head", layout.num_heads, view.head_stride},
                     {"token", layout.block_size, view.token_stride},
                     {"content", layout.planes[plane].content, view.content_stride}}};
  footprint.begin = reinterpret_cast<uintptr_t>(view.data);
  footprint.element = element_bytes(layout.element);
  std::stable_sort(footprint.axes.begin(), footprint.axes.end(), [](const Axis& a, const Axis& b) {
    if ((a.extent > 1) != (b.extent > 1)) return a.extent > 1;
    return a.extent > 1 && a.stride > b.stride;
  });
  return footprint;
}

std::string Footprint::fault() const {
  uint64_t inner = element;
  const char* inner_name = "element";
  for (size_t i = axes.size(); i-- > 0;) {
    const Axis& axis = axes[i];
    if (axis.extent <= 1) continue;
    const std::string what =
        std::string("the stride of the ") + axis.name + " axis is " + std::to_string(axis.stride);
    if (axis.stride <= 0) return what + " bytes; strides must be positive";
    if (static_cast<uint64_t>(axis.stride) < inner) {
      return what + " bytes, less than the " + bytes_text(inner) + " that its " + inner_name +
             " spans: elements would share memory";
    }
    if (static_cast<uint64_t>(axis.stride) > kMaxExtent / axis.extent) {
      return what + " bytes, too much for " + std::to_string(axis.extent) + " of them";
    }
    inner += static_cast<uint64_t>(axis.stride) * (axis.extent - 1);
    inner_name = axis.name;
  }
  if (begin + inner < begin) return "its end is behind the end of the address space";
  return "";
}

uint64_t Footprint::end() const {
  uint64_t end = begin + element;
  for (const Axis& axis : axes) {
    if (axis.extent > 1) end += static_cast<uint64_t>(axis.stride) * (axis.extent - 1);
  }
  return end;
}

bool Footprint::shares_memory(const Footprint& other) const {
  if (end() <= other.begin || other.end() <= begin) return false;
  if (!same_axes(*this, other)) {
    return contains(*this, other.begin) || contains(*this, other.end() - other.element) ||
           contains(other, begin) || contains(other, end() - element);
  }
  std::array<int64_t, 4> low = {};
  std::array<int64_t, 4> high = {};
  for (size_t i = 0; i < axes.size(); ++i) {
    low[i] = static_cast<int64_t>(other.axes[i].extent) - 1;
    high[i] = static_cast<int64_t>(axes[i].extent) - 1;
  }
  const Decoder decoder{axes, low, high, static_cast<int64_t>(element)};
  return decoder.reaches(static_cast<int64_t>(other.begin - begin), 0);
}

std::optional<std::pair<size_t, size_t>> find_shared_memory(std::span<const Footprint> footprints) {
  std::vector<size_t> order(footprints.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::stable_sort(order.begin(), order.end(),
                   [&](size_t a, size_t b) { return footprints[a].begin < footprints[b].begin; });
  for (size_t i = 0; i < order.size(); ++i) {
    const Footprint& first = footprints[order[i]];
    const uint64_t end = first.end();
    for (size_t j = i + 1; j < order.size() && footprints[order[j]].begin < end; ++j) {
      if (first.shares_memory(footprints[order[j]])) {
        return std::minmax(order[i], order[j]);
      }
    }
  }
  return std::nullopt;
}

}  // namespace kvxfer
