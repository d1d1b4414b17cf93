#ifndef KVXFER_DIGEST_H_
#define KVXFER_DIGEST_H_

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace kvxfer {

// 128 bits over the wire bytes of a chunk; docs/digest.md specifies it for other implementations.
//
// The bytes are cut into stripes of 64, each eight little-endian 64-bit words w[s][0..7]; the last
// stripe is filled up with zeros. With lo() and hi() the 32-bit halves of a word, ^ and + on them
// half by half (mod 2^32), swap() the exchange of the halves, and key(s, j) = base[j] + s *
// step[j]:
//
//   sum    = sum over s, j of w[s][j]                                        (mod 2^64)
//   p[j]   = sum over s of lo(x) * hi(x), x = w[s][j] ^ key(s, j)            (mod 2^64)
//   q[j]   = sum over s of lo(y) * hi(y), y = w[s][j] + swap(key(s, j))      (mod 2^64)
//   mix    = a chain of bijections over seed, length, p[0], q[0], ... p[7], q[7]
//
// Stripes add up independently, so they may be visited in any order and by any number of threads.
//
// `sum` alone proves that no single aligned 8-byte word changed. `mix` catches what leaves the sum
// alone (words, rows or chunks that changed places, changes that cancel out) but for a chance of
// about 2^-60. It is no defence against somebody who forges data on purpose.
struct Digest {
  uint64_t sum = 0;
  uint64_t mix = 0;
  friend bool operator==(const Digest&, const Digest&) = default;
};

// Digest of one contiguous buffer. `seed` binds it to its place (see chunk_seed in the engine): the
// same bytes under two seeds never have the same `mix`.
Digest digest(std::span<const std::byte> bytes, uint64_t seed);

// The SIMD variants of digest, pack and unpack that this machine can run, best first ("avx512",
// "avx2", "neon", "scalar"), and the one in use. All give identical results. The environment
// variable KVXFER_SIMD forces one; when it names one that cannot run, the first use throws
// Error(kInvalid).
std::vector<std::string> simd_variants();
std::string simd_variant();

// Changes the one in use, for the whole process. For tests and benchmarks. Throws Error(kInvalid).
void set_simd_variant(const std::string& name);

}  // namespace kvxfer

#endif  // KVXFER_DIGEST_H_
