#ifndef KVXFER_PACK_PANEL_CURSOR_H_
#define KVXFER_PACK_PANEL_CURSOR_H_

#include <array>
#include <cstddef>
#include <cstdint>

#include "kvxfer/panel_plan.h"

namespace kvxfer {

using RowPointers = std::array<std::byte*, kMaxPanelRows>;

// Walks through the panels of a plan in wire order.
class PanelCursor {
 public:
  // At panel `panel` < plan.num_panels().
  PanelCursor(const PanelPlan& plan, uint32_t panel);

  // Goes on to the next panel. There must be one before anything else is asked.
  void next();

  uint32_t rows() const { return rows_; }
  uint32_t content() const { return plane_->content; }
  const Encoding& encoding() const { return encoding_; }
  bool coded() const { return encoding_.scheme != Scheme::kRaw; }
  uint64_t panel_bytes() const { return panel_bytes_; }
  const Conversion& conversion() const { return view_->conversion; }
  int64_t token_stride() const { return view_->memory.token_stride; }
  int64_t content_stride() const { return view_->memory.content_stride; }

  // Where the first element of each of the rows() rows lies in this side's cache.
  void find_rows(RowPointers& row);

 private:
  void enter_view();
  void enter_run();
  void find_offsets();

  const PanelPlan& plan_;
  uint32_t view_index_ = 0;  // layer * planes + plane
  uint32_t run_ = 0;
  uint32_t head_ = 0;

  const PanelPlan::View* view_ = nullptr;
  const PanelPlan::Plane* plane_ = nullptr;
  uint32_t first_token_ = 0;
  uint32_t rows_ = 0;
  uint64_t panel_bytes_ = 0;
  Encoding encoding_;
  // Offsets of the run's rows, which all heads share; of as many rows as were asked for.
  bool offsets_known_ = false;
  std::array<int64_t, kMaxPanelRows> offset_;
};

}  // namespace kvxfer

#endif  // KVXFER_PACK_PANEL_CURSOR_H_
