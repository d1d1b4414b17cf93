#include "kvxfer/copy_plan.h"

#include <algorithm>
#include <string>

#include "kvxfer/status.h"
#include "layout/address.h"
#include "layout/run_cursor.h"
#include "layout/slice_checks.h"

namespace kvxfer {
namespace {

constexpr size_t kAxes = 5;

[[noreturn]] void refuse(const std::string& what) { throw Error(StatusCode::kInvalid, what); }

}  // namespace

CopyPlan::CopyPlan(const CacheLayout& layout, const BlockTable& table, const Slice& slice,
                   std::vector<uint32_t> tile_ends, const WireOrder& order,
                   std::vector<uint32_t> plane_of) {
  check_slice(layout, slice);
  check_planes(layout, plane_of);
  table.validate(layout, slice.token_begin, slice.token_end, false);

  element_bytes_ = element_bytes(layout.element);
  block_size_ = layout.block_size;
  num_layers_ = static_cast<uint32_t>(slice.layers.size());
  num_heads_ = slice.head_end - slice.head_begin;
  num_tokens_ = slice.token_end - slice.token_begin;

  uint64_t before = 0;
  for (const uint32_t plane : plane_of) {
    row_bytes_.push_back(layout.planes[plane].content * element_bytes_);
    row_bytes_before_.push_back(before);
    before += row_bytes_.back();
  }
  for (const uint32_t layer : slice.layers) {
    for (const uint32_t plane : plane_of) {
      PlaneView view = layout.view(layer, plane);
      const uint32_t head = slice.head_begin - layout.first_head;
      view.data = address_at(view.data, int64_t{head} * view.head_stride);
      views_.push_back(view);
    }
  }

  uint32_t begin = slice.token_begin;
  for (const uint32_t end : tile_ends) {
    if (end <= begin || end > slice.token_end) {
      refuse("tile end " + std::to_string(end) + " does not lie in (" + std::to_string(begin) +
             ", " + std::to_string(slice.token_end) + "]");
    }
    const uint64_t slot = uint64_t{table.first_slot} + (begin - table.first_token);
    Tile tile;
    tile.block = table.blocks[slot / block_size_];
    tile.slot = static_cast<uint32_t>(slot % block_size_);
    tile.tokens = end - begin;
    tile.before = begin - slice.token_begin;
    if (tile.slot + tile.tokens > block_size_) {
      refuse("tile [" + std::to_string(begin) + ", " + std::to_string(end) +
             ") reaches over the end of a block of " + std::to_string(block_size_) + " tokens");
    }
    tiles_.push_back(tile);
    begin = end;
  }
  if (begin != slice.token_end) {
    refuse("the tiles end at token " + std::to_string(begin) + ", the slice at " +
           std::to_string(slice.token_end));
  }
  set_order(order);
  find_contiguity();
}

uint64_t CopyPlan::plan_bytes() const {
  return sizeof(*this) + views_.capacity() * (sizeof(PlaneView) + sizeof(Contiguity)) +
         tiles_.capacity() * sizeof(Tile);
}

void CopyPlan::set_order(const WireOrder& order) {
  order_ = order;
  depth_of_.fill(kAxes);
  for (size_t depth = 0; depth < kAxes; ++depth) {
    const auto axis = static_cast<size_t>(order[depth]);
    if (axis >= kAxes || depth_of_[axis] != kAxes)
      refuse("the wire order does not name each axis once");
    depth_of_[axis] = depth;
  }
  if (depth_of(Axis::kTile) > depth_of(Axis::kToken)) {
    refuse("the wire order has Token outside Tile; tokens are positions within a tile");
  }
  nest_factor_[kAxes] = 1;
  for (size_t depth = kAxes; depth-- > 0;) {
    uint64_t factor = 1;
    if (order[depth] == Axis::kLayer) factor = num_layers_;
    if (order[depth] == Axis::kHead) factor = num_heads_;
    if (order[depth] == Axis::kTile) factor = num_tokens_;
    if (order[depth] == Axis::kPlane) factor = row_bytes_before_.back() + row_bytes_.back();
    nest_factor_[depth] = nest_factor_[depth + 1] * factor;
  }
  wire_bytes_ = nest_factor_[0];
}

uint64_t CopyPlan::nest_units(size_t depth, uint32_t tile_tokens) const {
  const bool one_tile = depth_of(Axis::kTile) < depth && depth_of(Axis::kToken) >= depth;
  return nest_factor_[depth] * (one_tile ? tile_tokens : 1);
}

uint64_t CopyPlan::nest_bytes(size_t depth, uint32_t plane, uint32_t tile_tokens) const {
  const bool one_plane = depth_of(Axis::kPlane) < depth;
  return nest_units(depth, tile_tokens) * (one_plane ? row_bytes_[plane] : 1);
}

uint64_t CopyPlan::seek(uint64_t offset, Position& position) const {
  uint32_t plane = 0;
  uint32_t tokens = 0;
  for (size_t depth = 0; depth < kAxes; ++depth) {
    uint32_t index = 0;
    if (order_[depth] == Axis::kPlane) {
      const uint64_t unit = nest_units(depth + 1, tokens);
      const auto behind =
          std::upper_bound(row_bytes_before_.begin(), row_bytes_before_.end(), offset / unit);
      index = static_cast<uint32_t>(behind - row_bytes_before_.begin()) - 1;
      offset -= row_bytes_before_[index] * unit;
      plane = index;
    } else if (order_[depth] == Axis::kTile) {
      const uint64_t unit = nest_bytes(depth + 1, plane, 1);
      const auto behind =
          std::upper_bound(tiles_.begin(), tiles_.end(), offset / unit,
                           [](uint64_t token, const Tile& tile) { return token < tile.before; });
      index = static_cast<uint32_t>(behind - tiles_.begin()) - 1;
      offset -= tiles_[index].before * unit;
      tokens = tiles_[index].tokens;
    } else {
      const uint64_t unit = nest_bytes(depth + 1, plane, tokens);
      index = static_cast<uint32_t>(offset / unit);
      offset -= index * unit;
    }
    position[depth] = index;
  }
  return offset;
}

uint64_t CopyPlan::row_floor(uint64_t offset) const {
  if (offset >= wire_bytes_) return wire_bytes_;
  Position position;
  return offset - seek(offset, position);
}

std::pair<uint32_t, uint32_t> CopyPlan::layers_of(uint64_t begin, uint64_t end) const {
  end = std::min(end, wire_bytes_);
  if (begin >= end) return {0, 0};
  if (order_[0] != Axis::kLayer) return {0, num_layers_};
  const uint64_t layer = nest_factor_[1];
  return {static_cast<uint32_t>(begin / layer), static_cast<uint32_t>((end + layer - 1) / layer)};
}

void CopyPlan::append_runs(uint64_t begin, uint64_t end, std::vector<Run>& out) const {
  RunCursor cursor(*this, begin, end);
  std::array<Run, 64> runs;
  while (const size_t count = cursor.fill(runs)) {
    out.insert(out.end(), runs.begin(), runs.begin() + static_cast<std::ptrdiff_t>(count));
  }
}

void CopyPlan::append_tail_runs(std::vector<Run>& out) const {
  const Tile& last = tiles_.back();
  const uint32_t used = last.slot + last.tokens;
  if (used == block_size_) return;
  CopyPlan tail(*this);
  tail.num_tokens_ = block_size_ - used;
  tail.tiles_ = {{last.block, used, tail.num_tokens_, 0}};
  tail.set_order(order_);
  tail.append_runs(0, tail.wire_bytes_, out);
}

}  // namespace kvxfer
