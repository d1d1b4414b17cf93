#ifndef KVXFER_PACK_GPU_DIGEST_H_
#define KVXFER_PACK_GPU_DIGEST_H_

// The sums of docs/digest.md on a GPU. Kernels only; the host folds the 24 words to a Digest.

#include "device/kernel/device.h"
#include "pack/gpu_tables.h"

namespace kvxfer::gpu {

#ifndef KVXFER_GPU_UNROLL
#define KVXFER_GPU_UNROLL 4
#endif
constexpr uint32_t kUnroll = KVXFER_GPU_UNROLL;  // accesses of a thread that are under way at once

KVXFER_DEVICE uint32_t divide(uint32_t n, const Divider& divider) {
  return static_cast<uint32_t>(static_cast<uint64_t>(n) * divider.magic >> divider.shift);
}

KVXFER_DEVICE char* address_of(uint64_t address) {
  return reinterpret_cast<char*>(static_cast<uintptr_t>(address));
}

struct Halves {
  uint32_t low, high;
};

KVXFER_DEVICE Halves halves(uint64_t word) {
  return {static_cast<uint32_t>(word), static_cast<uint32_t>(word >> 32)};
}

// Output `index` of splitmix64 from state 0. Computed, as a table would have to be loaded.
KVXFER_DEVICE uint64_t splitmix64(uint32_t index) {
  uint64_t x = (index + 1) * 0x9e3779b97f4a7c15;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
  x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
  return x ^ (x >> 31);
}

// The keys of one lane, and what its words have added up to.
struct Lane {
  Halves base, step;
  uint64_t sum, p, q;

  KVXFER_DEVICE void start(uint32_t lane) {
    base = halves(splitmix64(lane));
    step = halves(splitmix64(8 + lane) | 0x100000001);
    sum = p = q = 0;
  }

  KVXFER_DEVICE void add(uint32_t low, uint32_t high, uint32_t stripe) {
    const uint32_t key_low = base.low + step.low * stripe;
    const uint32_t key_high = base.high + step.high * stripe;
    sum += low | static_cast<uint64_t>(high) << 32;
    p += static_cast<uint64_t>(low ^ key_low) * (high ^ key_high);
    q += static_cast<uint64_t>(low + key_high) * (high + key_low);
  }
};

KVXFER_DEVICE uint64_t add_from(uint64_t value, uint32_t mask) {
  const Halves own = halves(value);
  const uint64_t low = shuffle_xor(own.low, mask);
  const uint64_t high = shuffle_xor(own.high, mask);
  return value + (low | high << 32);
}

// Adds what the threads of the workgroup have to the digest's words. Thread i holds kPerThread
// lanes, from (i % (8 / kPerThread)) * kPerThread + shift on, modulo 8. All threads take part.
template <uint32_t kPerThread>
KVXFER_DEVICE void add_lanes(Lane (&lanes)[kPerThread], uint64_t* digest, uint32_t shift = 0) {
  constexpr uint32_t kSharing = 8 / kPerThread;
  constexpr uint32_t kWaves = kThreads / kWave;
  KVXFER_SHARED uint64_t partial[kWaves][kDigestWords];
  const uint32_t thread = thread_id();
  KVXFER_UNROLL
  for (uint32_t mask = kSharing; mask < kWave; mask *= 2) {
    KVXFER_UNROLL
    for (uint32_t i = 0; i < kPerThread; ++i) {
      lanes[i].sum = add_from(lanes[i].sum, mask);
      lanes[i].p = add_from(lanes[i].p, mask);
      lanes[i].q = add_from(lanes[i].q, mask);
    }
  }
  const uint32_t wave = thread / kWave;
  const uint32_t in_wave = thread % kWave;
  barrier();  // the last use of `partial` is over
  if (in_wave < kSharing) {
    KVXFER_UNROLL
    for (uint32_t i = 0; i < kPerThread; ++i) {
      const uint32_t lane = (in_wave * kPerThread + i + shift) % 8;
      partial[wave][lane] = lanes[i].sum;
      partial[wave][8 + lane] = lanes[i].p;
      partial[wave][16 + lane] = lanes[i].q;
    }
  }
  barrier();
  if (thread < kDigestWords) {
    uint64_t total = 0;
    for (uint32_t i = 0; i < kWaves; ++i) total += partial[i][thread];
    add_global(digest + thread, total);
  }
}

}  // namespace kvxfer::gpu

#endif  // KVXFER_PACK_GPU_DIGEST_H_
