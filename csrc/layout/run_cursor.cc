#include "layout/run_cursor.h"

#include <algorithm>
#include <string>

#include "kvxfer/status.h"
#include "layout/address.h"

namespace kvxfer {
namespace {

constexpr size_t kRowDepth = 5;

// Whether `next` continues `run` in memory; if so, takes it in.
bool merge(Run& run, const Run& next) {
  if (run.count == 1) {
    if (next.count != 1) return false;
    if (address_at(run.address, static_cast<int64_t>(run.bytes)) != next.address) return false;
    run.bytes += next.bytes;
    return true;
  }
  if (run.bytes != next.bytes) return false;
  if (next.count != 1 && next.stride != run.stride) return false;
  const int64_t length = static_cast<int64_t>(run.count) * run.stride;
  if (address_at(run.address, length) != next.address) return false;
  run.count += next.count;
  return true;
}

}  // namespace

RunCursor::RunCursor(const CopyPlan& plan, uint64_t begin, uint64_t end) : plan_(plan) {
  const bool in_range = begin <= end && end <= plan.wire_bytes();
  if (!in_range || plan.row_floor(begin) != begin || plan.row_floor(end) != end) {
    throw Error(StatusCode::kInvalid, "wire bytes [" + std::to_string(begin) + ", " +
                                          std::to_string(end) + ") of " +
                                          std::to_string(plan.wire_bytes()) +
                                          " do not lie on row boundaries; use row_floor()");
  }
  left_ = end - begin;
  if (left_ > 0) plan.seek(begin, position_);
}

size_t RunCursor::fill(std::span<Run> out) {
  size_t filled = 0;
  while (filled < out.size() && !done()) {
    if (!has_pending_) {
      pending_ = step();
      has_pending_ = true;
    }
    while (left_ > 0) {
      const Run next = step();
      if (merge(pending_, next)) continue;
      out[filled++] = pending_;
      pending_ = next;
      if (filled == out.size()) return filled;
    }
    out[filled++] = pending_;
    has_pending_ = false;
  }
  return filled;
}

Run RunCursor::step() {
  const uint32_t layer = at(Axis::kLayer);
  const uint32_t plane = at(Axis::kPlane);
  const CopyPlan::Tile& tile = this->tile();
  const size_t index = plan_.view_index(layer, plane);
  const PlaneView& view = plan_.views_[index];
  const CopyPlan::Contiguity& contiguity = plan_.contiguity_[index];
  const uint32_t slot = tile.slot + at(Axis::kToken);
  Run run;
  run.address = view.data;  // step by step: with a peer's strides the sum may be more than 2^63
  run.address = address_at(run.address, int64_t{tile.block} * view.block_stride);
  run.address = address_at(run.address, int64_t{at(Axis::kHead)} * view.head_stride);
  run.address = address_at(run.address, int64_t{slot} * view.token_stride);
  if (contiguity[kRowDepth] == CopyPlan::kNever) {
    run.bytes = plan_.element_bytes_;
    run.count = plan_.row_bytes_[plane] / run.bytes;
    run.stride = view.content_stride;
    left_ -= plan_.row_bytes_[plane];
    advance(kRowDepth - 1, 1);
    return run;
  }

  const size_t tile_depth = plan_.depth_of(Axis::kTile);
  size_t depth = kRowDepth;
  run.bytes = plan_.row_bytes_[plane];
  while (depth - 1 > tile_depth && position_[depth - 1] == 0) {
    const uint32_t needed = contiguity[depth - 1];
    if (needed != CopyPlan::kAlways && needed != tile.tokens) break;
    const uint64_t bytes = plan_.nest_bytes(depth - 1, plane, tile.tokens);
    if (bytes > left_) break;
    run.bytes = bytes;
    --depth;
  }

  const size_t along = depth - 1;
  const Axis axis = plan_.order_[along];
  if (axis == Axis::kHead || axis == Axis::kToken) {
    run.stride = axis == Axis::kHead ? view.head_stride : view.token_stride;
    run.count = extent(along) - position_[along];
    if (run.count * run.bytes > left_) run.count = left_ / run.bytes;
  }
  left_ -= run.bytes * run.count;
  advance(along, static_cast<uint32_t>(run.count));
  if (run.stride == static_cast<int64_t>(run.bytes)) {
    run.bytes *= run.count;
    run.count = 1;
  }
  if (run.count == 1) run.stride = 0;
  return run;
}

void RunCursor::advance(size_t depth, uint32_t count) {
  position_[depth] += count;
  while (depth > 0 && position_[depth] == extent(depth)) {
    position_[depth] = 0;
    ++position_[--depth];
  }
}

uint32_t RunCursor::extent(size_t depth) const {
  switch (plan_.order_[depth]) {
    case Axis::kLayer: return plan_.num_layers_;
    case Axis::kPlane: return static_cast<uint32_t>(plan_.row_bytes_.size());
    case Axis::kTile: return static_cast<uint32_t>(plan_.tiles_.size());
    case Axis::kHead: return plan_.num_heads_;
    case Axis::kToken: return tile().tokens;
  }
  return 0;
}

}  // namespace kvxfer
