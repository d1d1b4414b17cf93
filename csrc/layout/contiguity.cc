#include "kvxfer/copy_plan.h"
#include "layout/address.h"

namespace kvxfer {
namespace {

// Both conditions on the tokens of a tile together.
uint32_t both(uint32_t a, uint32_t b, uint32_t always, uint32_t never) {
  if (a == always) return b;
  if (b == always || a == b) return a;
  return never;
}

}  // namespace

// A sub-nest is one piece of memory when the sub-nests one level further in are, and each of them
// starts where the one before ends. Where tokens are inside, the length of a step depends on how
// many the tile has, so the condition is met by one number of tokens: a full block, as a rule.
uint32_t CopyPlan::contiguity_at(size_t depth, uint32_t layer, uint32_t plane) const {
  const Axis axis = order_[depth];
  const PlaneView& first = views_[view_index(layer, plane)];
  const bool tokens_inside = depth_of(Axis::kToken) > depth;
  uint32_t result = contiguity_[view_index(layer, plane)][depth + 1];

  const auto step = [&](int64_t stride, uint32_t step_plane) -> uint32_t {
    const auto unit = static_cast<int64_t>(nest_bytes(depth + 1, step_plane, 1));
    if (!tokens_inside) return stride == unit ? kAlways : kNever;
    return stride > 0 && stride % unit == 0 && stride / unit <= block_size_
               ? static_cast<uint32_t>(stride / unit)
               : kNever;
  };
  const auto require = [&](uint32_t condition) {
    result = both(result, condition, kAlways, kNever);
  };
  // Whether the sub-nest of the next plane or layer starts a step behind that of the one before,
  // for every block, head and token that the outer axes may be at.
  const bool one_head = num_heads_ == 1 || depth_of(Axis::kHead) > depth;
  const auto follow = [&](size_t before_index, size_t next_index, uint32_t before_plane) {
    const PlaneView& before = views_[before_index];
    const PlaneView& next = views_[next_index];
    require(contiguity_[next_index][depth + 1]);
    uint32_t condition = step(address_difference(next.data, before.data), before_plane);
    if (before.block_stride != next.block_stride) condition = kNever;
    if (before.head_stride != next.head_stride && !one_head) condition = kNever;
    // A tile of a whole block starts at slot 0, where the token stride does not matter.
    const bool slot_0 = block_size_ == 1 || (tokens_inside && condition == block_size_);
    if (before.token_stride != next.token_stride && !slot_0) condition = kNever;
    require(condition);
  };

  switch (axis) {
    case Axis::kHead:
      if (num_heads_ > 1) require(step(first.head_stride, plane));
      break;
    case Axis::kToken:
      if (step(first.token_stride, plane) == kNever) require(1);
      break;
    case Axis::kPlane:
      for (uint32_t next = 1; next < row_bytes_.size(); ++next) {
        follow(view_index(layer, next - 1), view_index(layer, next), next - 1);
      }
      break;
    case Axis::kLayer:
      for (uint32_t next = 1; next < num_layers_; ++next) {
        follow(view_index(next - 1, plane), view_index(next, plane), plane);
      }
      break;
    case Axis::kTile: return kNever;
  }
  return result;
}

void CopyPlan::find_contiguity() {
  contiguity_.assign(views_.size(), Contiguity{});
  for (uint32_t plane = 0; plane < row_bytes_.size(); ++plane) {
    for (uint32_t layer = 0; layer < num_layers_; ++layer) {
      const size_t index = view_index(layer, plane);
      const bool contiguous =
          views_[index].content_stride == static_cast<int64_t>(element_bytes_) ||
          row_bytes_[plane] == element_bytes_;
      contiguity_[index][5] = contiguous ? kAlways : kNever;
    }
  }
  for (size_t depth = 5; depth-- > depth_of(Axis::kTile) + 1;) {
    const uint32_t layers = depth_of(Axis::kLayer) >= depth ? 1 : num_layers_;
    const uint32_t planes =
        depth_of(Axis::kPlane) >= depth ? 1 : static_cast<uint32_t>(row_bytes_.size());
    for (uint32_t layer = 0; layer < layers; ++layer) {
      for (uint32_t plane = 0; plane < planes; ++plane) {
        contiguity_[view_index(layer, plane)][depth] = contiguity_at(depth, layer, plane);
      }
    }
  }
}

uint64_t CopyPlan::count_pieces(size_t depth, uint32_t layer, uint32_t plane,
                                uint32_t tile_tokens) const {
  const size_t index = view_index(layer, plane);
  const uint32_t needed = contiguity_[index][depth];
  if (needed == kAlways || needed == tile_tokens) return 1;
  if (depth == 5) return row_bytes_[plane] / element_bytes_;
  const auto inner = [&](uint32_t inner_layer, uint32_t inner_plane) {
    return count_pieces(depth + 1, inner_layer, inner_plane, tile_tokens);
  };
  uint64_t pieces = 0;
  switch (order_[depth]) {
    case Axis::kLayer:
      for (uint32_t i = 0; i < num_layers_; ++i) pieces += inner(i, plane);
      break;
    case Axis::kPlane:
      for (uint32_t i = 0; i < row_bytes_.size(); ++i) pieces += inner(layer, i);
      break;
    case Axis::kTile: pieces = inner(layer, plane); break;
    case Axis::kHead: pieces = num_heads_ * inner(layer, plane); break;
    case Axis::kToken: pieces = tile_tokens * inner(layer, plane); break;
  }
  return pieces;
}

}  // namespace kvxfer
