#ifndef KVXFER_LAYOUT_COMMON_RUNS_H_
#define KVXFER_LAYOUT_COMMON_RUNS_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <set>
#include <span>
#include <vector>

#include "kvxfer/copy_plan.h"
#include "layout/run_cursor.h"

namespace kvxfer {

// Walks wire bytes [begin, end) in pieces that are contiguous in the memory of both of two plans of
// the same wire. Both must outlive it.
class CommonRuns {
 public:
  struct Piece {
    std::byte* from = nullptr;
    std::byte* to = nullptr;
    uint64_t bytes = 0;
  };

  // On row boundaries, else throws Error(kInvalid).
  CommonRuns(const CopyPlan& from, const CopyPlan& to, uint64_t begin, uint64_t end)
      : from_(from, begin, end), to_(to, begin, end) {}

  bool next(Piece& piece);  // false: there are no more

 private:
  // Where one side is.
  class Side {
   public:
    Side(const CopyPlan& plan, uint64_t begin, uint64_t end) : cursor_(plan, begin, end) {}
    bool ready();  // false: at the end
    std::byte* address() const;
    uint64_t left() const { return runs_[at_].bytes - taken_; }  // of the run, from here on
    void take(uint64_t bytes);

   private:
    RunCursor cursor_;
    std::array<Run, 16> runs_;
    size_t held_ = 0, at_ = 0;
    uint64_t index_ = 0, taken_ = 0;  // of the pieces of a run, and bytes of that piece
  };

  Side from_, to_;
};

// The memory that a cache's views lie in, by address; what touches or overlaps is one, but for what
// touches at one of `borders`, as where an allocation ends and another one begins.
std::vector<std::span<std::byte>> extents(const CacheLayout& layout,
                                          const std::set<const std::byte*>& borders = {});

}  // namespace kvxfer

#endif  // KVXFER_LAYOUT_COMMON_RUNS_H_
