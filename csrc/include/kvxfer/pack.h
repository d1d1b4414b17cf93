#ifndef KVXFER_PACK_H_
#define KVXFER_PACK_H_

#include <cstddef>
#include <cstdint>

#include "kvxfer/copy_plan.h"
#include "kvxfer/digest.h"

namespace kvxfer {

// Gathers wire bytes [begin, end) of the plan, both on row boundaries, into `wire`, and returns
// their digest, computed in the same pass. With `with_digest` false the result is Digest{}.
// Thread-safe for ranges that do not overlap; neither function allocates.
//
// `stream` writes `wire` past the caches: right where another core reads it, which would have to
// fetch every line out of ours; wrong where this one does.
Digest pack(const CopyPlan& plan, uint64_t begin, uint64_t end, std::byte* wire, uint64_t seed,
            bool with_digest = true, bool stream = false);

// Scatters `wire` into wire bytes [begin, end) of the plan, and returns the digest of `wire`. The
// caller compares it before it publishes the blocks.
Digest unpack(const CopyPlan& plan, uint64_t begin, uint64_t end, const std::byte* wire,
              uint64_t seed, bool with_digest = true);

// The digest that pack() would compute, of bytes that stay where they are.
Digest digest_in_place(const CopyPlan& plan, uint64_t begin, uint64_t end, uint64_t seed);

// Zeroes what plan.append_tail_runs() names.
void zero_tail(const CopyPlan& plan);

}  // namespace kvxfer

#endif  // KVXFER_PACK_H_
