#ifndef KVXFER_PACK_GPU_PANEL_ROWS_H_
#define KVXFER_PACK_GPU_PANEL_ROWS_H_

// What all panel kernels share: where rows lie, and the digest of a panel's words.

#include "device/kernel/device.h"
#include "pack/gpu_digest.h"
#include "pack/gpu_numbers.h"
#include "pack/gpu_tables.h"

namespace kvxfer::gpu {

KVXFER_DEVICE uint32_t up16(uint32_t bytes) { return (bytes + 15) & ~15u; }

KVXFER_DEVICE char* row_at(const PanelLaunch& launch, const PanelEntry& entry,
                           const PanelView& view, uint32_t row) {
  const uint32_t at = entry.first + row;
  const uint32_t block = divide(at, launch.blocks_of);
  const uint32_t slot = at - block * launch.block_size;
  const uint64_t offset =
      load<uint32_t>(launch.blocks + block) * view.block_stride + slot * view.token_stride;
  return address_of(entry.base + offset);
}

// The rows of a panel that the chunk to be unpacked brings as they are.
struct RawRows {
  uint64_t marks = 0;  // 0: none in all of the chunk

  KVXFER_DEVICE RawRows(const PanelLaunch& launch, const PanelEntry& entry) {
    if (launch.states[entry.chunk].exceptions == 0) return;
    marks = launch.chunks[entry.chunk].marks + entry.first_row;
  }
  KVXFER_DEVICE bool has(uint32_t row) const {
    return marks != 0 && load<uint8_t>(address_of(marks + row)) != 0;
  }
};

struct PanelSize {
  uint32_t groups, codes, scales;  // groups of a row that share a scale; bytes, not filled up
};

KVXFER_DEVICE PanelSize panel_size(const PanelKind& kind, uint32_t rows) {
  if (kind.scheme == kRaw) return {1, rows * kind.content * element_size(kind.producer), 0};
  const uint32_t size = scale_size(kind.scale_format);
  if (kind.scheme == kInt8Channel) return {1, rows * kind.content, 2 * kind.content * size};
  const uint32_t groups = (kind.content + kind.group - 1) / kind.group;
  return {groups, rows * kind.content, rows * groups * size};
}

// The digest of words of 8 bytes that a workgroup visits chunk by chunk. Thread i sees words whose
// number, less `phase`, is i modulo 8.
struct WordDigest {
  Lane lane[1];
  uint32_t phase = 0;
  uint32_t chunk = ~0u;

  // All threads take part, and give the same arguments.
  KVXFER_DEVICE void enter(PanelState* states, uint32_t to_chunk, uint32_t to_phase) {
    if (chunk == to_chunk && phase == to_phase) return;
    leave(states);
    chunk = to_chunk;
    phase = to_phase;
    lane[0].start((thread_id() + phase) % 8);
  }
  KVXFER_DEVICE void leave(PanelState* states) {
    if (chunk != ~0u) add_lanes(lane, states[chunk].digest, phase);
  }
  KVXFER_DEVICE void add(uint32_t wire, const Vec8& word) {
    lane[0].add(word.word[0], word.word[1], wire / 64);
  }
};

// Digests wire bytes [begin, end) of a chunk, multiples of 8, by reading them.
KVXFER_DEVICE void digest_words(WordDigest& digest, const char* wire, uint32_t begin,
                                uint32_t end) {
  const uint32_t first = begin / 8;
  const uint32_t skip = (first - digest.phase) % 8;
  for (uint32_t word = first - skip + thread_id(); word < end / 8; word += kThreads) {
    if (word >= first) digest.add(word * 8, load<Vec8>(wire + word * 8));
  }
}

}  // namespace kvxfer::gpu

#endif  // KVXFER_PACK_GPU_PANEL_ROWS_H_
