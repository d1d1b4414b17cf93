#include "kvxfer/pack.h"

#include "pack/mover.h"
#include "pack/zero_runs.h"

namespace kvxfer {

Digest pack(const CopyPlan& plan, uint64_t begin, uint64_t end, std::byte* wire, uint64_t seed,
            bool with_digest, bool stream) {
  Mover<Direction::kGather> mover(wire, with_digest, stream);
  return mover.run(plan, begin, end, seed);
}

Digest unpack(const CopyPlan& plan, uint64_t begin, uint64_t end, const std::byte* wire,
              uint64_t seed, bool with_digest) {
  // Nobody reads the blocks soon, and streaming saves reading their old contents first.
  Mover<Direction::kScatter> mover(wire, with_digest, /*stream=*/true);
  return mover.run(plan, begin, end, seed);
}

void zero_tail(const CopyPlan& plan) {
  std::vector<Run> runs;
  plan.append_tail_runs(runs);
  zero_runs(runs);
}

}  // namespace kvxfer
