#ifndef KVXFER_PACK_STREAM_DIGEST_H_
#define KVXFER_PACK_STREAM_DIGEST_H_

#include <cstddef>
#include <cstdint>

#include "base/digest_kernels.h"
#include "kvxfer/digest.h"

namespace kvxfer {

// The digest of a chunk, made piece by piece while the pieces are in the cache. Its header may come
// last: how many exceptions there are is known only behind the panels.
class StreamDigest {
 public:
  // With `enabled` false nothing is done, and the digest is Digest{}.
  StreamDigest(const std::byte* wire, size_t header_bytes, bool enabled)
      : kernels_(stripe_kernels()),
        wire_(wire),
        header_bytes_(header_bytes),
        done_(header_bytes),
        enabled_(enabled) {
    skip_stripes(state_, static_cast<uint32_t>(header_bytes / kStripe));
  }

  // What lies between the header and `end` is complete.
  void digest_to(uint64_t end) {
    const size_t stripes = (end - done_) / kStripe;
    if (enabled_ && stripes > 0) kernels_.digest(wire_ + done_, stripes, state_);
    done_ += stripes * kStripe;
  }

  // The same for stripes that are yet to be written to `to`, where digest_to() would have begun.
  void stream(const std::byte* from, size_t stripes, std::byte* to) {
    const Segment segment{to, from, stripes};
    (enabled_ ? kernels_.stream_digest : kernels_.stream)(&segment, 1, 0, state_);
    done_ += stripes * kStripe;
  }

  // All of the chunk is in `wire`.
  Digest finish(uint64_t bytes, uint64_t seed) {
    if (!enabled_) return Digest{};
    digest_to(bytes);
    DigestState front;
    kernels_.digest(wire_, header_bytes_ / kStripe, front);
    add_sums(state_, front);
    return finish_digest(state_, wire_ + done_, bytes - done_, bytes, seed);
  }

 private:
  const StripeKernels& kernels_;
  const std::byte* const wire_;
  const size_t header_bytes_;
  uint64_t done_;
  const bool enabled_;
  DigestState state_;
};

}  // namespace kvxfer

#endif  // KVXFER_PACK_STREAM_DIGEST_H_
