#ifndef KVXFER_PACK_ZERO_RUNS_H_
#define KVXFER_PACK_ZERO_RUNS_H_

#include <cstdint>
#include <cstring>
#include <vector>

#include "kvxfer/copy_plan.h"

namespace kvxfer {

inline void zero_runs(const std::vector<Run>& runs) {
  for (const Run& run : runs) {
    for (uint64_t i = 0; i < run.count; ++i) {
      std::memset(run.address + static_cast<int64_t>(i) * run.stride, 0, run.bytes);
    }
  }
}

}  // namespace kvxfer

#endif  // KVXFER_PACK_ZERO_RUNS_H_
