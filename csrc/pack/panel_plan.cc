#include "kvxfer/panel_plan.h"

#include <algorithm>
#include <string>
#include <utility>

#include "codec/stored_name.h"
#include "codec/up16.h"
#include "kvxfer/status.h"
#include "layout/address.h"
#include "layout/scale_checks.h"
#include "layout/slice_checks.h"
#include "pack/chunk_header.h"
#include "pack/zero_runs.h"

namespace kvxfer {
namespace {

[[noreturn]] void refuse(const std::string& what) { throw Error(StatusCode::kInvalid, what); }

void check_format(const PanelFormat& format, size_t layers, size_t planes) {
  element_bytes(format.producer_element);
  if (format.panel_tokens == 0 || format.panel_tokens > kMaxPanelRows) {
    refuse("panels of " + std::to_string(format.panel_tokens) + " tokens are asked for; 1 to " +
           std::to_string(kMaxPanelRows) + " are possible");
  }
  if (planes > kMaxChunkPlanes) {
    refuse(std::to_string(planes) + " planes are asked for; the header of a chunk has room for " +
           std::to_string(kMaxChunkPlanes));
  }
  if (format.encodings.size() != planes) {
    refuse(std::to_string(format.encodings.size()) + " encodings are given for " +
           std::to_string(planes) + " planes");
  }
  for (const Encoding& encoding : format.encodings) {
    check_encoding(encoding, format.producer_element);
  }
  check_scales(format.producer_scales, layers * planes, format.producer_element);
}

}  // namespace

PanelPlan::PanelPlan(const CacheLayout& layout, const BlockTable& table, const Slice& slice,
                     std::vector<uint32_t> plane_of, PanelFormat format)
    : format_(std::move(format)), element_(layout.element), block_size_(layout.block_size) {
  check_slice(layout, slice);
  check_planes(layout, plane_of);
  table.validate(layout, slice.token_begin, slice.token_end, false);
  check_format(format_, slice.layers.size(), plane_of.size());

  num_layers_ = static_cast<uint32_t>(slice.layers.size());
  num_heads_ = slice.head_end - slice.head_begin;
  num_tokens_ = slice.token_end - slice.token_begin;

  const uint64_t slot = uint64_t{table.first_slot} + (slice.token_begin - table.first_token);
  first_slot_ = static_cast<uint32_t>(slot % block_size_);
  const auto first = table.blocks.begin() + static_cast<std::ptrdiff_t>(slot / block_size_);
  const uint64_t used = (uint64_t{first_slot_} + num_tokens_ + block_size_ - 1) / block_size_;
  blocks_.assign(first, first + static_cast<std::ptrdiff_t>(used));

  produces_ = element_ == format_.producer_element;
  for (const uint32_t layer : slice.layers) {
    for (const uint32_t plane : plane_of) {
      PlaneView memory = layout.view(layer, plane);
      const uint32_t head = slice.head_begin - layout.first_head;
      memory.data = address_at(memory.data, int64_t{head} * memory.head_stride);
      Stored producer = {format_.producer_element, 1.0f};
      if (!format_.producer_scales.empty()) {
        producer.scale = format_.producer_scales[views_.size()];
      }
      const Stored own = {element_, layout.scale(layer, plane)};
      if (!can_convert(producer, own)) {
        throw Error(StatusCode::kMismatch, "layer \"" + layout.layers[layer] + "\", plane \"" +
                                               layout.planes[plane].name + "\": the producer's " +
                                               stored_name(producer) + " can't become " +
                                               stored_name(own));
      }
      produces_ = produces_ && producer == own;
      views_.push_back({memory, conversion(producer, own)});
    }
  }
  cut_stretches(slice.token_begin, slice.token_end);
  measure_planes(layout, plane_of);
}

Conversion PanelPlan::conversion(const Stored& producer, const Stored& own) const {
  for (const View& view : views_) {
    if (view.conversion.from() == producer && view.conversion.to() == own) return view.conversion;
  }
  return {producer, own};
}

void PanelPlan::cut_stretches(uint32_t begin, uint32_t end) {
  const uint32_t until = std::clamp(format_.raw_until, begin, end);
  const uint32_t from = std::clamp(format_.raw_from, until, end);
  const std::array<uint32_t, 4> ends = {begin, until, from, end};
  for (size_t i = 0; i < stretches_.size(); ++i) {
    const uint32_t tokens = ends[i + 1] - ends[i];
    Stretch& stretch = stretches_[i];
    stretch.coded = i == 1;
    stretch.first_token = ends[i] - begin;
    stretch.first_run = num_runs_;
    stretch.runs = tokens / format_.panel_tokens + (tokens % format_.panel_tokens != 0);
    if (stretch.runs > 0) stretch.last_rows = tokens - (stretch.runs - 1) * format_.panel_tokens;
    num_runs_ += stretch.runs;
  }
}

void PanelPlan::measure_planes(const CacheLayout& layout, const std::vector<uint32_t>& plane_of) {
  std::vector<uint32_t> contents;
  for (size_t i = 0; i < plane_of.size(); ++i) {
    Plane plane;
    plane.content = layout.planes[plane_of[i]].content;
    plane.encoding = format_.encodings[i];
    plane.before_plane = layer_extent_;
    Extent one_head;
    for (size_t s = 0; s < stretches_.size(); ++s) {
      const Stretch& stretch = stretches_[s];
      plane.before[s] = one_head;
      if (stretch.runs == 0) continue;
      plane.full[s] = panel_extent(plane, stretch.coded, format_.panel_tokens);
      plane.last[s] = panel_extent(plane, stretch.coded, stretch.last_rows);
      one_head = one_head + plane.full[s] * (stretch.runs - 1) + plane.last[s];
    }
    layer_extent_ = layer_extent_ + one_head * num_heads_;
    contents.push_back(plane.content);
    planes_.push_back(plane);
  }
  const uint64_t heads_and_runs = uint64_t{num_heads_} * num_runs_;
  if (heads_and_runs > UINT32_MAX / num_layers_ / num_planes()) {
    refuse("the slice has more than 2^32 panels of " + std::to_string(format_.panel_tokens) +
           " tokens; ask for fewer tokens or larger panels");
  }
  header_ = make_header(format_, contents);
}

PanelPlan::Extent PanelPlan::panel_extent(const Plane& plane, bool coded, uint32_t rows) const {
  const uint64_t elements = uint64_t{rows} * plane.content;
  Extent extent;
  extent.memory_bytes = elements * element_bytes(element_);
  const Encoding encoding = coded ? plane.encoding : Encoding{};
  extent.panel_bytes = panel_bytes(encoding, format_.producer_element, rows, plane.content);
  if (encoding.scheme != Scheme::kRaw) {
    extent.coded_rows = rows;
    extent.raw_bytes = elements * element_bytes(format_.producer_element);
  }
  return extent;
}

size_t PanelPlan::stretch_of(uint32_t run) const {
  size_t s = 0;
  while (run >= stretches_[s].first_run + stretches_[s].runs) ++s;
  return s;
}

PanelPlan::Extent PanelPlan::extent_before(uint32_t panel) const {
  const Extent layers = layer_extent_ * (panel / panels_per_layer());
  panel %= panels_per_layer();
  const Plane& plane = planes_[panel / (num_runs_ * num_heads_)];
  panel %= num_runs_ * num_heads_;
  const uint32_t run = panel / num_heads_;
  const size_t s = stretch_of(run);
  const uint32_t run_of_stretch = run - stretches_[s].first_run;
  const Extent before = plane.before[s] + plane.full[s] * run_of_stretch;
  const bool is_last = run_of_stretch + 1 == stretches_[s].runs;
  const Extent& each = is_last ? plane.last[s] : plane.full[s];
  return layers + plane.before_plane + before * num_heads_ + each * (panel % num_heads_);
}

PanelPlan::Extent PanelPlan::extent_of(uint32_t begin, uint32_t end) const {
  if (begin > end || end > num_panels()) {
    refuse("panels [" + std::to_string(begin) + ", " + std::to_string(end) +
           ") are asked for; the slice has " + std::to_string(num_panels()));
  }
  return extent_before(end) - extent_before(begin);
}

uint64_t PanelPlan::chunk_bytes(const Extent& panels, uint64_t exceptions,
                                uint64_t raw_bytes) const {
  return header_.size() + panels.panel_bytes + up16(4 * exceptions) + up16(raw_bytes);
}

uint64_t PanelPlan::memory_bytes(uint32_t begin, uint32_t end) const {
  return extent_of(begin, end).memory_bytes;
}

uint64_t PanelPlan::plan_bytes() const {
  return sizeof(*this) + blocks_.capacity() * sizeof(uint32_t) +
         planes_.capacity() * sizeof(Plane) + views_.capacity() * sizeof(View) +
         format_.producer_scales.capacity() * sizeof(float) + header_.capacity();
}

uint64_t PanelPlan::most_bytes(uint32_t begin, uint32_t end) const {
  const Extent extent = extent_of(begin, end);
  return chunk_bytes(extent, extent.coded_rows, extent.raw_bytes);
}

void PanelPlan::append_tail_runs(std::vector<Run>& runs) const {
  const auto used = static_cast<uint32_t>((uint64_t{first_slot_} + num_tokens_) % block_size_);
  if (used == 0) return;
  const size_t bytes = element_bytes(element_);
  for (size_t i = 0; i < views_.size(); ++i) {
    const PlaneView& view = views_[i].memory;
    const uint32_t content = planes_[i % num_planes()].content;
    std::byte* block = view.data + blocks_.back() * view.block_stride;
    for (uint32_t head = 0; head < num_heads_; ++head) {
      std::byte* tail = block + head * view.head_stride + used * view.token_stride;
      if (view.content_stride == static_cast<int64_t>(bytes)) {
        runs.push_back({tail, content * bytes, block_size_ - used, view.token_stride});
        continue;
      }
      for (uint32_t slot = used; slot < block_size_; ++slot, tail += view.token_stride) {
        runs.push_back({tail, bytes, content, view.content_stride});
      }
    }
  }
}

void zero_tail(const PanelPlan& plan) {
  std::vector<Run> runs;
  plan.append_tail_runs(runs);
  zero_runs(runs);
}

}  // namespace kvxfer
