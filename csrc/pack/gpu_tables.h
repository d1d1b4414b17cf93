#ifndef KVXFER_PACK_GPU_TABLES_H_
#define KVXFER_PACK_GPU_TABLES_H_

// What the host writes for kernels, in device memory. The layout is the same for both, so addresses
// are 64-bit numbers.

#include <cstdint>

namespace kvxfer::gpu {

#ifndef KVXFER_GPU_THREADS
#define KVXFER_GPU_THREADS 256
#endif
constexpr uint32_t kThreads = KVXFER_GPU_THREADS;  // of a workgroup, in all kernels
static_assert(kThreads % 64 == 0 && kThreads >= 64 && kThreads <= 1024);

// Words that a chunk's digest is added up in: sum, p and q of each lane, from zero.
constexpr uint32_t kDigestWords = 24;

// n / divisor for n < 2^31, as (n * magic) >> shift.
struct Divider {
  uint32_t magic = 0;
  uint32_t shift = 0;
};

// A chunk of raw wire bytes. Memory is described in pieces: byte i of the chunk is byte (phase + i)
// % piece_bytes of the piece at pieces[(phase + i) / piece_bytes].
struct RawChunk {
  uint64_t wire = 0;    // address, a multiple of 16
  uint64_t pieces = 0;  // address of a table of addresses
  uint32_t bytes = 0;
  uint32_t phase = 0;  // bytes of the first piece that are before the chunk
  uint32_t piece_bytes = 0;
  Divider divider;  // by piece_bytes
  uint32_t reserved = 0;
};
static_assert(sizeof(RawChunk) == 40);

}  // namespace kvxfer::gpu

#endif  // KVXFER_PACK_GPU_TABLES_H_
