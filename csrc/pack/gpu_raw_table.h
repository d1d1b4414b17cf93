#ifndef KVXFER_PACK_GPU_RAW_TABLE_H_
#define KVXFER_PACK_GPU_RAW_TABLE_H_

#include <cstdint>
#include <vector>

#include "kvxfer/copy_plan.h"
#include "kvxfer/digest.h"
#include "pack/gpu_tables.h"

namespace kvxfer::gpu {

Divider make_divider(uint32_t divisor);  // 0 < divisor < 2^31

// The memory of wire bytes [begin, end) of a copy plan, both on row boundaries, in pieces of one
// size: the largest that all their runs are multiples of. The caller copies pieces() to the device,
// and launches chunks of the range against it.
class RawTable {
 public:
  RawTable(const CopyPlan& plan, uint64_t begin, uint64_t end);
  explicit RawTable(const CopyPlan& plan) : RawTable(plan, 0, plan.wire_bytes()) {}

  const std::vector<uint64_t>& pieces() const { return pieces_; }
  uint32_t piece_bytes() const { return piece_bytes_; }

  // Widest access, 16, 4 or 1, that suits chunk [begin, end): what the kernels' names end in.
  // Chunks of one launch take the narrowest of theirs.
  uint32_t width(uint64_t begin, uint64_t end) const;

  // Wire bytes [begin, end) of the plan, less than 2^30 apart. `device_pieces` is
  // where pieces() lies on the device, and `wire` where the chunk goes to, aligned to 16.
  RawChunk chunk(uint64_t begin, uint64_t end, uint64_t wire, uint64_t device_pieces) const;

 private:
  uint64_t begin_;
  std::vector<uint64_t> pieces_;
  uint32_t piece_bytes_ = 1;
  uint64_t alignment_ = 16;  // of all addresses and pieces; a power of two
  Divider divider_;
};

// Workgroups that a chunk needs: the x size of the grid, for the longest chunk of a launch.
uint32_t raw_groups(uint32_t bytes, uint32_t units);

// Folds the kDigestWords of a chunk of `bytes` bytes that a kernel has added up.
Digest finish_words(const uint64_t* words, uint64_t bytes, uint64_t seed);

}  // namespace kvxfer::gpu

#endif  // KVXFER_PACK_GPU_RAW_TABLE_H_
