#include "kvxfer/pack.h"

#include <algorithm>
#include <array>
#include <cstring>

#include "base/digest_kernels.h"
#include "layout/run_cursor.h"
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

Digest digest_in_place(const CopyPlan& plan, uint64_t begin, uint64_t end, uint64_t seed) {
  const StripeKernels& kernels = stripe_kernels();
  DigestState state;
  std::array<std::byte, kStripe> stripe;  // one that pieces of memory share
  size_t held = 0;
  const auto add = [&](const std::byte* from, uint64_t left) {
    if (held > 0) {
      const size_t taken = std::min<uint64_t>(kStripe - held, left);
      std::memcpy(stripe.data() + held, from, taken);
      held += taken;
      from += taken;
      left -= taken;
      if (held < kStripe) return;
      kernels.digest(stripe.data(), 1, state);
      held = 0;
    }
    if (left >= kStripe) kernels.digest(from, left / kStripe, state);
    held = left % kStripe;
    std::memcpy(stripe.data(), from + (left - held), held);
  };
  RunCursor cursor(plan, begin, end);
  std::array<Run, 64> runs;
  while (const size_t count = cursor.fill(runs)) {
    for (size_t i = 0; i < count; ++i) {
      for (uint64_t piece = 0; piece < runs[i].count; ++piece) {
        add(runs[i].address + static_cast<int64_t>(piece) * runs[i].stride, runs[i].bytes);
      }
    }
  }
  return finish_digest(state, stripe.data(), held, end - begin, seed);
}

void zero_tail(const CopyPlan& plan) {
  std::vector<Run> runs;
  plan.append_tail_runs(runs);
  zero_runs(runs);
}

}  // namespace kvxfer
