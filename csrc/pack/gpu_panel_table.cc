#include "pack/gpu_panel_table.h"

#include <cstring>

#include "codec/code_table.h"
#include "kvxfer/status.h"
#include "pack/gpu_raw_table.h"

namespace kvxfer {
namespace {

using gpu::PanelChunk;
using gpu::PanelEntry;
using gpu::PanelKind;
using gpu::PanelView;

PanelKind make_kind(const Encoding& encoding, ElementType producer, ElementType own,
                    uint32_t content) {
  PanelKind kind;
  kind.scheme = static_cast<uint8_t>(encoding.scheme);
  kind.scale_format = static_cast<uint8_t>(encoding.scale);
  kind.producer = static_cast<uint8_t>(producer);
  kind.own = static_cast<uint8_t>(own);
  kind.group = encoding.group == 0 || encoding.group > content ? content : encoding.group;
  kind.content = content;
  return kind;
}

[[noreturn]] void refuse(const std::string& what) {
  throw Error(StatusCode::kInvalid, what + "; such caches are packed by the host");
}

}  // namespace

GpuPanelTable::GpuPanelTable(const PanelPlan& plan) : plan_(plan) {
  const ElementType producer = plan.format_.producer_element;
  for (const PanelPlan::Plane& plane : plan.planes_) {
    kinds_.push_back(make_kind(plane.encoding, producer, plan.element_, plane.content));
    kinds_.push_back(make_kind(Encoding{}, producer, plan.element_, plane.content));
  }
  const auto element = static_cast<int64_t>(element_bytes(plan.element_));
  for (size_t i = 0; i < plan.views_.size(); ++i) {
    const PanelPlan::View& view = plan.views_[i];
    const auto data = static_cast<int64_t>(reinterpret_cast<uintptr_t>(view.memory.data));
    const uint32_t content = plan.planes_[i % plan.num_planes()].content;
    if (view.memory.content_stride != element && content > 1) {
      refuse("a GPU cannot pack rows whose elements lie " +
             std::to_string(view.memory.content_stride) + " bytes apart");
    }
    if ((data | view.memory.block_stride | view.memory.head_stride | view.memory.token_stride) %
            element !=
        0) {
      refuse("a GPU cannot pack elements that are not aligned to their size");
    }
    views_.push_back(
        {view.memory.block_stride, view.memory.token_stride, 1.0f / view.conversion.to().scale, 0});
    for (const size_t k : {0, 1}) {
      const PanelKind& kind = kinds_[i % plan.num_planes() * 2 + k];
      pack_kernels_.push_back(kernel_of(kind, i, true));
      unpack_kernels_.push_back(kernel_of(kind, i, false));
    }
  }
}

void GpuPanelTable::add_codes(uint32_t begin, uint32_t end) {
  const uint32_t panels_per_view = plan_.num_runs_ * plan_.num_heads_;
  for (uint32_t i = begin / panels_per_view; i * panels_per_view < end; ++i) {
    const CodeTable* table = plan_.views_[i].conversion.table();
    if (table == nullptr) continue;
    const auto [at, is_new] = codes_of_.emplace(table, codes_of_.size() + 1);
    views_[i].codes = at->second;
    for (size_t code = 0; is_new && code < table->bits.size(); ++code) {
      const bool loses = table->clamped[code] || table->inexact[code];
      codes_.push_back(table->bits[code] | (loses ? gpu::kCodeLoses : 0));
    }
  }
}

std::string GpuPanelTable::kernel_of(const PanelKind& kind, size_t index, bool pack) const {
  const PanelPlan::View& view = plan_.views_[index];
  const PlaneView& memory = view.memory;
  const auto data = static_cast<int64_t>(reinterpret_cast<uintptr_t>(memory.data));
  const bool aligned =
      (data | memory.block_stride | memory.head_stride | memory.token_stride) % 16 == 0;
  const uint8_t element = pack ? kind.producer : kind.own;
  const bool half = element == static_cast<uint8_t>(ElementType::kFloat16);
  const bool wide = half || element == static_cast<uint8_t>(ElementType::kBFloat16);
  const bool by_row = kind.group == kind.content && kind.scheme >= 1 && kind.scheme <= 3;
  const uint32_t content = kind.content;
  const bool size = content == 64 || content == 128 || content == 256 || content == 576;
  const std::string verb = pack ? "kvxfer_pack_" : "kvxfer_unpack_";
  const bool scaled = view.conversion.to().scale != 1.0f;
  if (!aligned || !wide || !by_row || !size || scaled) return verb + "panels";
  const char* const schemes[] = {"", "e4m3", "e5m2", "int8"};
  return verb + schemes[kind.scheme] + (half ? "_float16_" : "_bfloat16_") +
         std::to_string(content);
}

GpuPanelTable::Panel GpuPanelTable::panel(uint32_t index) const {
  Panel panel;
  panel.head = index % plan_.num_heads_;
  index /= plan_.num_heads_;
  const uint32_t run = index % plan_.num_runs_;
  panel.view = index / plan_.num_runs_;
  const size_t s = plan_.stretch_of(run);
  const PanelPlan::Stretch& stretch = plan_.stretches_[s];
  const uint32_t plane = panel.view % plan_.num_planes();
  const uint32_t run_of_stretch = run - stretch.first_run;
  const bool is_last = run_of_stretch + 1 == stretch.runs;
  panel.first_token = stretch.first_token + run_of_stretch * plan_.format_.panel_tokens;
  panel.rows = is_last ? stretch.last_rows : plan_.format_.panel_tokens;
  const PanelPlan::Plane& sizes = plan_.planes_[plane];
  panel.bytes = (is_last ? sizes.last : sizes.full)[s].panel_bytes;
  panel.kind = static_cast<uint16_t>(plane * 2 + (stretch.coded ? 0 : 1));
  return panel;
}

uint32_t GpuPanelTable::rows(uint32_t begin, uint32_t end) const {
  uint32_t rows = 0;
  for (uint32_t i = begin; i < end; ++i) rows += panel(i).rows;
  return rows;
}

void GpuPanelTable::add_chunk(uint32_t begin, uint32_t end, uint64_t wire, uint64_t marks,
                              uint64_t bytes) {
  constexpr uint64_t kMostBytes = 1 << 30;
  if (begin >= end || end > plan_.num_panels() || wire % 16 != 0 || bytes >= kMostBytes ||
      plan_.most_bytes(begin, end) >= kMostBytes) {
    throw Error(StatusCode::kInvalid,
                "panels [" + std::to_string(begin) + ", " + std::to_string(end) + ") at address " +
                    std::to_string(wire) + " are no chunk for a GPU: the plan has " +
                    std::to_string(plan_.num_panels()) +
                    " panels, a chunk less than 2^30 bytes, and its address has to be a multiple "
                    "of 16");
  }
  add_codes(begin, end);
  PanelChunk chunk;
  chunk.wire = wire;
  chunk.marks = marks;
  chunk.first_entry = static_cast<uint32_t>(entries_.size());
  chunk.panels = end - begin;
  chunk.panels_end = static_cast<uint32_t>(plan_.header_.size());
  chunk.first_panel = begin;
  chunk.bytes = static_cast<uint32_t>(bytes);
  for (uint32_t i = begin; i < end; ++i) {
    const Panel at = panel(i);
    const PlaneView& memory = plan_.views_[at.view].memory;
    PanelEntry entry;
    entry.base = reinterpret_cast<uintptr_t>(memory.data) +
                 static_cast<uint64_t>(int64_t{at.head} * memory.head_stride);
    entry.first = plan_.first_slot_ + at.first_token;
    entry.wire = chunk.panels_end;
    entry.first_row = chunk.rows;
    entry.chunk = static_cast<uint32_t>(chunks_.size());
    entry.view = at.view;
    entry.rows = static_cast<uint16_t>(at.rows);
    entry.kind = at.kind;
    const size_t kernel = at.view * 2 + at.kind % 2;
    const auto index = static_cast<uint32_t>(entries_.size());
    pack_orders_[pack_kernels_[kernel]].push_back(index);
    unpack_orders_[unpack_kernels_[kernel]].push_back(index);
    entries_.push_back(entry);
    chunk.rows += at.rows;
    chunk.panels_end += static_cast<uint32_t>(at.bytes);
  }
  chunks_.push_back(chunk);
}

const std::vector<uint32_t>& GpuPanelTable::blocks() const { return plan_.blocks_; }
const std::vector<std::byte>& GpuPanelTable::header() const { return plan_.header_; }

gpu::PanelLaunch GpuPanelTable::launch() const {
  gpu::PanelLaunch launch = {};
  launch.block_size = plan_.block_size_;
  launch.blocks_of = gpu::make_divider(plan_.block_size_);
  launch.header_bytes = static_cast<uint32_t>(plan_.header_.size());
  return launch;
}

}  // namespace kvxfer
