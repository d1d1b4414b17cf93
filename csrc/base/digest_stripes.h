#ifndef KVXFER_BASE_DIGEST_STRIPES_H_
#define KVXFER_BASE_DIGEST_STRIPES_H_

// The loops that all SIMD variants share. A variant's file defines KVXFER_TARGET as its function
// attribute before it includes this, and then a class Stripe with
//   struct Sums                      the digest's state in registers
//   static Sums load(const DigestState&), static void save(const Sums&, DigestState&)
//   static void add(Sums&, const std::byte* from)                  digests one stripe
//   static void move(std::byte* to, const std::byte* from)         copies one stripe
//   static void stream(std::byte* to, const std::byte* from)       `to` is aligned to kStripe
//   static void fence()
// All are forced inline: a function without the attribute cannot hold the variant's instructions.

#include <cstdint>
#include <cstring>

#include "base/digest_kernels.h"

#define KVXFER_STRIPE_INLINE KVXFER_TARGET __attribute__((always_inline)) static inline

namespace kvxfer {
namespace {

template <class Stripe>
KVXFER_TARGET void digest_stripes(const std::byte* from, size_t stripes, DigestState& state) {
  auto sums = Stripe::load(state);
  for (size_t i = 0; i < stripes; ++i) Stripe::add(sums, from + i * kStripe);
  Stripe::save(sums, state);
}

template <class Stripe, bool kDigest>
KVXFER_STRIPE_INLINE void add_stripe(typename Stripe::Sums& sums, const std::byte* from) {
  if constexpr (kDigest) Stripe::add(sums, from);
}

// One prefetch a stripe, into a segment further on (`later`). The hardware's prefetcher stops where
// a run ends; many prefetches at once would hold up the loads that are needed now. Prefetching past
// the end of a short segment does no harm.
template <class Stripe, bool kDigest>
KVXFER_STRIPE_INLINE void copy_segment(typename Stripe::Sums& sums, const Segment& segment,
                                       const Segment& later) {
  for (size_t i = 0; i < segment.stripes * kStripe; i += kStripe) {
    __builtin_prefetch(later.from + i);
    add_stripe<Stripe, kDigest>(sums, segment.from + i);
    Stripe::move(segment.to + i, segment.from + i);
  }
}

// Streaming stores need whole aligned lines: where `to` is not aligned, the bytes before its first
// line and behind its last are stored the ordinary way, and the lines lie across the stripes.
template <class Stripe, bool kDigest>
KVXFER_STRIPE_INLINE void stream_segment(typename Stripe::Sums& sums, const Segment& segment,
                                         const Segment& later) {
  const size_t head = -reinterpret_cast<uintptr_t>(segment.to) % kStripe;
  if (head == 0) {
    for (size_t i = 0; i < segment.stripes * kStripe; i += kStripe) {
      __builtin_prefetch(later.from + i);
      add_stripe<Stripe, kDigest>(sums, segment.from + i);
      Stripe::stream(segment.to + i, segment.from + i);
    }
    return;
  }
  const size_t last = (segment.stripes - 1) * kStripe;
  std::memcpy(segment.to, segment.from, head);
  for (size_t i = 0; i < last; i += kStripe) {
    add_stripe<Stripe, kDigest>(sums, segment.from + i);
    Stripe::stream(segment.to + head + i, segment.from + head + i);
  }
  add_stripe<Stripe, kDigest>(sums, segment.from + last);
  std::memcpy(segment.to + head + last, segment.from + head + last, kStripe - head);
}

template <class Stripe, bool kDigest, bool kStream>
KVXFER_TARGET void move_segments(const Segment* segments, size_t count, size_t ahead,
                                 DigestState& state) {
  auto sums = Stripe::load(state);
  for (size_t s = 0; s < count; ++s) {
    if constexpr (kStream) {
      stream_segment<Stripe, kDigest>(sums, segments[s], segments[s + ahead]);
    } else {
      copy_segment<Stripe, kDigest>(sums, segments[s], segments[s + ahead]);
    }
  }
  if constexpr (kStream) Stripe::fence();
  Stripe::save(sums, state);
}

template <class Stripe>
constexpr StripeKernels make_kernels(const char* name, bool (*supported)()) {
  return {name,
          supported,
          &digest_stripes<Stripe>,
          &move_segments<Stripe, false, false>,
          &move_segments<Stripe, true, false>,
          &move_segments<Stripe, false, true>,
          &move_segments<Stripe, true, true>};
}

}  // namespace
}  // namespace kvxfer

#endif  // KVXFER_BASE_DIGEST_STRIPES_H_
