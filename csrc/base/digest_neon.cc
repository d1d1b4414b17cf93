#if defined(__aarch64__)

#include <arm_neon.h>

#include "base/cpu_features.h"

#define KVXFER_TARGET
#include "base/digest_stripes.h"

namespace kvxfer {
namespace {

struct Stripe {
  struct Pair {
    uint64x2_t sum, p, q;
    uint32x4_t key, step;
  };
  struct Sums {
    Pair pair[4];
  };

  KVXFER_STRIPE_INLINE Sums load(const DigestState& state) {
    Sums sums;
    for (size_t i = 0; i < 4; ++i) {
      sums.pair[i] = {vld1q_u64(&state.sum[2 * i]), vld1q_u64(&state.p[2 * i]),
                      vld1q_u64(&state.q[2 * i]),
                      vreinterpretq_u32_u64(vld1q_u64(&state.key[2 * i])),
                      vreinterpretq_u32_u64(vld1q_u64(&kKeyStep[2 * i]))};
    }
    return sums;
  }

  KVXFER_STRIPE_INLINE void save(const Sums& sums, DigestState& state) {
    for (size_t i = 0; i < 4; ++i) {
      vst1q_u64(&state.sum[2 * i], sums.pair[i].sum);
      vst1q_u64(&state.p[2 * i], sums.pair[i].p);
      vst1q_u64(&state.q[2 * i], sums.pair[i].q);
      vst1q_u64(&state.key[2 * i], vreinterpretq_u64_u32(sums.pair[i].key));
    }
  }

  KVXFER_STRIPE_INLINE uint64x2_t add_product(uint64x2_t sum, uint32x4_t value) {
    const uint64x2_t words = vreinterpretq_u64_u32(value);
    return vmlal_u32(sum, vmovn_u64(words), vshrn_n_u64(words, 32));
  }

  KVXFER_STRIPE_INLINE void add_words(Pair& pair, uint8x16_t bytes) {
    const uint32x4_t w = vreinterpretq_u32_u8(bytes);
    pair.sum = vaddq_u64(pair.sum, vreinterpretq_u64_u8(bytes));
    pair.p = add_product(pair.p, veorq_u32(w, pair.key));
    pair.q = add_product(pair.q, vaddq_u32(w, vrev64q_u32(pair.key)));
    pair.key = vaddq_u32(pair.key, pair.step);
  }

  KVXFER_STRIPE_INLINE uint8x16_t get(const std::byte* from) {
    return vld1q_u8(reinterpret_cast<const uint8_t*>(from));
  }

  KVXFER_STRIPE_INLINE void put(std::byte* to, uint8x16_t value) {
    vst1q_u8(reinterpret_cast<uint8_t*>(to), value);
  }

  KVXFER_STRIPE_INLINE void add(Sums& sums, const std::byte* from) {
    for (size_t i = 0; i < 4; ++i) add_words(sums.pair[i], get(from + 16 * i));
  }

  KVXFER_STRIPE_INLINE void move(std::byte* to, const std::byte* from) {
    const uint8x16_t bytes[4] = {get(from), get(from + 16), get(from + 32), get(from + 48)};
    for (size_t i = 0; i < 4; ++i) put(to + 16 * i, bytes[i]);
  }

  // Arm cores detect a run of full-line stores and stop reading the lines by themselves.
  KVXFER_STRIPE_INLINE void stream(std::byte* to, const std::byte* from) { move(to, from); }
  KVXFER_STRIPE_INLINE void fence() {}
};

}  // namespace

constinit const StripeKernels kNeonKernels =
    make_kernels<Stripe>("neon", [] { return cpu_features().neon; });

}  // namespace kvxfer

#endif
