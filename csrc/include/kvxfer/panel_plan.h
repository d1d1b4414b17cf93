#ifndef KVXFER_PANEL_PLAN_H_
#define KVXFER_PANEL_PLAN_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "kvxfer/codec.h"
#include "kvxfer/copy_plan.h"
#include "kvxfer/digest.h"

namespace kvxfer {

// What the two sides agree on, besides their layouts and the slice: docs/coded_chunks.md.
struct PanelFormat {
  uint8_t codec = 0;                 // what the caller asked for, by its number on the wire
  uint32_t panel_tokens = 64;        // 1 to kMaxPanelRows
  std::vector<Encoding> encodings;   // [wire planes], of tokens in [raw_until, raw_from)
  uint32_t raw_until = 0;            // tokens before this one travel raw
  uint32_t raw_from = UINT32_MAX;    // and from this one on
  ElementType producer_element = ElementType::kBFloat16;
  std::vector<float> producer_scales;  // [wire layers][wire planes], or empty for 1
  friend bool operator==(const PanelFormat&, const PanelFormat&) = default;
};

// Maps panels of the wire to one side's memory. Immutable, safe to use from several threads; refers
// to nothing that it does not own.
class PanelPlan {
 public:
  // Arguments as CopyPlan's. Throws Error(kInvalid) for what does not fit, Error(kMismatch) where the
  // producer's elements can't become the layout's.
  PanelPlan(const CacheLayout& layout, const BlockTable& table, const Slice& slice,
            std::vector<uint32_t> plane_of, PanelFormat format);

  uint32_t num_panels() const;
  // Panels of one wire layer; all layers have as many.
  uint32_t panels_per_layer() const;
  // Bytes of the elements of panels [begin, end), as this side's cache holds them.
  uint64_t memory_bytes(uint32_t begin, uint32_t end) const;
  // Most bytes that a chunk of panels [begin, end) has: with every row of it raw.
  uint64_t most_bytes(uint32_t begin, uint32_t end) const;

 private:
  friend class PanelCoder;
};

struct CodedChunk {
  uint32_t bytes = 0;
  uint32_t exceptions = 0;  // rows that went raw
  Digest digest;
};

// Gathers and encodes panels [begin, end) into `wire`, which has most_bytes() bytes, and digests
// what it wrote, all in one pass. Thread-safe; allocates little.
CodedChunk pack_panels(const PanelPlan& plan, uint32_t begin, uint32_t end, std::byte* wire,
                       uint64_t seed, bool with_digest = true);

struct DecodedChunk {
  Digest digest;
  Loss loss;
  uint32_t exceptions = 0;
};

// Decodes and scatters a chunk of panels [begin, end), `bytes` long, and digests it in the same
// pass. Throws Error(kProtocol), naming the field and both values, for a header that is not the
// expected one and for a chunk of another length than its header says; nothing outside the
// plan's rows is ever written. The caller compares the digest before it publishes the blocks.
DecodedChunk unpack_panels(const PanelPlan& plan, uint32_t begin, uint32_t end,
                           const std::byte* wire, uint64_t bytes, uint64_t seed,
                           bool with_digest = true);

// Zeroes the slots behind the last token in its block, as zero_tail(const CopyPlan&).
void zero_tail(const PanelPlan& plan);

}  // namespace kvxfer

#endif  // KVXFER_PANEL_PLAN_H_
