#ifndef KVXFER_BASE_DIGEST_KERNELS_H_
#define KVXFER_BASE_DIGEST_KERNELS_H_

#include <array>
#include <cstddef>
#include <cstdint>

#include "kvxfer/digest.h"

namespace kvxfer {

constexpr size_t kStripe = 64;
constexpr size_t kLanes = 8;

// The first outputs of splitmix64 from state 0; the steps with both halves made odd, so that
// neither half of a key comes back within 2^32 stripes.
inline constexpr std::array<uint64_t, kLanes> kKeyBase = {
    0xe220a8397b1dcdaf, 0x6e789e6aa1b965f4, 0x06c45d188009454f, 0xf88bb8a8724c81ec,
    0x1b39896a51a8749b, 0x53cb9f0c747ea2ea, 0x2c829abe1f4532e1, 0xc584133ac916ab3c};
inline constexpr std::array<uint64_t, kLanes> kKeyStep = {
    0x3ee5789141c98ac3, 0xf3b8488d368cb0a7, 0x657eecdd3cb13d09, 0xc2d326e1055bdef7,
    0x8621a03fe0bbdb7b, 0x8e1f7555983aa92f, 0xb54e0f1700cc4d19, 0x84bb3f97971d80ab};

// The sums of digest.h over the stripes seen so far, and the keys of the next stripe.
struct DigestState {
  alignas(64) std::array<uint64_t, kLanes> sum{};
  std::array<uint64_t, kLanes> p{};
  std::array<uint64_t, kLanes> q{};
  std::array<uint64_t, kLanes> key = kKeyBase;
};

// `stripes` >= 1 whole stripes to copy. `to` and `from` do not overlap; neither needs to be
// aligned.
struct Segment {
  std::byte* to = nullptr;
  const std::byte* from = nullptr;
  size_t stripes = 0;
};

// Works through segments[0, count) in order, and prefetches the sources of the `ahead` segments
// behind, which must be readable as array elements. 0 leaves prefetching to the hardware, which is
// best where the source is one piece.
using MoveSegments = void (*)(const Segment* segments, size_t count, size_t ahead,
                              DigestState& state);

// One SIMD variant. The streaming moves write past the caches and end with a store fence.
struct StripeKernels {
  const char* name;
  bool (*supported)();
  void (*digest)(const std::byte* from, size_t stripes, DigestState& state);
  MoveSegments copy;
  MoveSegments copy_digest;
  MoveSegments stream;
  MoveSegments stream_digest;
};

extern const StripeKernels kScalarKernels;
#if defined(__x86_64__)
extern const StripeKernels kAvx2Kernels;
extern const StripeKernels kAvx512Kernels;
#elif defined(__aarch64__)
extern const StripeKernels kNeonKernels;
#endif

// The variant in use. See simd_variant() in digest.h.
const StripeKernels& stripe_kernels();

// Leaves out the next `stripes`: another state digests them, and their sums are added with
// add_sums().
void skip_stripes(DigestState& state, uint32_t stripes);
void add_sums(DigestState& state, const DigestState& other);

// Adds the last, partial stripe (`rest` < kStripe bytes) and folds the state to the result.
Digest finish_digest(DigestState& state, const std::byte* tail, size_t rest, uint64_t length,
                     uint64_t seed);

}  // namespace kvxfer

#endif  // KVXFER_BASE_DIGEST_KERNELS_H_
