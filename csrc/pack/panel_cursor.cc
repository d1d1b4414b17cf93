#include "pack/panel_cursor.h"

#include <algorithm>

namespace kvxfer {

PanelCursor::PanelCursor(const PanelPlan& plan, uint32_t panel) : plan_(plan) {
  head_ = panel % plan.num_heads_;
  panel /= plan.num_heads_;
  run_ = panel % plan.num_runs_;
  view_index_ = panel / plan.num_runs_;
  enter_view();
}

void PanelCursor::next() {
  if (++head_ < plan_.num_heads_) return;
  head_ = 0;
  if (++run_ < plan_.num_runs_) return enter_run();
  run_ = 0;
  if (++view_index_ < plan_.views_.size()) enter_view();
}

void PanelCursor::enter_view() {
  view_ = &plan_.views_[view_index_];
  plane_ = &plan_.planes_[view_index_ % plan_.num_planes()];
  enter_run();
}

void PanelCursor::enter_run() {
  const size_t s = plan_.stretch_of(run_);
  const PanelPlan::Stretch& stretch = plan_.stretches_[s];
  const uint32_t run_of_stretch = run_ - stretch.first_run;
  const bool is_last = run_of_stretch + 1 == stretch.runs;
  first_token_ = stretch.first_token + run_of_stretch * plan_.format_.panel_tokens;
  rows_ = is_last ? stretch.last_rows : plan_.format_.panel_tokens;
  panel_bytes_ = (is_last ? plane_->last : plane_->full)[s].panel_bytes;
  encoding_ = stretch.coded ? plane_->encoding : Encoding{};
  offsets_known_ = false;
}

void PanelCursor::find_offsets() {
  const PlaneView& view = view_->memory;
  const uint64_t first = uint64_t{plan_.first_slot_} + first_token_;
  size_t block = first / plan_.block_size_;
  auto slot = static_cast<uint32_t>(first % plan_.block_size_);
  for (uint32_t i = 0; i < rows_; ++block, slot = 0) {
    const uint32_t end = i + std::min(rows_ - i, plan_.block_size_ - slot);
    int64_t offset = plan_.blocks_[block] * view.block_stride + slot * view.token_stride;
    for (; i < end; ++i, offset += view.token_stride) offset_[i] = offset;
  }
  offsets_known_ = true;
}

void PanelCursor::find_rows(RowPointers& row) {
  if (!offsets_known_) find_offsets();
  std::byte* head = view_->memory.data + head_ * view_->memory.head_stride;
  for (uint32_t i = 0; i < rows_; ++i) row[i] = head + offset_[i];
}

}  // namespace kvxfer
