#if defined(__x86_64__)

// g++ 12 takes the intrinsics' "undefined" operands for variables that we forgot to set.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif

#include <immintrin.h>

#include "base/cpu_features.h"

#define KVXFER_TARGET __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl")))
#include "base/digest_stripes.h"

namespace kvxfer {
namespace {

struct Stripe {
  struct Sums {
    __m512i sum, p, q, key, step;
  };

  KVXFER_STRIPE_INLINE Sums load(const DigestState& state) {
    return {_mm512_loadu_si512(state.sum.data()), _mm512_loadu_si512(state.p.data()),
            _mm512_loadu_si512(state.q.data()), _mm512_loadu_si512(state.key.data()),
            _mm512_loadu_si512(kKeyStep.data())};
  }

  KVXFER_STRIPE_INLINE void save(const Sums& sums, DigestState& state) {
    _mm512_storeu_si512(state.sum.data(), sums.sum);
    _mm512_storeu_si512(state.p.data(), sums.p);
    _mm512_storeu_si512(state.q.data(), sums.q);
    _mm512_storeu_si512(state.key.data(), sums.key);
  }

  KVXFER_STRIPE_INLINE void add_words(Sums& sums, __m512i w) {
    const __m512i x = _mm512_xor_si512(w, sums.key);
    const __m512i y = _mm512_add_epi32(w, _mm512_shuffle_epi32(sums.key, _MM_PERM_CDAB));
    sums.sum = _mm512_add_epi64(sums.sum, w);
    sums.p = _mm512_add_epi64(sums.p, _mm512_mul_epu32(x, _mm512_srli_epi64(x, 32)));
    sums.q = _mm512_add_epi64(sums.q, _mm512_mul_epu32(y, _mm512_srli_epi64(y, 32)));
    sums.key = _mm512_add_epi32(sums.key, sums.step);
  }

  KVXFER_STRIPE_INLINE void add(Sums& sums, const std::byte* from) {
    add_words(sums, _mm512_loadu_si512(from));
  }

  KVXFER_STRIPE_INLINE void move(std::byte* to, const std::byte* from) {
    _mm512_storeu_si512(to, _mm512_loadu_si512(from));
  }

  KVXFER_STRIPE_INLINE void stream(std::byte* to, const std::byte* from) {
    _mm512_stream_si512(reinterpret_cast<__m512i*>(to), _mm512_loadu_si512(from));
  }

  KVXFER_STRIPE_INLINE void fence() { _mm_sfence(); }
};

}  // namespace

constinit const StripeKernels kAvx512Kernels =
    make_kernels<Stripe>("avx512", [] { return cpu_features().avx512; });

}  // namespace kvxfer

#endif
