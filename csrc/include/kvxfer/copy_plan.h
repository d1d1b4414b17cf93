#ifndef KVXFER_COPY_PLAN_H_
#define KVXFER_COPY_PLAN_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "kvxfer/layout.h"

namespace kvxfer {

// Axes of the wire outside the content. A Tile is a token range that lies in one block on both
// sides; Token is the position within the tile, so Tile always stands outside Token. The content of
// one (layer, plane, head, token), a row, is always innermost and contiguous on the wire.
enum class Axis : uint8_t { kLayer = 0, kPlane = 1, kTile = 2, kHead = 3, kToken = 4 };
using WireOrder = std::array<Axis, 5>;  // outermost first

// `count` pieces of `bytes` bytes, `stride` bytes apart in memory, consecutive on the wire.
struct Run {
  std::byte* address = nullptr;
  uint64_t bytes = 0;
  uint64_t count = 1;
  int64_t stride = 0;
};

// Where a request's tokens lie in one side's cache: token `first_token` is at `first_slot` of
// blocks[0], and the following ones fill the blocks in order.
struct BlockTable {
  std::vector<uint32_t> blocks;
  uint32_t first_token = 0;
  uint32_t first_slot = 0;

  // Throws Error(kInvalid): id out of range, `unique` and repeated, or fewer slots than needed for
  // tokens [begin, end).
  void validate(const CacheLayout& layout, uint32_t begin, uint32_t end, bool unique) const;
};

// Ends of the tiles of tokens [begin, end): every place where a block ends on either side.
// The last element is `end`. A block size and the slot of token `begin` within its block per side.
std::vector<uint32_t> tile_ends(uint32_t begin, uint32_t end, uint32_t producer_block_size,
                                uint32_t producer_slot, uint32_t consumer_block_size,
                                uint32_t consumer_slot);

// The order in which runs are longest on both sides together. With `layer_first` the layer is
// outermost, so that a layer can be sent as soon as it is ready. Layouts need no valid `data`
// for this, only views' addresses relative to each other. Layers and planes are matched by name;
// throws Error(kMismatch) when there is nothing in common.
WireOrder choose_wire_order(const CacheLayout& producer, const CacheLayout& consumer,
                            bool layer_first);

// Maps bytes of the wire to one side's memory. Immutable, safe to use from several threads; refers
// to nothing that it does not own.
class CopyPlan {
 public:
  // `slice.layers` index `layout.layers`, in wire order: entry i is wire layer i.
  // `plane_of[i]` is the layout's plane that is wire plane i. The layout is taken to be valid; the
  // rest is checked, and what does not fit it throws Error(kInvalid).
  CopyPlan(const CacheLayout& layout, const BlockTable& table, const Slice& slice,
           std::vector<uint32_t> tile_ends, const WireOrder& order, std::vector<uint32_t> plane_of);

  uint64_t wire_bytes() const { return wire_bytes_; }
  // Of the plan itself, in memory.
  uint64_t plan_bytes() const;

  // Largest row boundary that is <= offset (and <= wire_bytes()). The same on both sides.
  uint64_t row_floor(uint64_t offset) const;

  // Wire layers whose bytes lie in [begin, end), as a half-open range of wire layer indices: exact
  // when Layer is outermost, else all.
  std::pair<uint32_t, uint32_t> layers_of(uint64_t begin, uint64_t end) const;

  // Appends the runs of wire bytes [begin, end), both on row boundaries, in wire order, merged as
  // far as memory allows. Throws Error(kInvalid) for a range that is not.
  void append_runs(uint64_t begin, uint64_t end, std::vector<Run>& out) const;

  // Appends runs that cover the slots behind token_end in its block, for every layer, plane and
  // head of the slice (what a consumer zeroes). Nothing when the block is full.
  void append_tail_runs(std::vector<Run>& out) const;

 private:
  friend class RunCursor;
  friend class OrderJudge;

  struct Tile {
    uint32_t block = 0;
    uint32_t slot = 0;
    uint32_t tokens = 0;
    uint32_t before = 0;  // tokens in the tiles before it
  };

  // How many tokens a tile must have for the sub-nest at a depth to be one piece of memory.
  static constexpr uint32_t kNever = 0;
  static constexpr uint32_t kAlways = UINT32_MAX;
  using Contiguity = std::array<uint32_t, 6>;  // by depth; 5 is the content

  // Indices by depth: wire position of a row.
  using Position = std::array<uint32_t, 5>;

  CopyPlan() = default;
  void set_order(const WireOrder& order);
  void find_contiguity();
  uint32_t contiguity_at(size_t depth, uint32_t layer, uint32_t plane) const;
  // Pieces of memory that one tile of the sub-nest is in, not merged with what lies outside it.
  uint64_t count_pieces(size_t depth, uint32_t layer, uint32_t plane, uint32_t tile_tokens) const;
  size_t depth_of(Axis axis) const { return depth_of_[static_cast<size_t>(axis)]; }
  size_t view_index(uint32_t layer, uint32_t plane) const {
    return layer * row_bytes_.size() + plane;
  }

  // Bytes on the wire of the sub-nest at `depth` (5 is a row), for the wire plane and the tokens of
  // the tile that the outer axes are at. Both are ignored where their axis is part of the sub-nest.
  uint64_t nest_bytes(size_t depth, uint32_t plane, uint32_t tile_tokens) const;
  // The same, divided by the plane's row_bytes_ where the plane is an outer axis.
  uint64_t nest_units(size_t depth, uint32_t tile_tokens) const;

  // The row that wire byte `offset` < wire_bytes() is in; returns how far into it.
  uint64_t seek(uint64_t offset, Position& position) const;

  size_t element_bytes_ = 0;
  uint32_t block_size_ = 0;
  uint32_t num_layers_ = 0;
  uint32_t num_heads_ = 0;
  uint32_t num_tokens_ = 0;
  uint64_t wire_bytes_ = 0;
  WireOrder order_ = {};
  std::array<size_t, 5> depth_of_ = {};
  std::array<uint64_t, 6> nest_factor_ = {};  // what does not depend on the plane or the tile
  std::vector<uint64_t> row_bytes_;           // [wire planes]
  std::vector<uint64_t> row_bytes_before_;    // of the wire planes before
  std::vector<PlaneView> views_;        // [wire layers][wire planes], `data` at the first head
  std::vector<Contiguity> contiguity_;  // like views_
  std::vector<Tile> tiles_;
};

}  // namespace kvxfer

#endif  // KVXFER_COPY_PLAN_H_
