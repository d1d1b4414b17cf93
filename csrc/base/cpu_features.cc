#include "base/cpu_features.h"

#include <cstdint>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace kvxfer {
namespace {

#if defined(__x86_64__)

// XCR0 bits: SSE and AVX state; opmask, upper halves of ZMM0-15 and ZMM16-31.
constexpr uint64_t kAvxState = 0x06;
constexpr uint64_t kAvx512State = 0xe6;

uint64_t enabled_state() {
  uint32_t low = 0;
  uint32_t high = 0;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return (uint64_t{high} << 32) | low;
}

bool bit(uint32_t word, int index) { return (word >> index) & 1; }

CpuFeatures detect() {
  CpuFeatures found;
  uint32_t a = 0, b = 0, c = 0, d = 0;
  if (__get_cpuid(1, &a, &b, &c, &d) == 0) return found;
  const bool fma = bit(c, 12), osxsave = bit(c, 27), avx = bit(c, 28), f16c = bit(c, 29);
  if (!osxsave || !avx) return found;
  const uint64_t state = enabled_state();
  if ((state & kAvxState) != kAvxState) return found;
  if (__get_cpuid_count(7, 0, &a, &b, &c, &d) == 0) return found;
  found.avx2 = bit(b, 5) && fma && f16c;
  const bool wide = bit(b, 16) && bit(b, 17) && bit(b, 30) && bit(b, 31);
  found.avx512 = found.avx2 && wide && (state & kAvx512State) == kAvx512State;
  if (found.avx512 && __get_cpuid_count(7, 1, &a, &b, &c, &d) != 0) found.avx512_bf16 = bit(a, 5);
  return found;
}

#else

CpuFeatures detect() {
  CpuFeatures found;
#if defined(__aarch64__)
  found.neon = true;
#endif
  return found;
}

#endif

}  // namespace

const CpuFeatures& cpu_features() {
  static const CpuFeatures features = detect();
  return features;
}

}  // namespace kvxfer
