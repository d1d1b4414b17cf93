#include <bit>

#define KVXFER_TARGET
#include "base/digest_stripes.h"

namespace kvxfer {
namespace {

static_assert(std::endian::native == std::endian::little, "the digest reads little-endian words");

uint64_t add_halves(uint64_t a, uint64_t b) {
  return ((a + (b & 0xffffffff00000000)) & 0xffffffff00000000) | ((a + b) & 0xffffffff);
}

// The reference that the other variants are tested against.
struct Stripe {
  using Sums = DigestState;

  static Sums load(const DigestState& state) { return state; }
  static void save(const Sums& sums, DigestState& state) { state = sums; }

  static void add(Sums& sums, const std::byte* from) {
    for (size_t j = 0; j < kLanes; ++j) {
      uint64_t w = 0;
      std::memcpy(&w, from + 8 * j, 8);
      const uint64_t x = w ^ sums.key[j];
      const uint64_t y = add_halves(w, std::rotl(sums.key[j], 32));
      sums.sum[j] += w;
      sums.p[j] += (x & 0xffffffff) * (x >> 32);
      sums.q[j] += (y & 0xffffffff) * (y >> 32);
      sums.key[j] = add_halves(sums.key[j], kKeyStep[j]);
    }
  }

  static void move(std::byte* to, const std::byte* from) { std::memcpy(to, from, kStripe); }

  static void stream(std::byte* to, const std::byte* from) { move(to, from); }
  static void fence() {}
};

}  // namespace

constinit const StripeKernels kScalarKernels = make_kernels<Stripe>("scalar", [] { return true; });

}  // namespace kvxfer
