#include "layout/common_runs.h"

#include <algorithm>

#include "layout/address.h"

namespace kvxfer {

bool CommonRuns::Side::ready() {
  if (at_ < held_) return true;
  held_ = cursor_.fill(runs_);
  at_ = 0;
  return held_ > 0;
}

std::byte* CommonRuns::Side::address() const {
  const Run& run = runs_[at_];
  return address_at(run.address,
                    static_cast<int64_t>(index_) * run.stride + static_cast<int64_t>(taken_));
}

void CommonRuns::Side::take(uint64_t bytes) {
  taken_ += bytes;
  if (taken_ < runs_[at_].bytes) return;
  taken_ = 0;
  if (++index_ < runs_[at_].count) return;
  index_ = 0;
  ++at_;
}

bool CommonRuns::next(Piece& piece) {
  if (!from_.ready() || !to_.ready()) return false;
  piece = {from_.address(), to_.address(), std::min(from_.left(), to_.left())};
  from_.take(piece.bytes);
  to_.take(piece.bytes);
  return true;
}

std::vector<std::span<std::byte>> extents(const CacheLayout& layout,
                                          const std::set<const std::byte*>& borders) {
  std::vector<std::span<std::byte>> found;
  const auto last = [](uint32_t count, int64_t stride) {
    return static_cast<uint64_t>(count - 1) * static_cast<uint64_t>(stride);
  };
  for (size_t layer = 0; layer < layout.layers.size(); ++layer) {
    for (size_t plane = 0; plane < layout.planes.size(); ++plane) {
      const PlaneView& view = layout.view(layer, plane);
      const uint64_t bytes =
          last(layout.num_blocks, view.block_stride) + last(layout.num_heads, view.head_stride) +
          last(layout.block_size, view.token_stride) +
          last(layout.planes[plane].content, view.content_stride) + element_bytes(layout.element);
      found.emplace_back(view.data, bytes);
    }
  }
  std::sort(found.begin(), found.end(),
            [](const auto& a, const auto& b) { return a.data() < b.data(); });
  std::vector<std::span<std::byte>> merged;
  for (const auto& extent : found) {
    std::byte* const before =
        merged.empty() ? nullptr : merged.back().data() + merged.back().size();
    if (extent.data() > before || (extent.data() == before && borders.contains(before))) {
      merged.push_back(extent);
      continue;
    }
    std::byte* const end = std::max(before, extent.data() + extent.size());
    merged.back() = {merged.back().data(), end};
  }
  return merged;
}

}  // namespace kvxfer
