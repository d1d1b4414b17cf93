#ifndef KVXFER_LAYOUT_RUN_CURSOR_H_
#define KVXFER_LAYOUT_RUN_CURSOR_H_

#include <cstddef>
#include <cstdint>
#include <span>

#include "kvxfer/copy_plan.h"

namespace kvxfer {

// Walks the runs of wire bytes [begin, end) without holding all of them. The plan must outlive it.
class RunCursor {
 public:
  // Both on row boundaries, else throws Error(kInvalid).
  RunCursor(const CopyPlan& plan, uint64_t begin, uint64_t end);

  // Fills `out` with the next runs, merged with each other, and returns how many; 0 at the end.
  size_t fill(std::span<Run> out);

  bool done() const { return left_ == 0 && !has_pending_; }

 private:
  // One piece, or equally spaced pieces, along a single axis.
  Run step();
  void advance(size_t depth, uint32_t count);
  uint32_t extent(size_t depth) const;
  uint32_t at(Axis axis) const { return position_[plan_.depth_of(axis)]; }
  const CopyPlan::Tile& tile() const { return plan_.tiles_[at(Axis::kTile)]; }

  const CopyPlan& plan_;
  uint64_t left_ = 0;  // wire bytes
  CopyPlan::Position position_ = {};
  Run pending_;  // taken, but not yet handed out: the next may continue it
  bool has_pending_ = false;
};

}  // namespace kvxfer

#endif  // KVXFER_LAYOUT_RUN_CURSOR_H_
