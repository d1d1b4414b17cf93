#include "kvxfer/digest.h"

#include <atomic>
#include <cstdlib>
#include <cstring>

#include "base/digest_kernels.h"
#include "kvxfer/status.h"

namespace kvxfer {
namespace {

constexpr const StripeKernels* kVariants[] = {
#if defined(__x86_64__)
    &kAvx512Kernels,
    &kAvx2Kernels,
#elif defined(__aarch64__)
    &kNeonKernels,
#endif
    &kScalarKernels,
};

std::atomic<const StripeKernels*> g_in_use{nullptr};

const StripeKernels& find_variant(const std::string& name, const std::string& asked_by) {
  std::string known;
  for (const StripeKernels* variant : kVariants) {
    if (!variant->supported()) continue;
    if (name == variant->name) return *variant;
    known += known.empty() ? "" : ", ";
    known += variant->name;
  }
  throw Error(StatusCode::kInvalid, asked_by + " asks for the SIMD variant \"" + name +
                                        "\", which cannot run here; choose one of: " + known);
}

const StripeKernels& first_choice() {
  if (const char* forced = std::getenv("KVXFER_SIMD"); forced != nullptr && *forced != '\0') {
    return find_variant(forced, "KVXFER_SIMD");
  }
  for (const StripeKernels* variant : kVariants) {
    if (variant->supported()) return *variant;
  }
  return kScalarKernels;
}

uint64_t avalanche(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
  x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
  return x ^ (x >> 31);
}

// A bijection of `h` for each `value` and of `value` for each `h`: one changed input always shows.
uint64_t fold(uint64_t h, uint64_t value) { return avalanche(h ^ value) + 0x9e3779b97f4a7c15; }

}  // namespace

const StripeKernels& stripe_kernels() {
  const StripeKernels* kernels = g_in_use.load(std::memory_order_relaxed);
  if (kernels == nullptr) {
    const StripeKernels* chosen = &first_choice();
    if (g_in_use.compare_exchange_strong(kernels, chosen)) kernels = chosen;
  }
  return *kernels;
}

std::vector<std::string> simd_variants() {
  std::vector<std::string> names;
  for (const StripeKernels* variant : kVariants) {
    if (variant->supported()) names.emplace_back(variant->name);
  }
  return names;
}

std::string simd_variant() { return stripe_kernels().name; }

void set_simd_variant(const std::string& name) {
  g_in_use.store(&find_variant(name, "set_simd_variant()"));
}

void skip_stripes(DigestState& state, uint32_t stripes) {
  for (size_t lane = 0; lane < kLanes; ++lane) {
    const uint64_t low = (state.key[lane] + kKeyStep[lane] * stripes) & 0xffffffff;
    const uint64_t high = (state.key[lane] >> 32) + (kKeyStep[lane] >> 32) * stripes;
    state.key[lane] = high << 32 | low;
  }
}

void add_sums(DigestState& state, const DigestState& other) {
  for (size_t lane = 0; lane < kLanes; ++lane) {
    state.sum[lane] += other.sum[lane];
    state.p[lane] += other.p[lane];
    state.q[lane] += other.q[lane];
  }
}

Digest finish_digest(DigestState& state, const std::byte* tail, size_t rest, uint64_t length,
                     uint64_t seed) {
  if (rest > 0) {
    alignas(kStripe) std::byte padded[kStripe] = {};
    std::memcpy(padded, tail, rest);
    kScalarKernels.digest(padded, 1, state);
  }
  Digest result;
  uint64_t h = fold(fold(0, seed), length);
  for (size_t lane = 0; lane < kLanes; ++lane) {
    result.sum += state.sum[lane];
    h = fold(fold(h, state.p[lane]), state.q[lane]);
  }
  result.mix = h;
  return result;
}

Digest digest(std::span<const std::byte> bytes, uint64_t seed) {
  DigestState state;
  const size_t stripes = bytes.size() / kStripe;
  stripe_kernels().digest(bytes.data(), stripes, state);
  const size_t done = stripes * kStripe;
  return finish_digest(state, bytes.data() + done, bytes.size() - done, bytes.size(), seed);
}

}  // namespace kvxfer
