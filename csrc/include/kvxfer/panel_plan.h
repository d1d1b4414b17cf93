#ifndef KVXFER_PANEL_PLAN_H_
#define KVXFER_PANEL_PLAN_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "kvxfer/codec.h"
#include "kvxfer/copy_plan.h"
#include "kvxfer/digest.h"

namespace kvxfer {

// What the two sides agree on, besides their layouts and the slice: docs/coded_chunks.md.
struct PanelFormat {
  uint8_t codec = 0;                // what the caller asked for, by its number on the wire
  uint32_t panel_tokens = 64;       // 1 to kMaxPanelRows
  std::vector<Encoding> encodings;  // [wire planes], of tokens in [raw_until, raw_from)
  uint32_t raw_until = 0;           // tokens before this one travel raw
  uint32_t raw_from = UINT32_MAX;   // and from this one on
  ElementType producer_element = ElementType::kBFloat16;
  std::vector<float> producer_scales;  // [wire layers][wire planes], or empty for 1
  friend bool operator==(const PanelFormat&, const PanelFormat&) = default;
};

// Maps panels of the wire to one side's memory. Immutable, safe to use from several threads; refers
// to nothing that it does not own.
class PanelPlan {
 public:
  // Arguments as CopyPlan's. Throws Error(kInvalid) for what does not fit, Error(kMismatch) where
  // the producer's elements can't become the layout's.
  PanelPlan(const CacheLayout& layout, const BlockTable& table, const Slice& slice,
            std::vector<uint32_t> plane_of, PanelFormat format);

  uint32_t num_panels() const { return num_layers_ * panels_per_layer(); }
  // Panels of one wire layer; all layers have as many.
  uint32_t panels_per_layer() const { return num_planes() * num_runs_ * num_heads_; }
  // Bytes of the elements of panels [begin, end), as this side's cache holds them.
  uint64_t memory_bytes(uint32_t begin, uint32_t end) const;
  // Most bytes that a chunk of panels [begin, end) has: with every row of it raw. The same on both
  // sides.
  uint64_t most_bytes(uint32_t begin, uint32_t end) const;
  // Of the plan itself, in memory.
  uint64_t plan_bytes() const;

  const PanelFormat& format() const { return format_; }

  // The slots behind the last token in its block, as CopyPlan's.
  void append_tail_runs(std::vector<Run>& runs) const;

 private:
  friend class PanelCursor;
  friend class PanelCoder;
  friend class GpuPanelTable;

  // Consecutive tokens that are cut into runs of panel_tokens; the last run may be shorter.
  struct Stretch {
    bool coded = false;
    uint32_t first_token = 0;  // of the slice, from 0
    uint32_t first_run = 0;
    uint32_t runs = 0;
    uint32_t last_rows = 0;
  };

  // What some panels amount to.
  struct Extent {
    uint64_t memory_bytes = 0;  // in this side's cache
    uint64_t panel_bytes = 0;   // on the wire
    uint64_t coded_rows = 0;    // rows that may be exceptions
    uint64_t raw_bytes = 0;     // of those rows, as exceptions

    Extent operator+(const Extent& other) const {
      return {memory_bytes + other.memory_bytes, panel_bytes + other.panel_bytes,
              coded_rows + other.coded_rows, raw_bytes + other.raw_bytes};
    }
    Extent operator-(const Extent& other) const {
      return {memory_bytes - other.memory_bytes, panel_bytes - other.panel_bytes,
              coded_rows - other.coded_rows, raw_bytes - other.raw_bytes};
    }
    Extent operator*(uint64_t n) const {
      return {memory_bytes * n, panel_bytes * n, coded_rows * n, raw_bytes * n};
    }
  };

  struct Plane {
    uint32_t content = 0;
    Encoding encoding;
    std::array<Extent, 3> full = {};    // a panel of panel_tokens rows, by stretch
    std::array<Extent, 3> last = {};    // the last panel of the stretch
    std::array<Extent, 3> before = {};  // one head's panels in the stretches before
    Extent before_plane;                // all panels of the layer's planes before
  };

  struct View {
    PlaneView memory;       // `data` at the first head
    Conversion conversion;  // from the producer's elements to the cache's own
  };

  uint32_t num_planes() const { return static_cast<uint32_t>(planes_.size()); }
  // One of views_, where one does the same.
  Conversion conversion(const Stored& producer, const Stored& own) const;
  void cut_stretches(uint32_t begin, uint32_t end);
  void measure_planes(const CacheLayout& layout, const std::vector<uint32_t>& plane_of);
  Extent panel_extent(const Plane& plane, bool coded, uint32_t rows) const;
  size_t stretch_of(uint32_t run) const;
  Extent extent_before(uint32_t panel) const;
  Extent extent_of(uint32_t begin, uint32_t end) const;
  uint64_t chunk_bytes(const Extent& panels, uint64_t exceptions, uint64_t raw_bytes) const;

  PanelFormat format_;
  ElementType element_ = ElementType::kBFloat16;
  bool produces_ = false;  // the cache holds what the format says that the producer's does
  uint32_t block_size_ = 0;
  uint32_t num_layers_ = 0;
  uint32_t num_heads_ = 0;
  uint32_t num_tokens_ = 0;
  uint32_t num_runs_ = 0;
  uint32_t first_slot_ = 0;       // of the first token, in blocks_[0]
  std::vector<uint32_t> blocks_;  // of the slice's tokens
  std::array<Stretch, 3> stretches_ = {};
  std::vector<Plane> planes_;
  Extent layer_extent_;
  std::vector<View> views_;        // [wire layers][wire planes]
  std::vector<std::byte> header_;  // of a chunk of no panels
};

struct CodedChunk {
  uint32_t bytes = 0;
  uint32_t exceptions = 0;  // rows that went raw
  Digest digest;
};

// Gathers and encodes panels [begin, end) into `wire`, which has most_bytes() bytes, and digests
// what it wrote, all in one pass. Thread-safe; allocates little. Throws Error(kInvalid) for a range
// that is empty or out of range, and where the plan's cache does not hold what its format says that
// the producer's does. `stream` is as in pack().
CodedChunk pack_panels(const PanelPlan& plan, uint32_t begin, uint32_t end, std::byte* wire,
                       uint64_t seed, bool with_digest = true, bool stream = false);

struct DecodedChunk {
  Digest digest;
  Loss loss;
  uint32_t exceptions = 0;
};

// Decodes and scatters a chunk of panels [begin, end), `bytes` long, and digests it in the same
// pass. Throws Error(kProtocol), naming the field and both values, for a header that is not the
// expected one and for a chunk of another length than its header says, before it writes anything;
// nothing outside the plan's rows is ever written, even when the peer changes `wire` meanwhile. The
// caller compares the digest before it publishes the blocks.
DecodedChunk unpack_panels(const PanelPlan& plan, uint32_t begin, uint32_t end,
                           const std::byte* wire, uint64_t bytes, uint64_t seed,
                           bool with_digest = true);

// Zeroes what plan.append_tail_runs() names.
void zero_tail(const PanelPlan& plan);

}  // namespace kvxfer

#endif  // KVXFER_PANEL_PLAN_H_
