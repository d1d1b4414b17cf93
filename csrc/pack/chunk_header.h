#ifndef KVXFER_PACK_CHUNK_HEADER_H_
#define KVXFER_PACK_CHUNK_HEADER_H_

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "kvxfer/panel_plan.h"

namespace kvxfer {

// The header of a coded chunk; docs/coded_chunks.md has its fields. What differs between the chunks
// of one plan:
struct ChunkCounts {
  uint32_t first_panel = 0;
  uint32_t panels = 0;
  uint32_t exceptions = 0;
};

constexpr size_t kMaxChunkPlanes = 255;
constexpr size_t header_bytes(size_t planes) { return (24 + 8 * planes + 63) / 64 * 64; }

// The header with all counts 0. `contents` are the elements per row of each wire plane.
std::vector<std::byte> make_header(const PanelFormat& format, std::span<const uint32_t> contents);

// Writes `header` with these counts.
void put_header(std::span<const std::byte> header, const ChunkCounts& counts, std::byte* wire);

// Compares a received header with `expected`, and its first panel and panels with `counts`; returns
// its number of exceptions, which the caller bounds. Throws Error(kProtocol) naming the first field
// that differs and both values. Reads `wire`, which has as many bytes as `expected`, once.
uint32_t check_header(std::span<const std::byte> expected, ChunkCounts counts,
                      const std::byte* wire);

}  // namespace kvxfer

#endif  // KVXFER_PACK_CHUNK_HEADER_H_
