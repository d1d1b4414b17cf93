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

constexpr uint32_t kMostPanelRows = 256;

// Where the rows of one layer and plane lie, and what they hold.
struct PanelView {
  int64_t block_stride = 0;
  int64_t token_stride = 0;
  float inverse = 1.0f;  // 1 / the cache's own scale
  uint32_t codes = 0;    // of PanelLaunch::codes + 256 * (codes - 1); 0: none
};

// What a code of an 8-bit float becomes: the bits of an element, and whether that costs something.
constexpr uint64_t kCodeLoses = 1ull << 32;

// How the panels of a plane are encoded, in its middle stretch or, as scheme 0, in the others.
struct PanelKind {
  uint8_t scheme = 0;
  uint8_t scale_format = 0;
  uint8_t producer = 0;  // ElementType
  uint8_t own = 0;       // of the cache here
  uint32_t group = 0;    // 1 to content
  uint32_t content = 0;
  uint32_t reserved = 0;
};

struct PanelEntry {
  uint64_t base = 0;       // address of the head's first row in block 0
  uint32_t first = 0;      // slot of the first token, counted from the start of the block table
  uint32_t wire = 0;       // offset in the chunk, a multiple of 16
  uint32_t first_row = 0;  // rows of the chunk before it
  uint32_t chunk = 0;
  uint32_t view = 0;
  uint16_t rows = 0;
  uint16_t kind = 0;
};
static_assert(sizeof(PanelEntry) == 32);

struct PanelChunk {
  uint64_t wire = 0;  // address, a multiple of 16
  // Address of a byte for each row, 1 for those that go raw: written by kernels, zero at first.
  uint64_t marks = 0;
  uint32_t first_entry = 0;  // of its panels
  uint32_t panels = 0;
  uint32_t rows = 0;
  uint32_t panels_end = 0;  // bytes of header and panels
  uint32_t first_panel = 0;
  uint32_t bytes = 0;  // that came, when unpacking
};

// What kernels find out about a chunk. The host sets it to zero before.
struct PanelState {
  uint64_t digest[kDigestWords] = {};
  uint64_t clamped = 0;
  uint64_t inexact = 0;
  uint32_t exceptions = 0;
  uint32_t bytes = 0;    // of the whole chunk
  uint32_t refused = 0;  // not 0: the header or an index is wrong, nothing was written
  uint32_t reserved = 0;
};

// What all panel kernels of a launch get. Addresses are the device's.
struct PanelLaunch {
  const PanelEntry* entries;  // of all chunks, in their order
  const uint32_t* order;      // entries that this launch works on
  const PanelView* views;
  const PanelKind* kinds;
  const uint32_t* blocks;
  const PanelChunk* chunks;
  const unsigned char* header;  // of a chunk of no panels
  const uint64_t* codes;        // tables of 256
  PanelState* states;
  uint32_t count;      // of `order`
  uint32_t per_group;  // panels that a workgroup works on
  uint32_t block_size;
  Divider blocks_of;  // by block_size
  uint32_t header_bytes;
  uint32_t reserved;
};

}  // namespace kvxfer::gpu

#endif  // KVXFER_PACK_GPU_TABLES_H_
