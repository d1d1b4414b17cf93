#ifndef KVXFER_DIGEST_H_
#define KVXFER_DIGEST_H_

#include <cstddef>
#include <cstdint>
#include <span>

namespace kvxfer {

// 128 bits over the wire bytes of a chunk; docs/wire_protocol.md specifies it. `sum` alone proves
// that no single aligned 8-byte word changed; `mix` catches everything else with probability
// 1 - 2^-60 or better, including bytes that changed places and chunks that were exchanged.
struct Digest {
  uint64_t sum = 0;
  uint64_t mix = 0;
  friend bool operator==(const Digest&, const Digest&) = default;
};

// Digest of one contiguous buffer. `seed` binds it to its place (see chunk_seed in the engine).
Digest digest(std::span<const std::byte> bytes, uint64_t seed);

}  // namespace kvxfer

#endif  // KVXFER_DIGEST_H_
