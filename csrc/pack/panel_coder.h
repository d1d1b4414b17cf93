#ifndef KVXFER_PACK_PANEL_CODER_H_
#define KVXFER_PACK_PANEL_CODER_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "kvxfer/panel_plan.h"
#include "pack/chunk_writer.h"
#include "pack/panel_cursor.h"

namespace kvxfer {

// Packs or unpacks one chunk. Used once, by one thread.
class PanelCoder {
 public:
  // Throws Error(kInvalid) for a range that is empty or not the plan's.
  PanelCoder(const PanelPlan& plan, uint32_t begin, uint32_t end);

  CodedChunk pack(std::byte* wire, uint64_t seed, bool with_digest, bool stream);
  DecodedChunk unpack(const std::byte* wire, uint64_t bytes, uint64_t seed, bool with_digest);

 private:
  static PanelPlan::Extent checked_extent(const PanelPlan& plan, uint32_t begin, uint32_t end);

  // Where rows lie apart, the hardware's prefetcher does not see the next one coming; where they
  // lie behind each other it does better alone.
  void prefetch_next();

  // The rows of the cursor's panel to be encoded or decoded: in place, or in scratch_ where their
  // elements lie apart in memory.
  void find_rows();
  void gather_scattered();
  void scatter_gathered();
  bool scattered() const;

  void add_exceptions(const RowMask& marked, uint32_t first_row);
  void put_exceptions(ChunkWriter& out) const;
  // Reads and checks the indices of raw rows into indices_; returns the bytes of those rows.
  uint64_t read_indices(const std::byte* wire, uint32_t exceptions);
  // Of the cursor's panel: those from indices_[taken] on.
  RowMask raw_rows(size_t taken, uint32_t first_row) const;
  Loss put_raw_rows(const std::byte*& source, size_t& taken, uint32_t first_row);

  const PanelPlan& plan_;
  const uint32_t begin_;
  const uint32_t end_;
  const PanelPlan::Extent extent_;
  const size_t producer_bytes_;
  const size_t own_bytes_;
  PanelCursor cursor_;
  PanelCursor ahead_;   // a panel further
  RowPointers memory_;  // rows in the cache
  RowPointers row_;     // rows to work on
  std::vector<std::byte> scratch_;
  std::vector<uint32_t> indices_;    // of exceptions
  std::vector<std::byte> raw_rows_;  // their elements, when packing
};

}  // namespace kvxfer

#endif  // KVXFER_PACK_PANEL_CODER_H_
