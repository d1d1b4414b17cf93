#if defined(__x86_64__)

#include <immintrin.h>

#include "base/cpu_features.h"

#define KVXFER_TARGET __attribute__((target("avx2")))
#include "base/digest_stripes.h"

namespace kvxfer {
namespace {

struct Stripe {
  struct Half {
    __m256i sum, p, q, key, step;
  };
  struct Sums {
    Half low, high;
  };

  KVXFER_STRIPE_INLINE __m256i get(const void* from) {
    return _mm256_loadu_si256(static_cast<const __m256i*>(from));
  }

  KVXFER_STRIPE_INLINE void put(void* to, __m256i value) {
    _mm256_storeu_si256(static_cast<__m256i*>(to), value);
  }

  KVXFER_STRIPE_INLINE Half load_half(const DigestState& state, size_t lane) {
    return {get(&state.sum[lane]), get(&state.p[lane]), get(&state.q[lane]), get(&state.key[lane]),
            get(&kKeyStep[lane])};
  }

  KVXFER_STRIPE_INLINE void save_half(const Half& half, DigestState& state, size_t lane) {
    put(&state.sum[lane], half.sum);
    put(&state.p[lane], half.p);
    put(&state.q[lane], half.q);
    put(&state.key[lane], half.key);
  }

  KVXFER_STRIPE_INLINE Sums load(const DigestState& state) {
    return {load_half(state, 0), load_half(state, 4)};
  }

  KVXFER_STRIPE_INLINE void save(const Sums& sums, DigestState& state) {
    save_half(sums.low, state, 0);
    save_half(sums.high, state, 4);
  }

  KVXFER_STRIPE_INLINE void add_words(Half& half, __m256i w) {
    const __m256i x = _mm256_xor_si256(w, half.key);
    const __m256i y = _mm256_add_epi32(w, _mm256_shuffle_epi32(half.key, 0xb1));
    half.sum = _mm256_add_epi64(half.sum, w);
    half.p = _mm256_add_epi64(half.p, _mm256_mul_epu32(x, _mm256_srli_epi64(x, 32)));
    half.q = _mm256_add_epi64(half.q, _mm256_mul_epu32(y, _mm256_srli_epi64(y, 32)));
    half.key = _mm256_add_epi32(half.key, half.step);
  }

  KVXFER_STRIPE_INLINE void add(Sums& sums, const std::byte* from) {
    add_words(sums.low, get(from));
    add_words(sums.high, get(from + 32));
  }

  KVXFER_STRIPE_INLINE void move(std::byte* to, const std::byte* from) {
    const __m256i low = get(from);
    const __m256i high = get(from + 32);
    put(to, low);
    put(to + 32, high);
  }

  KVXFER_STRIPE_INLINE void stream(std::byte* to, const std::byte* from) {
    const __m256i low = get(from);
    const __m256i high = get(from + 32);
    _mm256_stream_si256(reinterpret_cast<__m256i*>(to), low);
    _mm256_stream_si256(reinterpret_cast<__m256i*>(to + 32), high);
  }

  KVXFER_STRIPE_INLINE void fence() { _mm_sfence(); }
};

}  // namespace

constinit const StripeKernels kAvx2Kernels =
    make_kernels<Stripe>("avx2", [] { return cpu_features().avx2; });

}  // namespace kvxfer

#endif
